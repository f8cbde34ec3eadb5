"""Give a model's layers formats below bf16: by Transformer Engine, by emulation, or by torch's scaled matmuls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from common.cli import UserError
from common.data.counter_rng import ROUNDING, derive_key
from common.distributed.world import World
from common.hooks import extra
from common.models.layers.residual import Model
from common.precision import Precision, PrecisionFlags
from extras.formats.plan import check_device, check_dimensions, describe, formats, resolve
from extras.formats.recipe import Plan, format_of

logger = logging.getLogger(__name__)

MATMUL_SIZES = ("hidden_size", "intermediate_size")  # of a configuration; one with others names them


def choose_plan(
    flags: PrecisionFlags, config: Any, device: torch.device, backend: str, why: str, sharded: bool
) -> Plan:
    """The number format of each layer.

    why: the reason for the backend. UserError if this model, backend, strategy or device cannot have the format.
    """
    plan = resolve(flags, config.num_hidden_layers)
    assert plan is not None  # --fp8 or --fp4 was given
    sizes = {name: getattr(config, name) for name in getattr(config, "matmul_sizes", MATMUL_SIZES)}
    check_dimensions(plan, sizes, config.set_by)
    if flags.fp8_params and sharded:
        rows = format_of(extra().fp8_formats()[flags.fp8_recipe]).shard_rows
        blocks = f" of whole blocks of {rows} rows" if rows else ""
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


def start_te_stats(flags: PrecisionFlags, plan: Plan, world: World, directory: Path | None):
    """Transformer Engine's statistics, if asked for: before the layers are built, which register with it."""
    if directory is None or flags.emulate_precision:
        return None
    from extras.formats.stats_plan import select
    from extras.formats.stats_te import TeStats

    return TeStats(select(flags, plan), plan, world, directory)


def set_formats(model: Model, plan: Plan, flags: PrecisionFlags, seed: int, world: World, te_stats: Any) -> Precision:
    """Give each layer of a model (on the meta device) its format."""
    rest = "BF16" if flags.bf16 else "FP32"
    named = formats(plan, rest)
    if flags.fp8_scaled_mm:
        from extras.speed.scaled_mm import use_scaled_mm

        use_scaled_mm(model, plan, world)
        logger.info("Precision:\n%s", describe(plan, rest))
        return Precision(named)
    if not flags.emulate_precision:
        from extras.formats.te import Quantised

        key = derive_key(seed, world.mesh.cp_rank, ROUNDING)  # ranks that share a pack hold different tokens
        quantised = Quantised(model, plan, flags.fp8_params, key)
        logger.info("Precision:\n%s", describe(plan, rest))
        return Precision(named, quantised, stats=te_stats)
    from extras.formats.emulation import Emulation

    emulation: Any = Emulation(model, plan, seed, world.device, world.size, world.cp_group)
    stats = emulated_statistics(flags, plan, world, emulation) if flags.quant_stats else None
    logger.info("Emulated precision:\n%s", describe(plan, rest))
    return Precision(named, emulation, stats=stats)


def emulated_statistics(flags: PrecisionFlags, plan: Plan, world: World, emulation: Any) -> Any:
    from extras.formats.stats import QuantStats
    from extras.formats.stats_plan import select

    return QuantStats(emulation, select(flags, plan), world)
