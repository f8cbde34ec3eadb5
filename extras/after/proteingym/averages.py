"""Averages over assays as in ProteinGym's official tables, with bootstrap standard errors over proteins.

A value is rounded to 3 decimals for each assay; then come the mean of each (UniProt id, function type), the mean of
these for each type, and the mean over the types. An assay without a value is left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000  # as ProteinGym's
AT_A_TIME = 1000
DECIMALS = 3


class Averages(NamedTuple):
    """Of one metric, all [scores] or {key: [scores]}, NaN where there is nothing to average.

    of_ids: by UniProt id; of_types: by function type; error: standard error of `average`; error_to_best: that of its
    difference from the best score's, which is ProteinGym's own (0 for the best).
    """

    of_ids: dict[Hashable, np.ndarray]
    of_types: dict[Hashable, np.ndarray]
    average: np.ndarray
    error: np.ndarray
    error_to_best: np.ndarray


def nan_mean(values: np.ndarray) -> np.ndarray:
    """The mean over the first axis of what is not NaN."""
    there = ~np.isnan(values)
    count = there.sum(0)
    return np.where(count > 0, np.where(there, values, 0).sum(0) / np.maximum(count, 1), np.nan)


def means_by(keys: Sequence[Hashable], values: np.ndarray) -> dict[Hashable, np.ndarray]:
    """{key: mean over its rows}, in the order of the keys. values: [rows, scores]."""
    rows: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        rows.setdefault(key, []).append(number)
    return {key: nan_mean(values[rows[key]]) for key in sorted(rows, key=str)}


def by_category(ids: Sequence[str], categories: Sequence[str], values: np.ndarray) -> dict[str, np.ndarray]:
    """{category: mean over the UniProt ids in it of their means, float64 [ids, scores]}, before the last mean."""
    found: dict[str, list[np.ndarray]] = {}
    for (_, category), mean in means_by(list(zip(ids, categories, strict=True)), values).items():
        found.setdefault(category, []).append(mean)
    return {category: np.array(found[category]) for category in sorted(found)}


def averages(ids: Sequence[str], types: Sequence[str], values: np.ndarray) -> Averages:
    """ids, types: of each assay; values: [assays, scores] of one metric, NaN for none."""
    values = values.round(DECIMALS)
    of_types = by_category(ids, types, values)
    means = {category: nan_mean(rows) for category, rows in of_types.items()}
    average = nan_mean(np.array(list(means.values())))
    error, to_best = standard_errors(list(of_types.values()), average)
    return Averages(means_by(ids, values), means, average, error, to_best)


def standard_errors(of_types: Sequence[np.ndarray], average: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(standard error of the average, that of its difference from the best one), [scores], of a fixed seed.

    The UniProt ids of each type are drawn anew, as in ProteinGym; NaN unless a type has two. of_types: [ids, scores].
    """
    if max(map(len, of_types)) < 2 or np.isnan(average).all():
        return np.full(len(average), np.nan), np.full(len(average), np.nan)
    best = int(np.nanargmax(average))
    generator = np.random.default_rng(0)
    each = [np.concatenate([rows, rows - rows[:, best : best + 1]], 1) for rows in of_types]
    drawn = np.concatenate([_resampled(each, generator) for _ in range(RESAMPLES // AT_A_TIME)])
    errors = np.std(drawn, axis=0, ddof=1)
    return errors[: len(average)], errors[len(average) :]


def _resampled(of_types: Sequence[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """Means over the types of `AT_A_TIME` resamples of each type's ids, [AT_A_TIME, scores]."""
    means = []
    for rows in of_types:
        there = ~np.isnan(rows)
        counts = generator.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), AT_A_TIME).astype(float)
        total = counts @ there
        means.append(np.where(total > 0, counts @ np.where(there, rows, 0) / np.maximum(total, 1), np.nan))
    return nan_mean(np.array(means))
