"""Give a model's layers their number formats: bf16 and fp32 here, those below by extras."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from common.cli import UserError
from common.data.counter_rng import ROUNDING, derive_key
from common.distributed.world import World
from common.hooks import extra
from common.models.layers.linear import RoundedWeights
from common.models.layers.residual import Model
from common.precision.plan import Plan, PrecisionFlags, check_device, check_dimensions, describe, formats, resolve

logger = logging.getLogger(__name__)


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
    """The formats of a model's layers, and the hooks that a step calls. Without a plan it does nothing.

    stats: statistics of quantisation; masters: fp32 master weights of a model in FP8, by its quantiser; rounded: bf16
    copies of fp32 weights.
    """

    plan: Plan | None = None
    rest: str = "BF16"  # the format of all other layers
    quantiser: Quantiser | None = None
    stats: Any = None
    masters: Any = None
    rounded: RoundedWeights | None = None

    @property
    def formats(self) -> dict[str, str]:
        """{layers: format}; {} where none is quantised."""
        return formats(self.plan, self.rest) if self.plan else {}

    @property
    def scales(self) -> dict[str, Tensor]:
        """See `Quantiser.state`."""
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
        """Copy them after a checkpoint is read. gradients: this run's over those of the run that wrote it."""
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

    def add_unseen(self, value: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
        """See `Quantiser.nonfinite`."""
        if not self.quantiser:
            return value
        return self.quantiser.nonfinite(value, (p for group in optimizer.param_groups for p in group["params"]))

    def end_step(self, world: World, skipped: bool) -> list[dict]:
        """After the optimiser step, also a skipped one; all ranks together. Returns rows of quant_stats.jsonl."""
        if self.quantiser:
            self.quantiser.end_step(world, skipped)
        return self.stats.end_step() if self.stats else []  # also of a skipped step: they may show why


# A scale's rows of a weight, where not all of it: Transformer Engine's FSDP2 hooks gather a shard's scales with it.
SHARD_ROWS = {"block": 128, "mxfp8": 32}

MATMUL_SIZES = ("hidden_size", "intermediate_size")  # of a configuration; one with others names them


def choose_plan(
    flags: PrecisionFlags, config: Any, device: torch.device, backend: str, why: str, sharded: bool
) -> Plan | None:
    """The number format of each layer; None if none is quantised.

    why: the reason for the backend. UserError if this model, backend, strategy or device cannot have the format.
    """
    plan = resolve(flags, config.num_hidden_layers)
    if plan is None:
        return None
    sizes = {name: getattr(config, name) for name in getattr(config, "matmul_sizes", MATMUL_SIZES)}
    check_dimensions(plan, sizes, config.set_by)
    if flags.fp8_params and sharded:
        blocks = f" of whole blocks of {SHARD_ROWS[flags.fp8_recipe]} rows" if flags.fp8_recipe in SHARD_ROWS else ""
        raise UserError(
            "--fp8_params: sharded weights cannot be FP8: Transformer Engine 2.20 updates fp32 masters of FP8 shards "
            f"in its FusedAdam only, and gathers equal shards{blocks} only: use train_ddp.py, or drop the flag"
        )
    if flags.fp8_params and flags.quant_stats:
        raise UserError(
            "--quant_stats: with --fp8_params there are no weights to compare FP8 with: drop one of the two"
        )
    on_gpu = device.type == "cuda"
    if not flags.emulate_precision and (on_gpu or not flags.fp8_scaled_mm):  # a CPU has scaled matmuls, too
        name = torch.cuda.get_device_name(device) if on_gpu else "a CPU"
        check_device(plan, name, torch.cuda.get_device_capability(device) if on_gpu else None)
    if not (flags.emulate_precision or flags.fp8_scaled_mm):
        if backend != "te":
            raise UserError(
                f"--{'fp8' if flags.fp8 else 'fp4'}: only Transformer Engine computes in it ({why}): mend that, or "
                "add --emulate_precision"
            )
        if not flags.bf16:
            raise UserError(f"--{'fp8' if flags.fp8 else 'fp4'} needs --bf16: what is not quantised is bfloat16")
    return plan


def start_te_stats(flags: PrecisionFlags, plan: Plan | None, world: World, directory: Path | None):
    """Transformer Engine's statistics, if asked for: before the layers are built, which register with it."""
    if plan is None or directory is None or flags.emulate_precision:
        return None
    return extra().te_statistics(flags, plan, world, directory)


def set_formats(
    model: Model, plan: Plan | None, flags: PrecisionFlags, seed: int, world: World, te_stats
) -> Precision:
    """Give each layer of a model (on the meta device) its format."""
    if plan is None:
        return Precision()
    rest = "BF16" if flags.bf16 else "FP32"
    if flags.fp8_scaled_mm:
        extra().scaled_matmuls(model, plan, world)
        logger.info("Precision:\n%s", describe(plan, rest))
        return Precision(plan, rest)
    if not flags.emulate_precision:
        key = derive_key(seed, world.mesh.cp_rank, ROUNDING)  # ranks that share a pack hold different tokens
        quantised = extra().quantised(model, plan, flags.fp8_params, key)
        logger.info("Precision:\n%s", describe(plan, "BF16"))
        return Precision(plan, quantiser=quantised, stats=te_stats)
    emulation = extra().emulation(model, plan, seed, world.device, world.size, world.cp_group)
    stats = extra().emulated_statistics(flags, plan, world, emulation) if flags.quant_stats else None
    logger.info("Emulated precision:\n%s", describe(plan, rest))
    return Precision(plan, rest, emulation, stats=stats)
