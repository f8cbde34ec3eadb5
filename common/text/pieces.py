"""Pieces of documents: what a run of tokens, cut from documents laid end to end, is made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Pieces(NamedTuple):
    """Tokens [starts[i], starts[i] + lengths[i]) of document records[i], in order; int64 [n] each, no length 0."""

    records: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def between(cls, records: np.ndarray, bounds: np.ndarray, begin: int, end: int) -> Pieces:
        """Of tokens [begin, end), where document records[i] (int64 [m]) has [bounds[i], bounds[i + 1]), in order."""
        first = int(np.searchsorted(bounds, begin, side="right")) - 1
        last = int(np.searchsorted(bounds, end, side="left"))
        edges = np.clip(bounds[first : last + 1], begin, end)
        found = cls(records[first:last], edges[:-1] - bounds[first:last], np.diff(edges))
        return found.filled()

    @classmethod
    def together(cls, parts: list[Pieces]) -> Pieces:
        """One after the other."""
        nothing = np.zeros(0, np.int64)
        return (
            cls(*(np.concatenate([nothing, *arrays]) for arrays in zip(*parts, strict=True)))
            if parts
            else cls(nothing, nothing, nothing)
        )

    def filled(self) -> Pieces:
        """Without those that have no token."""
        return self if self.lengths.all() else Pieces(*(array[self.lengths > 0] for array in self))

    def cut(self, context: int) -> Pieces:
        """The same tokens, no piece of which goes over a multiple of `context`."""
        ends = np.cumsum(self.lengths)
        total = int(ends[-1]) if len(ends) else 0
        begins = np.union1d(ends - self.lengths, np.arange(0, total, context))
        piece = np.searchsorted(ends, begins, side="right")
        starts = self.starts[piece] + begins - (ends - self.lengths)[piece]
        return Pieces(self.records[piece], starts, np.diff(np.append(begins, total)))
