"""Masked diffusion of a toy alphabet, enumerated in float64 by its three definitions."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import numpy as np


def masked_sums(table: np.ndarray, true: list[int]) -> dict[tuple[int, ...], float]:
    """{masked positions: sum over them of -log p(true letter | visible ones)} of every mask of a sequence.

    table: float64 [masks, L, letters], probabilities for each mask, numbered by the sum of 2^position.
    """
    places = range(len(true))
    masks = [mask for n in range(len(true) + 1) for mask in combinations(places, n)]
    return {mask: -sum(math.log(table[sum(1 << i for i in mask), i, true[i]]) for i in mask) for mask in masks}


def over_rates(sums: dict[tuple[int, ...], float], length: int) -> float:
    """The integral over t in (0, 1] of 1/t * E[masked sum]; Gauss-Legendre quadrature, exact for polynomials in t."""
    nodes, weights = np.polynomial.legendre.leggauss(length + 1)
    times = (nodes + 1) / 2
    expected = sum(times ** (len(m) - 1) * (1 - times) ** (length - len(m)) * s for m, s in sums.items() if m)
    return float((weights / 2 * expected).sum())


def over_orders(sums: dict[tuple[int, ...], float], table: np.ndarray, true: list[int]) -> float:
    """The mean over all orders of -log p(sequence), its letters opened one by one."""
    length = len(true)
    total = 0.0
    for order in permutations(range(length)):
        for n, i in enumerate(order):
            total -= math.log(table[sum(1 << j for j in order[n:]), i, true[i]])
    return total / math.factorial(length)


def over_sizes(sums: dict[tuple[int, ...], float], length: int) -> float:
    """sum over n of 1/n * mean masked sum over masks of n positions."""
    by_size = [[s for mask, s in sums.items() if len(mask) == n] for n in range(1, length + 1)]
    return sum(float(np.mean(values)) / n for n, values in enumerate(by_size, start=1))
