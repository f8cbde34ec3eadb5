"""The layers of a model, one after the other, each in the number format that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from torch import nn


class Layers(nn.ModuleList):
    """quantised: contexts in which Transformer Engine computes in other formats (common.precision.te), or None."""

    quantised = None

    def in_turn(self) -> Iterator[nn.Module]:
        """Each layer, to be called while it is the latest: inside what gives it its format."""
        with self.quantised.all() if self.quantised else nullcontext():
            for number, layer in enumerate(self):
                with self.quantised.layer(number) if self.quantised else nullcontext():
                    yield layer
