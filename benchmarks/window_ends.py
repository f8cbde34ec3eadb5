"""Windows of long proteins: `<cls>` and `<eos>` around each, as embed.py reads them, or at the protein's ends only.

python -m benchmarks.window_ends --model_name_or_path out/final_model --fasta my.fasta [--output table.md]

Training crops have `<cls>` and `<eos>` only where the protein begins and ends. Both kinds of windows are compared with
the whole protein in one pass: the cosine of embeddings, and the loss of masked residues.
"""

from __future__ import annotations

import argparse
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import publish, where_measured
from common.cli import UserError, run
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.packed import Window, windows
from extras.prepare.sources.fasta import read_fasta

MASKED = 0.15  # of the residues


def read(
    encoder: Encoder, ids: np.ndarray, masked: np.ndarray, longest: int, inner_ends: bool
) -> tuple[Tensor, Tensor]:
    """(embeddings [residues, hidden], loss [masked residues]) of a protein, `<cls>` residues `<eos>`.

    masked: positions of residues; longest: residues of a window; inner_ends: whether each has `<cls>` and `<eos>`.
    """
    hidden = ids.copy()
    hidden[1 + masked] = encoder.alphabet.mask
    parts: list[tuple[Window, int]] = []
    visible, predicted, at = [], [], []
    for window in windows(len(ids) - 2, longest):
        begin = int(inner_ends or not window.start)
        end = int(inner_ends or window.start + window.length == len(ids) - 2)
        inside = masked[(masked >= window.start + window.begin) & (masked < window.start + window.end)]
        at.append(inside - window.start + begin)
        parts.append((window, begin))
        for source, texts in ((ids, visible), (hidden, predicted)):
            residues = source[1 + window.start : 1 + window.start + window.length]
            texts.append(np.concatenate((ids[:begin], residues, ids[len(ids) - end :])))
    outputs = zip(parts, encoder.hidden(visible), strict=True)
    embedded = [output[begin + window.begin : begin + window.end] for (window, begin), output in outputs]
    logits = torch.cat(encoder.logits(predicted, at=at))
    losses = F.cross_entropy(logits, torch.from_numpy(ids[1 + masked].astype(np.int64)), reduction="none")
    return torch.cat(embedded), losses


def compare(encoder: Encoder, proteins: list[bytes], longest: int) -> list[str]:
    """Lines of Markdown. Residues to mask are drawn with a fixed seed."""
    generator = np.random.default_rng(0)
    cosines: dict[bool, list[Tensor]] = {True: [], False: []}
    losses: dict[bool | None, list[Tensor]] = {True: [], False: [], None: []}
    for text in proteins:
        ids = encoder.alphabet.encode(text)
        masked = np.sort(generator.choice(len(text), int(MASKED * len(text)), replace=False))
        whole, loss = read(encoder, ids, masked, len(text), True)
        losses[None].append(loss)
        for inner_ends, found in cosines.items():
            embedded, loss = read(encoder, ids, masked, longest, inner_ends)
            found.append(F.cosine_similarity(embedded, whole))
            losses[inner_ends].append(loss)
    mean = {key: torch.cat(found).mean().item() for key, found in losses.items()}
    lines = ["| | cosine to the whole protein's | loss (nats) |", "|---|--:|--:|", f"| whole | | {mean[None]:.4f} |"]
    for inner_ends, name in ((True, "windows, each with `<cls>` and `<eos>`"), (False, "at the protein's ends only")):
        lines.append(f"| {name} | {torch.cat(cosines[inner_ends]).mean():.4f} | {mean[inner_ends]:.4f} |")
    apart = torch.cat(losses[True]) - torch.cat(losses[False])
    error = apart.std().item() / len(apart) ** 0.5
    return [
        *lines,
        "",
        f"The losses differ by {apart.mean():.5f} ± {error:.5f} nats ({len(apart):,} masked residues).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--fasta", required=True)
    parser.add_argument("--proteins", type=int, default=20, help="the first that are longer than a window")
    parser.add_argument("--window", type=int, default=1022, help="residues")
    parser.add_argument("--output")
    args = parser.parse_args()
    long = (text for _, text in read_fasta(args.fasta) if len(text) > args.window)
    proteins = list(islice(long, args.proteins))
    if not proteins:
        raise UserError(f"{args.fasta}: no protein longer than {args.window} residues: lower --window")
    lines = compare(Encoder(EncoderFlags(model_name_or_path=args.model_name_or_path)), proteins, args.window)
    measured, command = where_measured("benchmarks.window_ends", "torch")
    lengths = sorted(map(len, proteins))
    what = f"{len(proteins)} proteins of {lengths[0]:,} to {lengths[-1]:,} residues, windows of {args.window:,}."
    publish("\n".join(["# Windows of long proteins", "", measured, "", command, "", what, "", *lines]), args.output)


if __name__ == "__main__":
    run(main)
