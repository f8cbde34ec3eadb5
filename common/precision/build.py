"""What a step calls of a model's number formats: bf16 copies of weights here, formats below bf16 by extras."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from common.distributed.world import World
from common.models.layers.linear import RoundedWeights


class Quantiser(Protocol):
    """What quantises a model's layers: emulation, or Transformer Engine."""

    @property
    def state(self) -> dict[str, Tensor]:
        """Delayed scaling's tensors, the same on every rank, that a checkpoint holds and restores in place."""

    def rescale_gradients(self, factor: float) -> None:
        """After a checkpoint is read: gradients are this many times as large as in the run that wrote it."""

    def quantise_weights(self) -> Any:
        """--fp8_params: cast the weights, which have their values now, to FP8. Returns their fp32 masters."""

    def begin_pack(self, step: int, pack: int, empty: bool) -> None:
        """Before the pass over a pack, numbered within the global step; empty: it holds fillers only."""

    def nonfinite(self, value: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """value, an fp32 scalar; NaN if this rank has a NaN that neither loss nor gradient norm would show."""

    def end_step(self, world: World, skipped: bool) -> None:
        """After the optimiser step, also a skipped one; all ranks together."""


@dataclass(frozen=True)
class Precision:
    """The formats of a model's layers, and the hooks that a step calls. Without a quantiser it does nothing.

    stats: statistics of quantisation; masters: fp32 master weights of a model in FP8, by its quantiser; rounded: bf16
    copies of fp32 weights.
    """

    formats: dict[str, str] = field(default_factory=dict)  # {layers: format}; {} where none is quantised
    quantiser: Quantiser | None = None
    stats: Any = None
    masters: Any = None
    rounded: RoundedWeights | None = None

    @property
    def scales(self) -> dict[str, Tensor]:
        """Tensors of the quantiser, the same on every rank, that a checkpoint holds and restores in place."""
        return self.quantiser.state if self.quantiser else {}

    def quantise_weights(self) -> Precision:
        """--fp8_params: cast the weights, which have their values now, to FP8, with fp32 masters."""
        assert self.quantiser  # --emulate_precision excludes --fp8_params
        return replace(self, masters=self.quantiser.quantise_weights())

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the weights that the optimiser updates to the model after each step: FP8 from masters, bf16 copies."""
        if self.masters:
            self.masters.attach(optimizer)
        if (rounded := self.rounded) and not getattr(optimizer, "clips_and_rounds", False):
            optimizer.register_step_post_hook(lambda *_: rounded.refresh())

    def attach_restored(self, gradients: float) -> None:
        """Refresh FP8 and bf16 copies after loading. gradients: scale of this run's over the saving run's."""
        if self.masters:
            self.masters.copy_to_model()
        if self.rounded:
            self.rounded.refresh()
        if self.quantiser:
            self.quantiser.rescale_gradients(gradients)

    def computed_with(self) -> Iterable[Tensor]:
        """bf16 copies of weights, kept between steps."""
        return self.rounded.copies if self.rounded else ()

    def begin_step(self, step: int) -> None:
        """Before the first pack of step `step`, counted from 0."""
        if self.stats:
            self.stats.begin_step(step + 1)

    def begin_pack(self, step: int, pack: int, empty: bool = False) -> None:
        """Before the pass over a pack: see `Quantiser.begin_pack`."""
        if self.quantiser:
            self.quantiser.begin_pack(step, pack, empty)
        if self.stats:
            self.stats.begin_pack(empty)

    def fold_hidden_nan(self, value: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """value, an fp32 scalar, or NaN if the FP8 copies hide a NaN of the weights or gradients."""
        if not self.quantiser:
            return value
        return self.quantiser.nonfinite(value, (p for group in optimizer.param_groups for p in group["params"]))

    def end_step(self, world: World, skipped: bool) -> list[dict]:
        """After the optimiser step, also a skipped one; all ranks together. Returns rows of quant_stats.jsonl."""
        if self.quantiser:
            self.quantiser.end_step(world, skipped)
        return self.stats.end_step() if self.stats else []  # also of a skipped step: they may show why
