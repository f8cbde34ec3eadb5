"""The model of a run, on its device: built without storage, sharded if the strategy shards, then given its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from common.cli import UserError
from common.model import esm2, presets
from common.model.backend import choose_backend
from common.model.gelu import choose_gelu
from common.model.initialise import initialise
from common.model.pretrained import read_pretrained
from common.precision import stats as quant_stats
from common.precision.emulation import Emulation
from common.precision.plan import Plan, check_device, check_dimensions, describe, resolve
from common.precision.stats_plan import select
from common.prepare.encode_records import check_tokenizer
from common.ranks.sharding import copy_rows
from common.ranks.world import World

logger = logging.getLogger(__name__)


def load_model(args, world: World, shard: Callable[[esm2.Esm2ForMaskedLM], None] | None = None) -> nn.Module:
    """The model on the rank's device: random weights of --config_name, or those of --model_name_or_path.

    `shard` is called while the model has no storage yet; then each rank makes, or reads, only what is its own.
    """
    with world.together():
        if args.tokenizer_name:
            check_tokenizer(args.tokenizer_name)
        config = presets.load_config(args.config_name or args.model_name_or_path)
        if args.config_overrides:
            config = presets.override(config, args.config_overrides)
        # From here on, and on record, what was chosen.
        args.backend, why = choose_backend(args, world.device)
        args.gelu, remark = choose_gelu(args.gelu, args.backend, config)
        plan = check_precision(config, args, world, why, sharded=shard is not None)
        watch_te = None
        if args.quant_stats and not args.emulate_precision:  # before there are layers: they look for it when built
            from common.precision.stats_te import TeStats

            watch_te = TeStats(select(args, plan), plan, world, quant_stats.directory_of(args))
        with torch.device("meta"):
            model = esm2.Esm2ForMaskedLM(config, args.backend)
        model.quant_stats = watch_te
        if plan is not None:
            set_precision(model, plan, args, world)
        if args.torch_compile:
            esm2.compile_layers(model, world.device.type)
    if shard is not None:
        shard(model)
    with world.together():
        model.to_empty(device="cpu" if getattr(args, "cpu_offload", False) else world.device)
        initialise(model, args.seed, config.initializer_range)
        if args.model_name_or_path:
            pieces, model.extras = read_pretrained(args.model_name_or_path, config)
            parameters = dict(model.named_parameters())
            for name, tensor in pieces:
                copy_rows(parameters[name], tensor)
        if args.fp8_params:
            model.masters = model.encoder.quantised.quantise_weights()
    model.remarks = [line for line in (f"Backend: {args.backend} ({why})", remark) if line]
    return model


def check_precision(config, args, world: World, why: str, sharded: bool) -> Plan | None:
    """The number format of each layer, if this model, backend, strategy and device can have it.

    why: the backend was chosen. UserError names the flag that asks for what is not possible.
    """
    plan = resolve(args, config.num_hidden_layers)
    if plan is None:
        return None
    sizes = {name: getattr(config, name) for name in ("hidden_size", "intermediate_size")}
    check_dimensions(plan, sizes)
    if args.fp8_params and sharded:
        raise UserError("--fp8_params: sharded weights cannot be FP8: use train_ddp.py, or drop the flag")
    if args.fp8_params and args.quant_stats:
        raise UserError(
            "--quant_stats: with --fp8_params there are no weights to compare FP8 with: drop one of the two"
        )
    if not args.emulate_precision:
        on_gpu = world.device.type == "cuda"
        name = torch.cuda.get_device_name(world.device) if on_gpu else "a CPU"
        check_device(plan, name, torch.cuda.get_device_capability(world.device) if on_gpu else None)
        if args.backend != "te":
            raise UserError(
                f"--{'fp8' if args.fp8 else 'fp4'}: only Transformer Engine computes in it ({why}): mend that, or add "
                "--emulate_precision"
            )
        if not args.bf16:
            raise UserError(f"--{'fp8' if args.fp8 else 'fp4'} needs --bf16: what is not quantised is bfloat16")
    return plan


def set_precision(model: esm2.Esm2ForMaskedLM, plan: Plan, args, world: World) -> None:
    """Give each layer its format."""
    if not args.emulate_precision:
        from common.precision.te import Quantised

        Quantised(model, plan, args.fp8_params)
        logger.info("Precision:\n%s", describe(plan, "BF16"))
        return
    emulation = Emulation(model, plan, args.seed, world.device, world.size)
    if args.quant_stats:
        model.quant_stats = quant_stats.QuantStats(emulation, select(args, plan), world)
    logger.info("Emulated precision:\n%s", describe(plan, "BF16" if args.bf16 else "FP32"))
