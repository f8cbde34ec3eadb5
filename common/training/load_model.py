"""Build the model of a run: on the meta device, sharded if the strategy shards, then initialised or loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from common.checkpoint.files import damage_of, newest_usable
from common.cli import UserError
from common.distributed.shards import copy_to_shard
from common.distributed.world import World
from common.files.runs import resolve_directory
from common.flags import flat, with_flags
from common.hooks import extra
from common.models.layers.compiling import check_cuda_graphs, compile_layers, keep_addresses
from common.models.layers.hf_directory import is_checkpoint
from common.models.layers.initialise import initialise
from common.models.layers.linear import RoundedWeights
from common.precision import Precision
from common.training.arguments import RunArguments
from common.training.task import BuiltModel

# Flags that may differ between ranks: paths, which another node may name otherwise, and what does not affect results.
PER_RANK_FLAGS = {"dataset_dir", "output_dir", "log_dir", "run_name", "report_to", "disable_tqdm"}
PER_RANK_FLAGS |= {"dataloader_num_workers", "metrics_port", "metrics_host"}


def load_model(
    args: RunArguments,
    world: World,
    previous: dict[str, str] | None = None,
    shard: Callable[[nn.Module], None] | None = None,
    device: torch.device | None = None,
    torch_only: tuple[str, ...] = (),
) -> BuiltModel:
    """The model on the rank's device, with random weights or those of --model_name_or_path; all ranks together.

    previous: backend, GELU and residual stream of the resumed run, which are kept; shard: called with the model on the
    meta device, after which each rank initialises or reads only its own shards; device: where the weights are kept, if
    not on the rank's device; torch_only: the strategy's flags that only the torch backend supports.
    """
    args = with_whole_checkpoint(args, world)
    with world.raise_together():
        choice = args.family.choose(args, world, torch_only, previous or {})
    config, backend, gelu = choice.config, choice.backend, choice.gelu
    flags = {name: value for name, value in flat(args).items() if name not in PER_RANK_FLAGS}
    software = {"torch": torch.__version__, "device": world.device.type}
    compiled, remark = args.model.compiles(world.device, backend)
    software |= {"compiled": str(compiled)}
    software |= {"backend": f"{backend} ({choice.why})", "gelu": gelu, "attention": choice.attention}
    software |= {"bf16_residual": str(choice.bf16_residual)}
    world.assert_same(flags | software | {f"model's {name}": value for name, value in asdict(config).items()})
    with world.raise_together():
        plan = te_stats = None
        if args.precision.below_bf16:
            plan = extra().choose_formats(
                args.precision, config, world.device, backend, choice.why, sharded=shard is not None
            )
            directory = args.precision.stats_directory(args.checkpoint.output_dir)
            te_stats = extra().te_statistics(args.precision, plan, world, directory)
        with torch.device("meta"):
            model = choice.make()
            if args.model.lora:
                extra().lora().add_adapters(model, args.model)
        precision = Precision()
        if plan is not None:
            precision = extra().set_formats(model, plan, args.precision, args.data.seed, world, te_stats)
        if world.cp_group is not None:
            extra().context_parallel(model, world.cp_group, args.model.cp_comm_type)
        # For a new shape a GPU's libraries select kernels again, and its allocator takes memory. On a CPU fillers
        # would only cost time.
        static_shape = world.device.type == "cuda" and args.data.packing and getattr(model, "takes_fillers", False)
        if graphs := args.strategy.replays_layers and not world.is_dry_run:
            quantised, bf16 = plan is not None, args.precision.bf16
            check_cuda_graphs(world, backend, compiled, static_shape, quantised, bf16)
        if compiled:
            compile_layers(model, world.device.type, static_shape=static_shape, cuda_graphs=graphs)
    if shard is not None:
        shard(model)
    extras = {}
    with world.raise_together():
        if next(model.parameters()).is_meta:  # else the strategy has allocated the storage
            if (device or world.device).type == "cpu" and not world.is_dry_run:
                check_host_memory(model, args.do_train, world.local_size)
            model.to_empty(device=device or world.device)
        if not world.is_dry_run:
            initialise(model, args.data.seed, config.initializer_range)
        if choice.read and not world.is_dry_run:
            pieces, extras = choice.read()
            parameters = dict(model.named_parameters())
            for name, tensor in pieces:
                copy_to_shard(parameters[name], tensor)
        if args.precision.fp8_params:
            precision = precision.quantise_weights()
        # Transformer Engine casts weights itself, and shards are gathered in bf16.
        if args.precision.bf16 and backend == "torch" and plan is None and shard is None:
            rounded = RoundedWeights(model.get_submodule("layers").children())
            precision = replace(precision, rounded=rounded)
            if graphs:
                keep_addresses(rounded.copies)
    remarks = (*choice.remarks, *([remark] if remark else []))
    chosen = {"attention": choice.attention, "bf16_residual": choice.bf16_residual}
    built = BuiltModel(model, backend, gelu, remarks, precision, extras, compiled, static_shape=static_shape, **chosen)
    if graphs and backend == "te":
        from common.training.command_line import task_of

        with world.raise_together():
            extra().record_graphs(task_of(args)(built, args, world))
    return built


def with_whole_checkpoint(args: RunArguments, world: World) -> RunArguments:
    """The flags, with a run in --model_name_or_path replaced by its newest whole checkpoint; all ranks together.

    UserError if it has none, or for a damaged checkpoint.
    """
    if world.is_dry_run or args.model.model_name_or_path is None:
        return args
    requested = Path(args.model.model_name_or_path)
    root = resolve_directory(str(requested))
    if not world.broadcast_object(is_checkpoint(root)):
        return args
    advice = "give a whole checkpoint, or another model"
    if root != requested:
        return with_flags(args, model_name_or_path=str(newest_usable(requested, world, advice)))
    if damage := damage_of(root, world):
        world.raise_on_all(UserError(f"--model_name_or_path {requested}: {damage}: {advice}"))
    return args


def check_host_memory(model: nn.Module, trains: bool, ranks: int) -> None:
    """UserError if the weights of all ranks on this machine (with gradients and moments to train) exceed its memory:
    the kernel would kill the ranks without a message."""
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    needed = ranks * (4 if trains else 1) * sum(p.numel() * p.element_size() for p in parameters)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        what = "weights, gradients and moments" if trains else "weights"
        raise UserError(
            f"{what} of the {ranks} rank{'s' * (ranks > 1)} on this machine need {needed / 1e9:,.0f} GB, and it has "
            f"{available / 1e9:,.0f}: choose a smaller model, or estimate with --dry_run"
        )
