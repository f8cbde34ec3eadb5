"""The stack of layers and its residual stream, whose last sum is left to the next layer.

The next layer's first norm reads the sum, and a compiled layer computes both in one kernel. Added at the end of a
layer, in another graph, the sum would be written and read again; so would its fp32 gradient, to be rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn


class Stream(NamedTuple):
    """x [T, hidden], and the last matmul's result in its dtype, not added yet; None if it is."""

    x: Tensor
    added: Tensor | None = None


def begin(x: Tensor) -> Stream:
    """The first layer's input, of the same form as all others', so that all layers share one compiled graph."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return Stream(x, torch.zeros_like(x, dtype=dtype, requires_grad=x.requires_grad))


def total(stream: Tensor | Stream) -> Tensor:
    """The sum, [T, hidden]."""
    if isinstance(stream, Tensor):
        return stream
    return stream.x if stream.added is None else stream.x + stream.added


class Layers(nn.ModuleList):
    """quantised: Transformer Engine's autocast contexts (extras.formats.te), or None."""

    quantised: Any = None

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]:
            """Layers of all families and backends share names of modules and methods, but no class."""

    def in_turn(self) -> Iterator[Any]:
        """Yield each layer inside the context of its number format, where it is to be called."""
        with self.quantised.all() if self.quantised else nullcontext():
            for number, layer in enumerate(self):
                with self.quantised.layer(number) if self.quantised else nullcontext():
                    yield layer


class Block(NamedTuple):
    """Consecutive rows of a parameter: `parts` matrices, whose rows take turns in each of `groups` groups of rows."""

    rows: int
    groups: int = 1
    parts: int = 1


class Model(nn.Module):
    """The base of all families' models. `layers` are wrapped, recomputed, compiled and quantised one by one.

    takes_fillers: sequences of fillers and empty ones in a pack change nothing, and cost what their tokens cost.
    """

    config: Any
    layers: Layers
    takes_fillers = True

    def hidden_matrices(self) -> dict[str, list[Block]]:
        """{parameter: its blocks, from the first row to the last}, for an optimiser that treats a matrix as a whole.

        Of the matrices from hidden states to hidden states; embeddings and output layers are none. {}: not known.
        """
        return {}
