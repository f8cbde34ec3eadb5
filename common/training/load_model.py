"""The model of a run, on its device: built without storage, sharded if the strategy shards, then given its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.cli import UserError
from common.distributed.strategy import copy_rows
from common.distributed.world import World
from common.flags import flat
from common.models.layers.compiling import compile_layers
from common.models.layers.context_attention import share_context
from common.models.layers.initialise import initialise
from common.models.layers.linear import RoundedWeights
from common.precision.build import choose_plan, set_formats, start_te_stats
from common.training.arguments import RunArguments
from common.training.registry import task_of
from common.training.run_directory import previous_backend
from common.training.task import BuiltModel

# Flags that need not be the same on all ranks: places, which may have other names on another node, and what changes
# nothing of the run.
OF_A_RANK = {"dataset_dir", "output_dir", "log_dir", "run_name", "report_to", "disable_tqdm"}
OF_A_RANK |= {"dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"}


def load_model(
    args: RunArguments,
    world: World,
    shard: Callable[[nn.Module], None] | None = None,
    device: torch.device | None = None,
    torch_only: tuple[str, ...] = (),
) -> BuiltModel:
    """The model on the rank's device: random weights, or those of --model_name_or_path.

    shard: called while the model has no storage yet; then each rank makes, or reads, only what is its own; device:
    where the weights are kept, if not on the rank's own; torch_only: the strategy's flags that only the torch backend
    can honour.
    """
    so_far = {}
    with world.on_main_rank() as is_main:
        if is_main:
            so_far = previous_backend(args.checkpoint)
    so_far = world.broadcast_object(so_far)
    with world.raise_together():
        choice = task_of(args).choose(args, world, torch_only, so_far)
    config, backend, gelu = choice.config, choice.backend, choice.gelu
    flags = {name: value for name, value in flat(args).items() if name not in OF_A_RANK}
    software = {"torch": torch.__version__, "device": world.device.type}
    compiled, remark = args.model.compiles(world.device, backend)
    software |= {"compiled": str(compiled)}
    software |= {"backend": f"{backend} ({choice.why})", "gelu": gelu}
    world.assert_same(flags | software | {f"model's {name}": value for name, value in asdict(config).items()})
    with world.raise_together():
        plan = choose_plan(args.precision, config, world.device, backend, choice.why, sharded=shard is not None)
        te_stats = start_te_stats(
            args.precision, plan, world, args.precision.stats_directory(args.checkpoint.output_dir)
        )
        with torch.device("meta"):
            model = choice.make()
        precision = set_formats(model, plan, args.precision, args.data.seed, world, te_stats)
        if world.cp_group is not None:
            share_context(model, world.cp_group, args.model.cp_comm_type)
        if compiled:
            compile_layers(model, world.device.type)
    if shard is not None:
        shard(model)
    extras = {}
    with world.raise_together():
        if next(model.parameters()).is_meta:  # a strategy may have made the storage itself
            if (device or world.device).type == "cpu" and not world.rehearsed:
                check_host_memory(model, args.do_train, world.local_size)
            model.to_empty(device=device or world.device)
        if not world.rehearsed:
            initialise(model, args.data.seed, config.initializer_range)
        if choice.read and not world.rehearsed:
            pieces, extras = choice.read()
            parameters = dict(model.named_parameters())
            for name, tensor in pieces:
                copy_rows(parameters[name], tensor)
        if args.precision.fp8_params:
            precision = replace(precision, masters=precision.quantised.quantise_weights())
        # Transformer Engine casts weights itself, and sharded ones are gathered in bf16.
        if args.precision.bf16 and backend == "torch" and plan is None and shard is None:
            precision = replace(precision, rounded=RoundedWeights(model.layers))
    remarks = (*choice.remarks, *([remark] if remark else []))
    return BuiltModel(model, backend, gelu, remarks, precision, extras, compiled)


def check_host_memory(model: nn.Module, trains: bool, ranks: int) -> None:
    """UserError where the weights of so many ranks on this machine, with gradients and two moments where it trains,
    are more than all the memory it has: the system would end them, one by one and without a word."""
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    needed = ranks * (4 if trains else 1) * sum(p.numel() * p.element_size() for p in parameters)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        what = "weights, gradients and moments" if trains else "weights"
        raise UserError(
            f"{what} of the {ranks} rank{'s' * (ranks > 1)} on this machine take {needed / 1e9:,.0f} GB, and it has "
            f"{there / 1e9:,.0f}: choose a smaller model, or see with --dry_run what this one needs"
        )
