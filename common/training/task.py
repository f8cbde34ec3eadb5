"""What the tasks have in common: how a rank's share of the steps is loaded.

The trainer knows a task's methods and nothing else of batches and model: `open`, `steps`, `counts`, `loss_sum`,
`flops`, `evaluate`, `summary`, `baseline`, `line`, `exported`, `export` (common.training.masked_lm tells them); a dry
run, which opens no data, takes an `example`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from common.data.collators import Collator
from common.data.loader import TrainLoader
from common.distributed.world import World
from common.precision.build import Precision
from common.training.arguments import RunArguments

# What a step's micro-batches hold, whatever the task.


class StepCounts(NamedTuple):
    """What micro-batches hold (`Counts`), and on how many tokens, fillers included, the layers run for them."""

    num_targets: int
    num_tokens: int
    sum_squared_lengths: int
    num_sequences: int
    num_unknown: int
    num_computed: int


# What becomes of the flags about a model: first what they choose, then the model that was built of it.


@dataclass(frozen=True)
class ModelSpec:
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
class BuiltModel:
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


class Task(ABC):
    """flags, world: of the run; data: once it is opened. The task sets them."""

    flags: RunArguments
    world: World

    @abstractmethod
    def collator(self) -> Collator:
        """What makes a rank's batches to train on."""

    def steps(self, packs_per_step: int, step: int, position: dict, last_step: int | None) -> TrainLoader:
        """This rank's share of the steps from number `step` on, which begins at `position`, up to `last_step`; where
        that is None, up to the end of the data."""
        return TrainLoader(
            self.data.order(packs_per_step),
            self.collator(),
            self.world.mesh,
            step,
            position,
            num_steps=None if last_step is None else max(0, last_step - step),
            **self.flags.data.loading(self.world.device),
        )
