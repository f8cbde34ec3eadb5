"""What models for inference share: their weights in memory, and sequences in windows and packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from common.models.family import Family
from common.models.layers.state_dict_adapter import Pieces


def packs(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices of the sequences of each forward pass of `most` tokens; longest first: the first needs most memory."""
    pack, tokens = [], 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        if pack and tokens + lengths[number] > most:
            yield pack
            pack, tokens = [], 0
        pack.append(number)
        tokens += lengths[number]
    if pack:
        yield pack


class Window(NamedTuple):
    """Residues [start, start + length) of a protein; results are used for [begin, end), relative to start."""

    start: int
    length: int
    begin: int
    end: int

    def residues_of(self, sequence: bytes, width: int = 1) -> bytes:
        """width: characters of the sequence a residue."""
        return sequence[self.start * width : (self.start + self.length) * width]


def windows(residues: int, longest: int) -> Iterator[Window]:
    """Windows of a protein, of `longest` residues each if it is longer, overlapping by about half.

    Each residue is used from the window whose centre is nearest, and from the later one of two as near. That depends
    on the two lengths alone: neither on the other proteins of a batch nor on the dtype.
    """
    if residues <= longest:
        yield Window(0, residues, 0, residues)
        return
    count = -(-(residues - longest) // (longest // 2)) + 1
    starts = np.linspace(0, residues - longest, count).round().astype(int).tolist()
    # Windows change half-way between the centres of two neighbours; a residue there is the first of the later one.
    borders = [0, *((a + b + longest) // 2 for a, b in zip(starts, starts[1:], strict=False)), residues]
    for start, begin, end in zip(starts, borders, borders[1:], strict=False):
        yield Window(start, longest, begin - start, end - start)


def loaded(family: Family, config: Any, pieces: Pieces, device: torch.device) -> Any:
    """The model with these parameters, for inference. Not by `to_empty`, which from meta imports sympy."""
    with torch.device("meta"):
        model = family.make(config)
    model.load_state_dict({name: tensor.to(device, copy=True) for name, tensor in pieces}, assign=True)
    return model.eval()
