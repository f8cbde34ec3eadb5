"""Proteins that are longer than the model has seen: in windows that overlap by half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from common.files.alphabet import encode


class Window(NamedTuple):
    """Residues [start, start + length) of a protein; [begin, end), counted in it, are the ones to take of it."""

    start: int
    length: int
    begin: int
    end: int


def windows(residues: int, longest: int) -> Iterator[Window]:
    """Of so many residues each window holds `longest` at most, all the same; each residue is taken of the window in
    whose middle it lies most nearly."""
    if residues <= longest:
        yield Window(0, residues, 0, residues)
        return
    count = -(-(residues - longest) // (longest // 2)) + 1
    starts = np.linspace(0, residues - longest, count).round().astype(int).tolist()
    # Half-way between the middles of two neighbours the one hands over to the other.
    borders = [0, *((a + b + longest) // 2 for a, b in zip(starts, starts[1:], strict=False)), residues]
    for start, begin, end in zip(starts, borders, borders[1:], strict=False):
        yield Window(start, longest, begin - start, end - start)


def tokens_of(sequence: bytes, start: int, length: int) -> np.ndarray:
    """`<cls> residues <eos>` of a part, uint8 [length + 2]."""
    return encode(sequence[start : start + length])
