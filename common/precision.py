"""The number formats of a run: their flags, and what a step calls of them.

bf16 copies of the weights are made here. Formats below bf16 are extras, which no run loads that does not ask for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from common.cli import UserError
from common.distributed.world import World
from common.flags import Flags, Missing, flag
from common.hooks import extra
from common.models.layers.linear import RoundedWeights


@dataclass(frozen=True)
class PrecisionFlags(Flags):
    """Number formats of the layers, and statistics of what is quantised."""

    group = "precision"
    advanced = ("fp8_recipe", "fp8_layers", "fp4", "emulate_precision", "quant_stats")
    unlisted = (
        *("fp8_format", "fp8_params", "fp8_recipe_kwargs", "fp4_format", "fp4_layers", "fp4_recipe_kwargs"),
        *("quant_stats_freq", "quant_stats_dir", "quant_stats_file"),
    )
    file_only = ("fp8_scaled_mm",)

    bf16: bool = flag(False, "For speed on a GPU: compute in bfloat16; weights, gradients and optimiser stay fp32.")
    fp8: bool = flag(False, "For speed from Ada and Hopper on: compute encoder layers in FP8 (docs/precision.md).")
    fp8_recipe: str = flag(
        "delayed",
        "Scaling in FP8; change it if the loss is not bf16's. block: Hopper, mxfp8: Blackwell.",
        choices=lambda: extra().fp8_formats(),
    )
    fp8_format: str | None = flag(
        None,
        "hybrid: E4M3, gradients E5M2. Default: the recipe's own (docs/precision.md).",
        choices=("hybrid", "e4m3"),
    )
    fp8_layers: str | None = flag(
        None, "To keep layers out of FP8: those in it, counted from 1: 1-3,6. Default: all but --fp4_layers."
    )
    fp8_recipe_kwargs: str | None = flag(None, 'Arguments of the recipe as JSON: {"amax_history_len": 16}.')
    fp8_params: bool = flag(False, "Keep the weights of those layers in FP8 on the GPU, with fp32 master weights.")
    fp8_scaled_mm: bool = flag(
        False, "FP8 by torch's own matmuls in torch's layers, compiled too; --fp8_recipe current alone."
    )
    fp4: bool = flag(False, "For speed on Blackwell: compute encoder layers in NVFP4.")
    fp4_format: str = flag("e2m1", "The format of NVFP4.", choices=lambda: extra().fp4_formats())
    fp4_layers: str | None = flag(None, "Layers in NVFP4, counted from 1. Default: all but --fp8_layers.")
    fp4_recipe_kwargs: str | None = flag(None, 'Arguments of the recipe as JSON: {"disable_rht": true}.')
    emulate_precision: bool = flag(False, "To try formats without such a GPU: round as they do, in plain PyTorch.")
    quant_stats: bool = flag(False, "To see what formats lose: log underflow, scales, error and norms of tensors.")
    quant_stats_freq: int | None = flag(None, "Steps between them. Default: as the file says, 10 without one.")
    quant_stats_dir: str | None = flag(None, "Where quant_stats.jsonl goes. Default: --output_dir.")
    quant_stats_file: str | None = flag(
        None, "Which layers, tensors and statistics: YAML as Transformer Engine's debug configuration."
    )

    def resolve(self) -> PrecisionFlags:
        """Transformer Engine's names as ours: the class (path) of a recipe, formats in upper case."""
        recipe = self.fp8_recipe.lower()
        return replace(
            self,
            fp8_recipe=recipe if recipe in extra().fp8_formats() else extra().fp8_recipe(self.fp8_recipe),
            fp8_format=self.fp8_format and self.fp8_format.lower(),
            fp4_format=self.fp4_format.lower(),
        )

    @property
    def below_bf16(self) -> bool:
        return self.fp8 or self.fp4

    def missing(self) -> Iterator[Missing]:
        for name in ("fp8", "fp4"):
            for detail in ("layers", "recipe_kwargs"):
                if getattr(self, f"{name}_{detail}") is not None and not getattr(self, name):
                    yield Missing(f"--{name}", f"--{name}_{detail} goes with --{name}")
        why = ": Transformer Engine 2.20's NVFP4 weights have no partial slice or strided view" if self.fp4 else ""
        for name, reason in {"fp8_params": why, "fp8_scaled_mm": ""}.items():
            if getattr(self, name) and not self.fp8:
                yield Missing("--fp8", f"--{name} goes with --fp8{reason}")
        if self.emulate_precision and not (self.fp8 or self.fp4):
            yield Missing("--fp8", "or --fp4: there is nothing to emulate")
        for detail in ("freq", "dir", "file"):
            if getattr(self, f"quant_stats_{detail}") is not None and not self.quant_stats:
                yield Missing("--quant_stats", f"--quant_stats_{detail} goes with --quant_stats")
        if self.quant_stats and not (self.fp8 or self.fp4):
            yield Missing("--fp8", "or --fp4: --quant_stats needs quantised layers")

    def check(self) -> None:
        if self.below_bf16:
            extra().check_formats(self)
        self.require_at_least(1, "quant_stats_freq")
        if self.quant_stats_file is not None:
            extra().check_statistics(self.quant_stats_file)

    def torch_only(self) -> tuple[str, ...]:
        """Flags that are given and only the torch backend can honour."""
        return tuple(f"--{name}" for name in ("emulate_precision", "fp8_scaled_mm") if getattr(self, name))

    def stats_directory(self, output_dir: str) -> Path | None:
        """Where quant_stats.jsonl goes; None without --quant_stats."""
        return Path(self.quant_stats_dir or output_dir) if self.quant_stats else None

    def check_stats_directory(self) -> None:
        """UserError unless --quant_stats_dir can be made and written to; the output directory is checked elsewhere."""
        if self.quant_stats and self.quant_stats_dir:
            probe = Path(self.quant_stats_dir) / "quant_stats.jsonl.probe"
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(
                    f"--quant_stats_dir {self.quant_stats_dir}: not writable ({error.strerror}): choose another "
                    "directory"
                ) from error


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
