"""Scores of mutations beside measured effects: Spearman's correlation, its interval, and baselines without a model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.models.esm2.alphabet import TOKENS
from extras.after.inference.indels import Variants
from extras.after.inference.mutation_scores import Variant
from extras.prepare.sample import BACKGROUND, RESIDUES, blosum62

logger = logging.getLogger(__name__)
RESAMPLES = 1000
LEAST = 3  # variants that a correlation needs
BLOSUM62 = blosum62()


class Correlation(NamedTuple):
    """Spearman's, with a 95 % bootstrap interval."""

    spearman: float
    low: float
    high: float


def correlation(scores: Sequence[float], measured: Sequence[float]) -> Correlation | None:
    """None where it is undefined: fewer than `LEAST` values, or all alike.

    The interval: percentiles of `RESAMPLES` resamples of the variants, of a fixed seed. A resample is a count of each
    variant, so that its mid-ranks need no sorting: they are sums of the counts along the ranks of the whole.
    """
    whole, rows = spearman(scores, measured), len(scores)
    if rows < LEAST or math.isnan(whole):
        return None
    ranks = _dense_ranks(scores), _dense_ranks(measured)
    random = np.random.default_rng(0)
    resampled = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        counts = np.bincount(random.integers(0, rows, rows), minlength=rows).astype(float)
        resampled[number] = _spearman(counts, *ranks)
    low, high = np.nanpercentile(resampled, (2.5, 97.5))
    return Correlation(whole, float(low), float(high))


def spearman(scores: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation, with mid-ranks of ties; NaN where one side is constant."""
    return _spearman(np.ones(len(scores)), _dense_ranks(scores), _dense_ranks(measured))


def _dense_ranks(values: Sequence[float]) -> np.ndarray:
    return np.unique(np.asarray(values, np.float64), return_inverse=True)[1]


def _spearman(counts: np.ndarray, *dense: np.ndarray) -> float:
    """Spearman's correlation of values given by dense ranks, each taken `counts` times; NaN if a side is constant."""
    x, y = (_mid_ranks(counts, each) for each in dense)
    x, y = (each - np.average(each, weights=counts) for each in (x, y))
    # Sums, no dot products: BLAS would use threads, which are slow where cores are shared.
    norm = (counts * x * x).sum() * (counts * y * y).sum()
    return float((counts * x * y).sum() / math.sqrt(norm)) if norm > 0 else math.nan


def _mid_ranks(counts: np.ndarray, dense: np.ndarray) -> np.ndarray:
    of_value = np.bincount(dense, weights=counts)
    return (np.cumsum(of_value) - (of_value - 1) / 2)[dense]


# ---- baselines, which know no more than the residues that change ----------------------------------------------------


def _blosum62(old: str, new: str) -> float:
    return float(BLOSUM62[RESIDUES.index(old), RESIDUES.index(new)])


def _log_frequency(old: str, new: str) -> float:
    return math.log(BACKGROUND[RESIDUES.index(new)] / BACKGROUND[RESIDUES.index(old)])


BASELINES: dict[str, Callable[[str, str], float]] = {
    "blosum62": _blosum62,
    "residue_frequency": _log_frequency,
}


def baseline(variant: Variant, of: Callable[[str, str], float]) -> float:
    """The sum over the mutations. A wild type U or O counts as C or K."""
    return sum((of(_letter(m.wild), _letter(m.mutant)) for m in variant.mutations if m.wild != m.mutant), 0.0)


def _letter(token: int) -> str:
    return {"U": "C", "O": "K"}.get(TOKENS[token], TOKENS[token])


def baselines_of(variants: Variants) -> dict[str, list[float]]:
    """{name: of each variant} by the predictors without a model; of another one where a variant has another length."""
    substitutions = [variant for variant in variants if isinstance(variant, Variant)]
    if len(substitutions) < len(variants):  # no table of substitutions says what an insertion costs
        return {"length_change": [-abs(len(each.sequence) - len(each.protein)) for each in variants]}
    return {name: [baseline(variant, of) for variant in substitutions] for name, of in BASELINES.items()}


def correlations(
    scores: dict[str, Sequence[float]], measured: Sequence[float], variants: Variants
) -> dict[str, Correlation]:
    """Spearman's correlation with `measured` of each column of scores and each baseline, if it is defined."""
    by_name = {name: correlation(values, measured) for name, values in (scores | baselines_of(variants)).items()}
    return {name: each for name, each in by_name.items() if each is not None}


def as_table(found: dict[str, Correlation]) -> Iterable[str]:
    width = max(map(len, found), default=0)
    return (
        f"  {name:{width}}  {each.spearman:6.3f}  ({each.low:.3f} to {each.high:.3f})" for name, each in found.items()
    )


def correlate(
    scores: dict[str, np.ndarray],
    measured: list[float],
    proteins: Sequence[str],
    variants: Variants,
) -> dict[str, dict]:
    """{protein: {variants, and of each score: spearman, low, high}} over its rows that have a measurement."""
    found: dict[str, dict] = {}
    for protein in dict.fromkeys(proteins):
        rows = [n for n, name in enumerate(proteins) if name == protein and not math.isnan(measured[n])]
        of_rows = {name: values[rows].tolist() for name, values in scores.items()}
        made = correlations(of_rows, [measured[n] for n in rows], [variants[n] for n in rows])
        found[protein] = {"variants": len(rows)} | {name: each._asdict() for name, each in made.items()}
    return found


def log_correlations(column: str, found: dict[str, dict]) -> None:
    """A table of one protein, or the means of several."""
    total = sum(each["variants"] for each in found.values())
    names = list(dict.fromkeys(name for each in found.values() for name in each if name != "variants"))
    if not names:
        logger.warning("%s: too few different values to correlate with", column)
    elif len(found) == 1:
        (of_one,) = found.values()
        table = as_table({name: Correlation(**of_one[name]) for name in names})
        title = f"Spearman correlation with {column}, {total:,} variants (95 % bootstrap interval over the variants):"
        logger.info("%s", "\n".join([title, *table]))
    else:
        title = f"Spearman correlation with {column}, {total:,} variants, mean ± standard error over proteins:"
        rows = [mean_row(name, [each[name]["spearman"] for each in found.values() if name in each]) for name in names]
        logger.info("%s", "\n".join([title, *rows]))


def mean_row(name: str, values: list[float]) -> str:
    error = f" ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"  {name}  {np.mean(values):.3f}{error}  ({len(values)} proteins)"
