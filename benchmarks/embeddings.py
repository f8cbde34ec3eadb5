"""embed.py's way with proteins beside transformers' own, padded batches: residues a second, on one CPU or GPU.

python -m benchmarks.embeddings --fasta my.fasta [--config_name facebook/esm2_t6_8M_UR50D] [--output table.md]

Weights are random: speed does not depend on them. The stock model gets the proteins as a user would give them, in the
order of the file, so many at a time, cut at the same length and padded to the longest of each batch; and, for a
stricter look, sorted by length. All take turns in one process, round after round; numbers are medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
from transformers import EsmModel

from benchmarks.measuring import publish, say, spread, where_measured
from common.models.esm2.alphabet import PAD, encode
from common.models.esm2.config import load_config
from common.models.esm2.convert import pieces_to_hf, save_pretrained
from common.models.esm2.model import build_model
from extras.inference.encoder import Encoder, EncoderFlags, embed
from extras.sources.fasta import read_fasta


@torch.inference_mode()
def stock(model: EsmModel, texts: list[bytes], batch: int, longest: int) -> list[torch.Tensor]:
    """Means over residues, of padded batches."""
    means = []
    for start in range(0, len(texts), batch):
        rows = [torch.from_numpy(encode(text[: longest - 2])).long() for text in texts[start : start + batch]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, PAD).to(model.device)
        hidden = model(input_ids=ids, attention_mask=(ids != PAD).long()).last_hidden_state
        means += [each[1 : len(row) - 1].mean(0) for each, row in zip(hidden, rows, strict=True)]
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--config_name", default="facebook/esm2_t6_8M_UR50D")
    parser.add_argument("--proteins", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output")
    args = parser.parse_args()
    proteins = [(name.decode(), text) for name, text in islice(read_fasta(args.fasta), args.proteins)]
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(args.config_name)
        held = dict(build_model(config, seed=1).named_parameters())
        save_pretrained(pieces_to_hf(lambda name: held[name].detach(), config, {}), config, Path(directory, "model"))
        held.clear()
        encoder = Encoder(EncoderFlags(model_name_or_path=f"{directory}/model"))
        theirs = EsmModel.from_pretrained(f"{directory}/model", add_pooling_layer=False).eval().to(encoder.device)
    longest = encoder.flags.max_seq_length
    proteins = [(name, text[: longest - 2]) for name, text in proteins]  # no windows: both compute the same residues
    texts = [text for _, text in proteins]
    by_length = sorted(texts, key=len)
    ways = {
        "`embed.py`: packed": lambda: [each.mean(0) for each in embed(encoder, proteins)],
        f"transformers, batches of {args.batch}, padded": lambda: stock(theirs, texts, args.batch, longest),
        f"transformers, batches of {args.batch}, sorted by length": lambda: stock(
            theirs, by_length, args.batch, longest
        ),
        "transformers, one at a time": lambda: stock(theirs, texts, 1, longest),
    }
    first = {name: way() for name, way in ways.items()}  # warm, and the same numbers
    names = list(ways)
    worst = max((a - b.cpu()).abs().max().item() for a, b in zip(first[names[0]], first[names[1]], strict=True))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
            say(f"round {number + 1}/{args.rounds}  {name}: {seconds[name][-1]:.2f} s")
    residues = sum(map(len, texts))
    where, command = where_measured("benchmarks.embeddings", "torch", "transformers")
    lines = ["# Embeddings beside transformers", "", where, "", command, ""]
    lines += [
        f"{len(texts)} proteins of {residues:,} residues, {args.config_name}, fp32, {args.rounds} rounds in turns. "
        f"The largest difference of a mean between the first two rows: {worst:.1e}.",
        "",
        "| | residues/s | spread | `embed.py` is faster by |",
        "|---|--:|--:|--:|",
    ]
    ours_s = statistics.median(seconds[names[0]])
    for name in names:
        middle = statistics.median(seconds[name])
        ratio = "" if name == names[0] else f"{middle / ours_s:.2f} x"
        lines.append(f"| {name} | {residues / middle:,.0f} | {spread(seconds[name]):.0%} | {ratio} |")
    publish("\n".join(lines), args.output)


if __name__ == "__main__":
    main()
