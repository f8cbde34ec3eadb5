"""How many held-out proteins tell two runs apart: from the losses per protein that runs keep.

python -m benchmarks.held_out_power RUN RUN [RUN ...] [--output table.md]

Of each pair: how far their losses differ, and how many proteins (clusters, where the data have them) show a true
difference of so many nats a hidden residue in four of five cases, at 5 %, two-sided: with losses paired over the same
residues, and without pairing. The formula is checked by drawing that many of the held-out proteins with replacement,
moving the pair's difference to the true one, and counting how often the test sees it.
"""

from __future__ import annotations

import argparse
import math
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy import stats

from benchmarks.measuring import publish, where_measured
from common.cli import UserError, run
from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.compare.paired import POWER, SIGNIFICANCE
from extras.compare.runs import Run, check_same_questions, read_run

DIFFERENCES = (0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # nats
DRAWS = 1000


def units_of(losses: ProteinLosses) -> np.ndarray:
    """The number of each protein's cluster from 0, or its own, int64 [n]."""
    number = np.arange(len(losses.masked)) if losses.clusters is None else losses.clusters
    return np.unique(number, return_inverse=True)[1]


def needed(error: float, units: int, difference: float) -> float:
    """How many units see it, given the standard error over `units`."""
    quantiles = stats.norm.ppf(1 - SIGNIFICANCE / 2) + stats.norm.ppf(POWER)
    return units * (error * quantiles / difference) ** 2


def seen(apart: np.ndarray, counts: np.ndarray, units: int, difference: float) -> float:
    """The part of draws of so many units [n] with replacement in which the true difference is seen."""
    mean, _ = mean_and_error(apart, counts)
    moved = apart + (difference - mean) * counts
    generator, found = np.random.default_rng(0), 0
    for _ in range(DRAWS):
        drawn = generator.integers(len(counts), size=units)
        mean, error = mean_and_error(moved[drawn], counts[drawn])
        found += abs(mean) > stats.t.ppf(1 - SIGNIFICANCE / 2, units - 1) * error
    return found / DRAWS


def row(first: Run, second: Run) -> str:
    """Of Markdown: a pair of runs."""
    a, b = first.losses, second.losses
    assert a is not None  # `runs_of` has looked
    assert b is not None
    units = units_of(a)
    counts = np.bincount(units, a.masked)
    asked = counts > 0
    apart = np.bincount(units, a.loss_sum - b.loss_sum)[asked]
    alone = [np.bincount(units, each.loss_sum)[asked] for each in (a, b)]
    counts, number = counts[asked], int(asked.sum())
    mean, error = mean_and_error(apart, counts)
    unpaired = math.hypot(*(mean_and_error(each, counts)[1] for each in alone))
    cells = [f"{first.path.name}, {second.path.name}", f"{mean:+.4f} ± {error:.4f}", f"{unpaired:.4f}"]
    for difference in DIFFERENCES:
        paired, single = (math.ceil(max(2, needed(each, number, difference))) for each in (error, unpaired))
        checked = f" ({seen(apart, counts, paired, difference):.0%})" if 20 <= paired <= 20 * number else ""
        cells.append(f"{paired:,}{checked}; {single:,}")
    return f"| {' | '.join(cells)} |"


def runs_of(paths: list[str]) -> list[Run]:
    runs = [read_run(Path(path)) for path in paths]
    if len(runs) < 2:
        raise UserError("a pair is two runs: name two or more")
    if missing := [str(run.path) for run in runs if run.losses is None]:
        raise UserError(f"{missing[0]}: no losses of single proteins (eval_losses.parquet)")
    check_same_questions(runs)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output directories of the train scripts, of one held-out set"
    )
    parser.add_argument("--output")
    args = parser.parse_args()
    runs = runs_of(args.runs)
    losses = runs[0].losses
    assert losses is not None
    unit = "proteins" if losses.clusters is None else f"clusters of {len(losses.masked):,} proteins"
    counts = np.bincount(units_of(losses), losses.masked).astype(int)
    about = (
        f"Held out: {(counts > 0).sum():,} {unit}, {counts.sum():,} hidden residues. Error: standard error over them "
        "of the paired difference, and without pairing. Right: so many of them show a true difference of so many nats "
        f"in four of five cases; in brackets in how many of {DRAWS:,} draws with replacement they did; after the "
        "semicolon, without pairing."
    )
    differences = " | ".join(f"{each} nats" for each in DIFFERENCES)
    lines = [f"| runs | difference | unpaired error | {differences} |", "|---|--:|--:|" + "--:|" * len(DIFFERENCES)]
    lines += [row(first, second) for first, second in combinations(runs, 2)]
    where = where_measured("benchmarks.held_out_power", "numpy")
    publish(
        "\n".join(["# How many held-out proteins tell two runs apart", "", *where, "", about, "", *lines]), args.output
    )


if __name__ == "__main__":
    run(main)
