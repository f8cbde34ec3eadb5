"""What models for inference share: their weights in memory, and sequences in packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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


def loaded(family: Family, config: Any, pieces: Pieces, device: torch.device) -> Any:
    """The model with these parameters, for inference. Not by `to_empty`, which from meta imports sympy."""
    with torch.device("meta"):
        model = family.make(config)
    model.load_state_dict({name: tensor.to(device, copy=True) for name, tensor in pieces}, assign=True)
    return model.eval()
