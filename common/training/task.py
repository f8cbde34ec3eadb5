"""The interface of a task (masked or causal language modelling) to the loop, and the records around it.

The loop uses a task's methods and knows nothing else about batches and model: `open`, `steps`, `counts`, `loss_sum`,
`flops`, `evaluate`, `summary`, `baseline`, `line`, `exported`, `export` (documented in common.training.masked_lm). A
dry run opens no data and uses `example`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from common.data.collators import Collator
from common.data.loader import TrainLoader
from common.distributed.world import World
from common.precision.build import Precision
from common.training.arguments import RunArguments


@dataclass(frozen=True)
class BuiltModel:
    """The model that `load_model` built.

    model: not wrapped by a strategy; remarks: for the log; extras: tensors of a Hub checkpoint that are not trained
    but exported again; compiled: whether the layers are, by torch.compile.
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
    def implementation(self) -> dict[str, Any]:
        """How the model computes, as results and checkpoints record it; formats: {layers: number format}."""
        return {"backend": self.backend, "gelu": self.gelu, "formats": self.precision.formats}

    @property
    def weights(self) -> nn.Module:
        """What is updated, saved and exported: the model's parameters, or their fp32 master weights."""
        masters = self.precision.masters
        return masters.weights if masters else self.model


class Task(ABC):
    """A subclass sets flags and world, and data when it opens them."""

    flags: RunArguments
    world: World

    @abstractmethod
    def collator(self) -> Collator:
        """Makes this rank's training batches."""

    def steps(self, packs_per_step: int, step: int, position: dict, last_step: int | None) -> TrainLoader:
        """This rank's batches from step `step`, at `position`, up to `last_step` (None: the end of the data)."""
        return TrainLoader(
            self.data.order(packs_per_step),
            self.collator(),
            self.world.mesh,
            step,
            position,
            num_steps=None if last_step is None else max(0, last_step - step),
            **self.flags.data.loading(self.world.device),
        )
