"""How often proteins and their residues are drawn, by length: the order of packs beside a uniform draw.

python -m benchmarks.draws_by_length --dataset_dir processed/arrow [--max_seq_length 512] [--tokens_per_pack 8192]
    [--packs_per_step 1] [--epochs 100] [--output table.md]

No model runs. A step's loss is the mean over its tokens, so that a token of a badly filled step weighs more; and a
protein above --max_seq_length is cropped at a random place, so that residues near its ends are read less often.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from benchmarks.measuring import publish, where_measured
from common.cli import run
from common.data.packing import BatchPlan
from common.data.token_store import open_split
from common.models.esm2.alphabet import ESM2_TOKENS

EDGES = (0, 64, 128, 256, 512, 1024, 2048, 1 << 40)  # tokens of a protein, <cls> and <eos> included


class Draws(NamedTuple):
    """By epoch and record, float64 [epochs, n]: times drawn, when (0: at the epoch's begin, 1: at its end), and what
    one of its tokens weighs in its step, beside the mean token; how often the first, the middle and the last token of
    a record is read, [n, 3]."""

    times: np.ndarray
    when: np.ndarray
    weight: np.ndarray
    read: np.ndarray


def draws(plan: BatchPlan, lengths: np.ndarray, packs_per_step: int, epochs: int) -> Draws:
    """Of the first epochs; a step that reaches into the next epoch is counted as two."""
    times, when, weight = np.zeros((3, epochs, len(lengths)))
    read = np.zeros((len(lengths), 3))
    for epoch in range(epochs):
        windows = list(plan.windows(epoch))
        records, starts, crops = (
            np.concatenate([getattr(w, n) for w in windows]) for n in ("records", "starts", "lengths")
        )
        sizes = np.concatenate([np.diff(w.bounds) for w in windows])
        pack = np.repeat(np.arange(len(sizes)), sizes)
        step = pack // packs_per_step
        tokens = np.bincount(step, crops)
        np.add.at(times[epoch], records, 1)
        when[epoch, records] = (pack + 0.5) / len(sizes)
        weight[epoch, records] = crops.sum() / len(tokens) / tokens[step]
        for column, at in enumerate((np.zeros_like(crops), lengths[records] // 2, lengths[records] - 1)):
            read[records, column] += (starts <= at) & (at < starts + crops)
    return Draws(times, when, weight, read / epochs)


def with_error(values: np.ndarray) -> str:
    """Mean over epochs [epochs] ± its standard error."""
    return f"{values.mean():.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"


def table(found: Draws, lengths: np.ndarray) -> list[str]:
    lines = [
        "| tokens of the protein | proteins | drawn in an epoch | when in the epoch | weight of a token "
        "| first token read | middle | last |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for low, high in zip(EDGES, EDGES[1:], strict=False):
        here = (low < lengths) & (lengths <= high)
        if not here.any():
            continue
        times = found.times[:, here]
        drawn = f"{times.min():.0f}" if times.min() == times.max() else f"{times.min():.0f} to {times.max():.0f}"
        when, weight = (with_error(each[:, here].mean(1)) for each in (found.when, found.weight))
        cells = [f"{share:.1%}" for share in found.read[here].mean(0)]
        span = f"above {low:,}" if high == EDGES[-1] else f"{low + 1:,} to {high:,}"
        lines.append(f"| {span} | {here.sum():,} | {drawn} | {when} | {weight} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_dir", required=True)
    parser.add_argument("--max_seq_length", type=int, default=512)
    parser.add_argument("--tokens_per_pack", type=int, default=8192)
    parser.add_argument("--packs_per_step", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--output")
    args = parser.parse_args()
    store = open_split(args.dataset_dir, "train", ESM2_TOKENS)
    lengths = store.lengths(np.arange(len(store)))
    plan = BatchPlan(store.lengths, len(store), 42, args.max_seq_length, args.tokens_per_pack)
    found = draws(plan, lengths, args.packs_per_step, args.epochs)
    what = (
        f"{args.epochs} epochs of {len(store):,} proteins in packs of {args.tokens_per_pack:,} tokens, fill "
        f"{plan.statistics().fill:.2%}. When: 0.5 in a uniform order. Weight: 1 in a uniform order. ±: standard "
        "errors over epochs."
    )
    lines = [
        "# Draws by length",
        "",
        *where_measured("benchmarks.draws_by_length", "numpy"),
        "",
        what,
        "",
        *table(found, lengths),
    ]
    publish("\n".join(lines), args.output)


if __name__ == "__main__":
    run(main)
