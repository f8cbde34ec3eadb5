"""Random draws of letters that are a function of a key, not of the batch in which a model computed them.

The same protein gives logits that differ in the last bits between batches. A draw that such a difference could change
is reported as a tie; the caller computes the logits again, with the protein alone in the batch, and takes that result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.data.counter_rng import derive_key, hash_counters

# Above what batches change in probabilities and log-probabilities in fp32, about 1e-6; too little for bf16.
TIE = 1e-4
# Purposes of keys, apart from those of common.data.counter_rng.
LETTER, OPENS, CLOSES, ORDER, LENGTH = range(101, 106)


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 for the most probable letter; top_k: 0 for all letters."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def tie(self) -> float:
        return min(TIE / min(self.temperature or 1.0, 1.0), 0.5)


class Drawn(NamedTuple):
    """letters: int [n], columns of the logits; log_p: float64 [n], nats, their log-probability at temperature 1 among
    all columns; is_tie: bool [n], whether other rounding could change the letter."""

    letters: np.ndarray
    log_p: np.ndarray
    is_tie: np.ndarray


def uniforms(key: tuple[int, ...], counters: np.ndarray) -> np.ndarray:
    """float64 in [0, 1), of the shape of `counters`."""
    return (hash_counters(derive_key(*key), counters) >> np.uint64(11)) * 2.0**-53


def draw(logits: np.ndarray, uniform: np.ndarray, how: Sampling) -> Drawn:
    """A letter for each row of logits [n, letters], by the inverse of its distribution function at uniform [n]."""
    logits = logits.astype(np.float64)
    log_p = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    rows = np.arange(len(logits))
    ordered = -np.sort(-log_p, axis=1)
    if how.temperature == 0:
        letters = log_p.argmax(1)
        is_tie = ordered[:, 0] - ordered[:, 1] < TIE
        return Drawn(letters, log_p[rows, letters], is_tie)
    weights = np.exp((log_p - ordered[:, :1]) / how.temperature)
    weights /= weights.sum(1, keepdims=True)
    weights, is_tie = _cut(weights, how)
    ends = weights.cumsum(1)
    target = uniform[:, None] * ends[:, -1:]
    letters = np.minimum((ends <= target).sum(1), logits.shape[1] - 1)
    distance = np.where(weights > 0, abs(ends / ends[:, -1:] - uniform[:, None]), 1.0)
    distance = np.minimum(distance.min(1), uniform)
    return Drawn(letters, log_p[rows, letters], is_tie | (distance < how.tie))


def _cut(weights: np.ndarray, how: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The weights [n, letters] with 0 for letters past top_k and top_p, and bool [n]: rounding could change which."""
    count = weights.shape[1]
    if how.top_p >= 1 and not 0 < how.top_k < count:
        return weights, np.zeros(len(weights), bool)
    order = np.argsort(-weights, axis=1, kind="stable")
    ordered = np.take_along_axis(weights, order, 1)
    before = ordered.cumsum(1) - ordered
    kept = np.broadcast_to(np.arange(count) < (how.top_k or count), weights.shape) & (before < how.top_p)
    last = kept.sum(1) - 1
    rows = np.arange(len(weights))
    dropped = np.where(last + 1 < count, ordered[rows, np.minimum(last + 1, count - 1)], -1.0)
    near = abs(before - how.top_p).min(1) < how.tie if how.top_p < 1 else np.zeros(len(weights), bool)
    is_tie = near | (ordered[rows, last] - dropped < how.tie)
    result = np.zeros_like(weights)
    np.put_along_axis(result, order, np.where(kept, ordered, 0.0), 1)
    return result, is_tie
