"""Split conformal prediction: intervals of numbers and sets of classes that hold the truth at a stated rate.

A fit is asked about labelled examples that it has not seen; how wrong it was there bounds how wrong it is elsewhere
(Lei et al. 2018, JASA 113:1094; of classes Sadinle et al. 2019, JASA 114:223). The rate holds on average over draws of
these examples and of new ones, if both are drawn alike; for proteins unlike the labelled ones it says nothing.
"""

from __future__ import annotations

import math

import numpy as np

from common.cli import UserError

COVERAGE = 0.9


def scores_of_numbers(labels: np.ndarray, predictions: np.ndarray, sigma: np.ndarray | None = None) -> np.ndarray:
    """How wrong each prediction is, [N]: the absolute error, over sigma if there is one."""
    errors = np.abs(labels - predictions)
    return errors if sigma is None else errors / sigma


def scores_of_classes(probabilities: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """1 minus the true class's probability, [N]. probabilities: [N, C]; truth: int [N], indices of classes."""
    return 1 - probabilities[np.arange(len(truth)), truth]


def quantile(scores: np.ndarray, coverage: float, where: str = "--coverage") -> float:
    """The ceil((n + 1) coverage)-th smallest of n scores: a new one is at most that with probability `coverage`.

    UserError, which begins with `where`, if so few scores bound none.
    """
    count = len(scores)
    rank = math.ceil((count + 1) * coverage - 1e-9)  # 0.9 x 10 is 9, not 10
    if rank > count:
        raise UserError(
            f"{where} {coverage:g}: {count:,} held-out labels bound no more than {count / (count + 1):.3f}: lower it, "
            "or hold out more"
        )
    return float(np.partition(scores, rank - 1)[rank - 1])


def interval(predictions: np.ndarray, bound: float, sigma: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) [N]: the prediction plus and minus the bound, times sigma if there is one. bound: of `quantile`."""
    half = bound if sigma is None else bound * sigma
    return predictions - half, predictions + half


def prediction_sets(probabilities: np.ndarray, bound: float) -> np.ndarray:
    """Which classes the set of each example has, bool [N, C]: all that score no more than the bound, and the likeliest
    one, without which a set might be empty."""
    sets = 1 - probabilities <= bound
    sets[np.arange(len(sets)), probabilities.argmax(1)] = True
    return sets
