"""What becomes of the flags about a model: first what they choose, then the model that was built of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.precision.build import Precision


@dataclass(frozen=True)
class ModelChoice:
    """Which model it is to be, before there is one.

    backend, why: who computes its layers; gelu: with which GELU ("" where it has none); remarks: for the log; make:
    the model, under torch.device("meta"); read: given weights as (pairs of our name and tensor, extras), None for
    random ones.
    """

    config: Any
    backend: str
    why: str
    gelu: str
    remarks: tuple[str, ...]
    make: Callable[[], nn.Module]
    read: Callable[[], tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]] | None


@dataclass(frozen=True)
class Built:
    """What `load_model` made of the flags.

    model: before a strategy wraps it; remarks: how it came to be, for the log; extras: of a Hub checkpoint, tensors
    that are exported again but play no part here; compiled: whether its layers are, by torch.compile.
    """

    model: nn.Module
    backend: str
    gelu: str
    remarks: tuple[str, ...]
    precision: Precision
    extras: dict[str, Tensor]
    compiled: bool = False

    @property
    def config(self):
        return self.model.config

    @property
    def weights(self) -> nn.Module:
        """What is updated, saved and exported: the model's parameters, or their fp32 masters."""
        masters = self.precision.masters
        return masters.weights if masters else self.model
