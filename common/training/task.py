"""The interface of a task (masked or causal language modelling) to the loop, and the model built for a run.

The loop uses these methods and knows nothing else about batches and model. A dry run opens no data and uses `example`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from common.data.collators import Batch, Collator
from common.data.loader import StepCounts, TrainLoader
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import TrainingData
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.hooks import extra
from common.models.layers.model_card import Training
from common.models.layers.residual import Model
from common.precision import Precision
from common.training.arguments import RunArguments
from common.training.curves import PlotLabels
from common.training.optim import OptimizerFlags, build_optimizer
from common.training.protein_losses import Evaluation

Arguments = TypeVar("Arguments", bound=RunArguments)
Data = TypeVar("Data", bound=TrainingData)


@dataclass(frozen=True)
class BuiltModel:
    """The model that `load_model` built.

    model: not wrapped by a strategy; remarks: for the log; extras: tensors of a Hub checkpoint that are not trained
    but exported again; compiled: whether the layers are, by torch.compile; attention: the flash-attention kernels, ""
    without; static_shape: whether batches are filled up to one shape.
    """

    model: Model
    backend: str
    gelu: str
    remarks: tuple[str, ...]
    precision: Precision
    extras: dict[str, Tensor]
    compiled: bool = False
    attention: str = ""
    bf16_residual: bool | None = None
    static_shape: bool = False

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def implementation(self) -> dict[str, Any]:
        """How the model computes, as results and checkpoints record it; formats: {layers: number format}."""
        chosen: dict[str, Any] = {"attention": self.attention} if self.attention else {}
        if self.bf16_residual is not None:
            chosen["bf16_residual"] = self.bf16_residual
        return {"backend": self.backend, "gelu": self.gelu, "formats": self.precision.formats} | chosen

    @property
    def weights(self) -> nn.Module:
        """What is updated, saved and exported: the model's parameters, or their fp32 master weights."""
        masters = self.precision.masters
        return masters.weights if masters else self.model

    def optimizer(self, flags: OptimizerFlags, strategy: Strategy, world: World, bf16: bool) -> torch.optim.Optimizer:
        """The optimiser of `weights`; all ranks together."""
        # A family may do without it, as the toy family of the tests does.
        matrices = getattr(self.model, "hidden_matrices", dict)()
        return build_optimizer(self.weights, matrices, flags, strategy, world, bf16)


# What a train script brings: (flags, world, backend and GELU of a run that is resumed) -> the model, and its strategy.
Build = Callable[[RunArguments, World, dict[str, str]], tuple[Strategy, BuiltModel]]


class Task(ABC, Generic[Arguments, Data]):
    """What a run trains on, counts, evaluates and exports. `open` sets `data`.

    held_out: {held-out set that is evaluated while training: prefix of its results}.
    """

    labels: PlotLabels
    data: Data
    metrics: tuple[str, ...]  # results of a held-out set that models may be compared by, the first by default
    tokenizer: Any = None  # of text
    terminal_every: int = 1  # steps between lines at a terminal, of those that --logging_steps logs

    def __init__(self, built: BuiltModel, flags: Arguments, world: World):
        self.built, self.flags, self.world = built, flags, world
        self.family = flags.family
        self.held_out = {"validation": "eval"}

    @property
    def compared(self) -> list[str]:
        """Results of an evaluation that models may be compared by, the first by default."""
        of_sets = [f"{prefix}_{name}" for prefix in self.held_out.values() for name in self.metrics]
        return [*of_sets, *["perplexity" for prefix in self.held_out.values() if prefix == "eval"]]

    @abstractmethod
    def open(self, evaluates: bool) -> None:
        """Open the data; all ranks together."""

    @abstractmethod
    def example(self, tokens: int) -> Batch:
        """This rank's batch of a pack of so many random tokens, in sequences of the maximum length."""

    @abstractmethod
    def collator(self, total_steps: int) -> Collator:
        """Makes this rank's training batches. total_steps: of the run, which schedules of batches span."""

    def steps(
        self, packs_per_step: PacksPerStep, step: int, position: dict, last_step: int | None, total_steps: int
    ) -> TrainLoader:
        """This rank's batches from step `step`, at `position`, up to `last_step` (None: the end of the data).

        total_steps: as `collator`.
        """
        return TrainLoader(
            self.data.order(packs_per_step),
            self.collator(total_steps),
            self.world.mesh,
            step,
            position,
            num_steps=None if last_step is None else max(0, last_step - step),
            **self.flags.data.loading(self.world),
        )

    @staticmethod
    @abstractmethod
    def counts(micro_batches: list[Batch]) -> StepCounts:
        """Summed over this rank's micro-batches; none: all zero."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss in nats, summed over the targets of a batch; fp32 scalar."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> Evaluation:
        """Results and losses on a split that is not empty, with those of the baselines; all ranks together."""

    @staticmethod
    @abstractmethod
    def summary(results: dict, prefix: str) -> str:
        """A split's results in a line."""

    @abstractmethod
    def line(self, row: dict, packs_per_step: PacksPerStep) -> str:
        """A row of metrics.jsonl for the terminal."""

    def flops(self, counts: StepCounts) -> float:
        """Floating-point operations of a training step with these counts."""
        totals = counts.num_tokens, counts.sum_squared_lengths, counts.num_targets
        of_sets = {"set_pairs": counts.set_pairs} if counts.set_pairs else {}
        flops = self.family.flops(self.built.config, *totals, **of_sets)
        return flops * 2 / 3 if self.flags.model.lora else flops  # frozen weights have no gradients

    def exported(
        self, gather: Callable[[Tensor], Tensor], fitted: dict[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors to export; all ranks ask for one after the other, which `gather` makes whole.

        fitted: in place of those that training leaves as they are.
        """
        parameters = dict(self.built.weights.named_parameters())
        extras = self.built.extras | (fitted or {})
        read: Callable[[str], Tensor] = lambda name: gather(parameters[name]).detach()  # noqa: E731
        if self.flags.model.lora:
            read = extra().lora().merged(read, parameters, self.flags.model.lora_alpha)
        return self.family.adapter.to_hf(read, self.built.config, extras)

    def export(self, pieces: Iterator[tuple[str, Tensor]], directory: Path, training: Training) -> None:
        """Write them where transformers' from_pretrained opens them; the main rank only."""
        self.family.adapter.save(pieces, self.built.config, directory, training, self.tokenizer)
