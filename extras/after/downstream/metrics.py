"""Metrics of predictions, and their intervals over whole proteins or clusters."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

logger = logging.getLogger(__name__)
RESAMPLES = 1000
LEAST_GROUPS = 5  # of an interval: 4 have 35 different resamples, less than the 40 that a tail of 2.5 % needs


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one - one.mean(), other - other.mean()
    scale = np.sqrt((one @ one) * (other @ other))
    return float(one @ other / scale) if scale > 0 else np.nan


def _of_numbers(labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    from scipy.stats import rankdata

    around = labels - labels.mean()
    error, total = labels - predictions, around @ around
    return {
        "spearman": _correlation(rankdata(labels), rankdata(predictions)),
        "pearson": _correlation(labels, predictions),
        "r2": float(1 - error @ error / total) if total > 0 else np.nan,
        "mae": float(np.abs(error).mean()),
    }


def _of_classes(labels: np.ndarray, predictions: np.ndarray, scores: np.ndarray | None) -> dict[str, float]:
    """labels, predictions: int64 [N], indices of classes in the order of their names."""
    classes = int(max(labels.max(), predictions.max())) + 1
    confusion = np.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    there = true + predicted > 0
    values = {
        "accuracy": float(right.sum() / len(labels)),
        "balanced_accuracy": float((right[true > 0] / true[true > 0]).mean()),
        "macro_f1": float((2 * right[there] / (true + predicted)[there]).mean()),
    }
    if scores is not None:
        values["auroc"] = auroc(labels == labels.max(), scores)
    return values


def auroc(positive: np.ndarray, scores: np.ndarray) -> float:
    """The pairs of a positive and another that the scores have in order, by Mann and Whitney; NaN for one class alone.

    positive: bool [N]; scores: [N].
    """
    from scipy.stats import rankdata

    ones, zeros = int(positive.sum()), int((~positive).sum())
    above = rankdata(scores)[positive].sum() - ones * (ones + 1) / 2
    return float(above / (ones * zeros)) if ones and zeros else np.nan


def _indices(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Strings as indices of their sorted classes; numbers as they are."""
    if labels.dtype.kind != "U":
        return labels, predictions
    places = np.unique(np.concatenate([labels, predictions]), return_inverse=True)[1]
    return places[: len(labels)], places[len(labels) :]


def _values(labels: np.ndarray, predictions: np.ndarray, scores: np.ndarray | None) -> dict[str, float]:
    of_numbers = labels.dtype.kind == "f"
    return _of_numbers(labels, predictions) if of_numbers else _of_classes(labels, predictions, scores)


def values_of(labels: np.ndarray, predictions: np.ndarray, scores: np.ndarray | None) -> dict[str, float]:
    """{metric: value}, as scikit-learn and scipy define them; NaN where one is not defined.

    labels, predictions: [N], floats or strings; scores: [N], of the second of two classes, or None.
    """
    return _values(*_indices(labels, predictions), scores)


def resampled(
    labels: np.ndarray,
    predictions: np.ndarray,
    scores: np.ndarray | None,
    groups: np.ndarray,
    resamples: int = RESAMPLES,
) -> dict[str, np.ndarray]:
    """{metric: [resamples]} of bootstrap samples of whole groups, of a fixed seed; {} for fewer than `LEAST_GROUPS`.

    Residues of a protein, and proteins of a cluster, are alike: drawn one by one, their interval would be too narrow.
    """
    generator = np.random.default_rng(0)
    labels, predictions = _indices(labels, predictions)
    _, group = np.unique(groups, return_inverse=True)
    members = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
    samples: dict[str, list[float]] = {}
    for _ in range(resamples if len(members) >= LEAST_GROUPS else 0):
        rows = np.concatenate([members[n] for n in generator.integers(len(members), size=len(members))])
        for name, value in _values(labels[rows], predictions[rows], None if scores is None else scores[rows]).items():
            samples.setdefault(name, []).append(value)
    return {name: np.array(values) for name, values in samples.items()}


def percentiles(values: dict[str, float], drawn: dict[str, np.ndarray]) -> dict[str, list[float | None]]:
    """{metric: [value, low, high]}: percentiles 2.5 and 97.5 of what was drawn; None where it is not defined."""
    intervals: dict[str, list[float | None]] = {}
    for name, value in values.items():
        finite = drawn[name][np.isfinite(drawn[name])] if name in drawn else np.array([])
        low, high = np.percentile(finite, [2.5, 97.5]).tolist() if len(finite) else (None, None)
        intervals[name] = [value if np.isfinite(value) else None, low, high]
    return intervals


def with_intervals(
    labels: np.ndarray,
    predictions: np.ndarray,
    scores: np.ndarray | None,
    groups: np.ndarray,
    resamples: int = RESAMPLES,
) -> dict[str, list[float | None]]:
    """{metric: [value, low, high]}; None where it is not defined. low, high: of 95 % of the bootstrap samples of whole
    groups (`resampled`), the percentile interval of Efron 1981 (Can. J. Stat. 9:139). labels, predictions, scores: as
    of `values_of`; groups: [N], a protein or a cluster."""
    drawn = resampled(labels, predictions, scores, groups, resamples)
    return percentiles(values_of(labels, predictions, scores), drawn)


def log_undefined(where: str, split: str, labels: set[str] | set[float], groups: int) -> None:
    """Log lines for a split of a single group, and for one whose labels are all the same.

    labels: the different ones of the split; groups: its proteins or clusters.
    """
    if groups == 1:
        logger.warning("%s: one protein or cluster in the %s split: its metrics say nothing of others", where, split)
    if len(labels) == 1:
        label = next(iter(labels))
        what = "auroc is" if isinstance(label, str) else "spearman, pearson and r2 are"
        logger.warning("%s: all labels of the %s split are %.40s: %s not defined", where, split, label, what)


def shown(part: Sequence[float | None] | None) -> str:
    """A metric with its interval, for a table; `-` where it is not defined."""
    value, low, high = ("-" if each is None else f"{each:.3f}" for each in part or (None, None, None))
    return f"{value} ({low}, {high})" if part and part[1] is not None else value


def about_intervals(over: str, counts: dict[str, int]) -> str:
    """What the intervals of a table are over, for the line below it. over: "proteins" or "clusters"; counts: of each
    part that was evaluated."""
    parts = " and ".join(f"{count:,} {part}" for part, count in counts.items())
    few = [part for part, count in counts.items() if count < LEAST_GROUPS]
    if len(few) == len(counts):
        return f"no intervals over {parts} {over}: fewer than {LEAST_GROUPS}"
    return f"in brackets 95 % bootstrap intervals over {parts} {over}" + "".join(f" (too few {part})" for part in few)
