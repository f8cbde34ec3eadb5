"""What token dropout's fixed scale costs a model that was trained with other masks than ESM-2's.

python -m benchmarks.token_dropout --model_name_or_path out/final_model --dataset_dir processed/arrow
    [--mlm_probability 0.25] [--output table.md]

Token dropout multiplies embeddings by (1 - expected) / (1 - found), of the fraction of <mask>. A run expects its own
fraction, 0.8 x --mlm_probability; transformers, and an export, ESM-2's 0.12. The export is compared with the same
weights at the run's own scale: `at_scale`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import load_from_disk
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.measuring import publish, where_measured
from common.cli import run
from common.models.esm2.model import TRAIN_MASK_RATIO
from extras.after.downstream.stock_model import read_stock_model
from extras.after.inference.encoder import Encoder, EncoderFlags

LONGEST = 256  # tokens of a protein that are read
HIDDEN = {"one residue": None, "12 % of the residues": 0.12, "20 % of the residues": 0.2}
ONE_AT_A_TIME = 5  # positions of a protein, where one residue is hidden


@torch.no_grad()
def at_scale(stock: Any, mask_ratio: float) -> Any:
    """The stock model, changed to what it computes where `mask_ratio` of the tokens are expected to be <mask>.

    The factor is the same for any input, and goes into the word embeddings. They are the LM head's output weights too:
    its LayerNorm is divided by it.
    """
    factor = (1 - mask_ratio) / (1 - TRAIN_MASK_RATIO)
    stock.esm.embeddings.word_embeddings.weight.mul_(factor)
    stock.lm_head.layer_norm.weight.div_(factor)
    stock.lm_head.layer_norm.bias.div_(factor)
    return stock


def protein_ids(dataset_dir: str, proteins: int) -> list[np.ndarray]:
    """Token ids uint8 of the first proteins of the validation split, of each at most `LONGEST`."""
    rows = load_from_disk(dataset_dir)["validation"]["input_ids"][:proteins]
    return [np.array(row, np.uint8)[:LONGEST] for row in rows]


def questions(proteins: list[np.ndarray], rate: float | None, mask: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """(ids with hidden residues, their indices, number of the protein), drawn with a fixed seed."""
    generator = np.random.default_rng(1)
    asked = []
    for number, ids in enumerate(proteins):
        for _ in range(ONE_AT_A_TIME if rate is None else 1):
            count = 1 if rate is None else max(1, round(rate * (len(ids) - 2)))
            at = 1 + np.sort(generator.choice(len(ids) - 2, count, replace=False))
            hidden = ids.copy()
            hidden[at] = mask
            asked.append((hidden, at, number))
    return asked


def log_p(encoder: Encoder, asked: list[tuple[np.ndarray, np.ndarray, int]]) -> Tensor:
    """[hidden residues, tokens], nats."""
    logits = encoder.logits([ids for ids, _, _ in asked], at=[at for _, at, _ in asked])
    return torch.cat(logits).log_softmax(-1)


def compare(exported: Encoder, own: Encoder, proteins: list[np.ndarray]) -> list[str]:
    """Lines of Markdown. Errors are over proteins."""
    embedded = [torch.stack([h[1:-1].mean(0) for h in encoder.hidden(proteins)]) for encoder in (exported, own)]
    cosines = F.cosine_similarity(*embedded)
    lines = [
        f"Cosine of the two mean embeddings of a protein: {cosines.mean():.4f}, at least {cosines.min():.4f}.",
        "",
    ]
    lines += [
        "| hidden | loss of the export | at the run's scale | difference | Spearman of log p of the 20 residues |",
        "|---|--:|--:|--:|--:|",
    ]
    letters = exported.alphabet.encode(b"ACDEFGHIKLMNPQRSTVWY")[1:-1].astype(np.int64)
    for name, rate in HIDDEN.items():
        asked = questions(proteins, rate, exported.alphabet.mask)
        found = [log_p(encoder, asked) for encoder in (exported, own)]
        true = torch.from_numpy(np.concatenate([proteins[n][at] for _, at, n in asked]).astype(np.int64))
        losses = [F.nll_loss(each, true, reduction="none") for each in found]
        of = torch.tensor(np.concatenate([np.full(len(at), n) for _, at, n in asked]))
        apart = torch.zeros(len(proteins)).index_add(0, of, losses[0] - losses[1]) * len(proteins) / len(true)
        error, means = apart.std() / len(apart) ** 0.5, [f"{each.mean():.4f}" for each in losses]
        rho = spearmanr(*(each[:, letters].flatten().numpy() for each in found)).statistic
        lines.append(f"| {name} | {means[0]} | {means[1]} | {apart.mean():+.4f} ± {error:.4f} | {rho:.4f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--dataset_dir", required=True, help="whose validation split it was not trained on")
    parser.add_argument("--proteins", type=int, default=400, help="the first ones of it")
    parser.add_argument("--mlm_probability", type=float, default=0.25, help="of the run")
    parser.add_argument("--output")
    args = parser.parse_args()
    flags, cpu = EncoderFlags(args.model_name_or_path), torch.device("cpu")
    stock = [read_stock_model(args.model_name_or_path, cpu) for _ in range(2)]
    encoders = [Encoder(flags, stock=each) for each in (stock[0], at_scale(stock[1], 0.8 * args.mlm_probability))]
    proteins = protein_ids(args.dataset_dir, args.proteins)
    lines = compare(*encoders, proteins)
    measured, command = where_measured("benchmarks.token_dropout", "torch")
    what = f"{len(proteins)} proteins, of each at most {LONGEST} tokens; differences ± standard errors over proteins."
    publish(
        "\n".join(["# Token dropout of a model of other masks", "", measured, "", command, "", what, "", *lines]),
        args.output,
    )


if __name__ == "__main__":
    run(main)
