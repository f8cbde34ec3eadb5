"""The layers of a model, one after the other, each in the number format that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

# The residual stream from layer to layer, and what the last matmul adds to it: not added up yet.
#
# Who adds is the next layer: its first norm reads the sum, and computes both in one kernel where layers are compiled.
# Added up at the end of a layer, in a graph of its own, the sum would be written to be read again at once; and its
# gradient, which comes back in fp32, would be read again to be rounded for the matmul.


class Stream(NamedTuple):
    """x [T, hidden]; added [T, hidden], as a matmul gives it: in autocast's dtype, where that is on. None: it is."""

    x: Tensor
    added: Tensor | None = None


def begin(x: Tensor) -> Stream:
    """What goes into the first layer: as into any other, so that all of them are one compiled graph."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return Stream(x, torch.zeros_like(x, dtype=dtype, requires_grad=x.requires_grad))


def total(stream: Tensor | Stream) -> Tensor:
    """[T, hidden]: the sum, or what is a sum already."""
    if isinstance(stream, Tensor):
        return stream
    return stream.x if stream.added is None else stream.x + stream.added


class Layers(nn.ModuleList):
    """quantised: contexts in which Transformer Engine computes in other formats (common.precision.te), or None."""

    quantised = None

    def in_turn(self) -> Iterator[nn.Module]:
        """Each layer, to be called while it is the latest: inside what gives it its format."""
        with self.quantised.all() if self.quantised else nullcontext():
            for number, layer in enumerate(self):
                with self.quantised.layer(number) if self.quantised else nullcontext():
                    yield layer
