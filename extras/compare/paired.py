"""Differences of two groups' held-out losses, paired over proteins and seeds, with an error that counts both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from common.training.protein_losses import mean_and_error
from extras.compare.runs import Group

SIGNIFICANCE, POWER = 0.05, 0.8  # two-sided


@dataclass(frozen=True)
class Difference:
    """How far the second group's loss is below the first's, in nats a hidden residue.

    over_proteins: standard error over `units` proteins (or clusters); over_seeds: over `seeds` seeds, NaN of one.

    Proteins and seeds are crossed: the run of every seed answers for every protein. Let the difference of seed s on
    protein i be d + a_s + b_i + c_si. Over S seeds and m proteins its mean has the variance var(a)/S + var(b)/m +
    var(c)/(S m). The squared error over proteins, of differences averaged over the seeds, is on average var(b)/m +
    var(c)/(S m), and that over seeds var(a)/S + var(c)/(S m). `error`, the root of their sum, counts the last term
    twice: on average it is not too small (for the crossed model see Owen 2007, The pigeonhole bootstrap).
    """

    mean: float
    over_proteins: float
    over_seeds: float
    units: float
    unit: str
    seeds: int

    @property
    def error(self) -> float:
        """Standard error that counts proteins and seeds; of a single seed the proteins alone."""
        return self.over_proteins if math.isnan(self.over_seeds) else math.hypot(self.over_proteins, self.over_seeds)

    @property
    def critical(self) -> float:
        """How many errors from zero the mean is seen to differ, at 5 %, two-sided.

        The mean of Student's quantiles for proteins and for seeds, weighted by the squared errors (Cochran and Cox
        1950, Experimental Designs, 4.14). Where nothing differs, simulated tests with 2 to 5 seeds report a difference
        in at most 7 % of the cases; twice the error would in up to 28 %. The spread over seeds is that of these two
        groups: pooled over all, it would be too small for a group that varies more, in simulations up to 17 %.
        """
        parts = [(self.over_proteins, self.units)]
        if not math.isnan(self.over_seeds):
            parts.append((self.over_seeds, self.seeds))
        weights = [error**2 for error, _ in parts]
        quantiles = [float(stats.t.ppf(1 - SIGNIFICANCE / 2, number - 1)) for _, number in parts]
        return float(np.average(quantiles, weights=weights)) if sum(weights) else quantiles[0]

    @property
    def is_seen(self) -> bool:
        return abs(self.mean) > self.critical * self.error

    def would_see(self, smallest: float) -> bool:
        """Whether a true difference of `smallest` nats is seen with a probability of 80 %."""
        return smallest >= (self.critical + float(stats.norm.ppf(POWER))) * self.error

    def units_to_see(self, smallest: float) -> float:
        """How many proteins (clusters) that takes, to 2 %, with the same seeds: the squared error over proteins falls
        with their number. inf if the error over seeds alone is too large."""
        numbers = (self.units * 1.02**power for power in range(1000))
        return next((number for number in numbers if self._with(number, self.seeds).would_see(smallest)), math.inf)

    def seeds_to_see(self, smallest: float) -> float:
        """How many seeds that takes, with the same proteins; inf if the error over proteins alone is too large."""
        numbers = range(self.seeds, 1000)
        return next((number for number in numbers if self._with(self.units, number).would_see(smallest)), math.inf)

    def _with(self, units: float, seeds: int) -> Difference:
        """The difference expected with so many proteins and seeds: standard errors shrink by square roots."""
        over_proteins = self.over_proteins * math.sqrt(self.units / units)
        over_seeds = self.over_seeds * math.sqrt(self.seeds / seeds)
        return replace(self, over_proteins=over_proteins, over_seeds=over_seeds, units=units, seeds=seeds)


def compare(first: Group, second: Group) -> Difference | None:
    """None without losses per protein.

    Runs of the same seed are paired, others left out; groups without a common seed are paired over proteins only.
    """
    pairs = [(first.by_seed[seed], second.by_seed[seed]) for seed in first.by_seed if seed in second.by_seed]
    runs = tuple(zip(*pairs, strict=True)) if pairs else (first.runs, second.runs)
    losses = [[run.losses for run in of if run.losses is not None] for of in runs]
    if any(len(known) < len(of) for known, of in zip(losses, runs, strict=True)):
        return None
    counts, clusters = losses[0][0].masked, losses[0][0].clusters
    sums = [np.stack([each.loss_sum for each in of]) for of in losses]  # [seeds, proteins]
    mean, over_proteins = mean_and_error(sums[0].mean(0) - sums[1].mean(0), counts, clusters)
    totals = [of.sum(1) / counts.sum() for of in sums]  # [seeds]
    over_seeds = _error(totals[0] - totals[1]) if pairs else math.hypot(*map(_error, totals))
    asked = counts > 0
    units, unit = (asked.sum(), "proteins") if clusters is None else (len(np.unique(clusters[asked])), "clusters")
    return Difference(mean, over_proteins, over_seeds, int(units), unit, min(map(len, totals)))


def _error(values: np.ndarray | Sequence[float]) -> float:
    """Standard error of the mean; NaN of one value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def mean_over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, NaN of one value."""
    return float(np.mean(values)), _error(values)


def verdict(first: Group, second: Group, difference: Difference, smallest: float) -> str:
    """One sentence. smallest: the difference in nats that would matter."""
    first_name, second_name, d = first.name, second.name, difference
    over = f"over {d.units:,} {d.unit}, {d.seeds} seed{'s' * (d.seeds > 1)}"
    if not math.isfinite(d.mean):
        return f"{second_name} and {first_name}: no verdict: a loss is NaN or infinite."
    one_seed = "; how far another seed moves it is not known" if d.seeds == 1 else ""
    if d.is_seen:
        better = "better" if d.mean > 0 else "worse"
        by = f"{abs(d.mean):.4f} ± {d.error:.4f}"
        return f"{second_name} is {better} than {first_name} by {by} nats a hidden residue ({over}{one_seed})."
    seen = f"no difference seen: {d.mean:+.4f} ± {d.error:.4f} nats ({over}{one_seed})"
    least = f"these show one of {d.critical * d.error:.4f} or more"
    return f"{second_name} and {first_name}: {seen}; {least}; {_needed(d, smallest)}."


def _needed(d: Difference, smallest: float) -> str:
    one = f"one of {smallest:g} nats (--smallest)"
    if d.would_see(smallest):
        return f"{one} would probably have been"
    if math.isfinite(units := d.units_to_see(smallest)):
        return f"to see {one} would need about {_rounded(units):,} {d.unit}"
    if math.isfinite(seeds := d.seeds_to_see(smallest)):
        return f"to see {one} would need about {seeds:,} seeds"
    return f"to see {one} would need more seeds and more {d.unit}"


def _rounded(number: float) -> int:
    """Up, to two digits."""
    digit = 10 ** max(0, math.floor(math.log10(number)) - 1)
    return math.ceil(number / digit) * digit
