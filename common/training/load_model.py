"""The model of a run, on its device: built without storage, sharded if the strategy shards, then given its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from common.model import esm2, presets
from common.model.backend import NO_KERNEL, check_context, check_device, choose_backend, choose_gelu, te_attends
from common.model.compiling import compile_layers
from common.model.config import Esm2Config, override
from common.model.context_attention import share_context
from common.model.initialise import initialise
from common.model.pretrained import read_pretrained
from common.precision.build import Precision, choose_plan, set_formats, start_te_stats
from common.prepare.encode_records import check_tokenizer
from common.ranks.strategy import copy_rows
from common.ranks.world import World
from common.training.arguments import TrainArguments
from common.training.run_directory import settled_so_far

# Flags that need not be the same on all ranks: places, which may have other names on another node, and what changes
# nothing of the run.
OF_A_RANK = {"dataset_dir", "output_dir", "log_dir", "run_name", "report_to", "disable_tqdm"}
OF_A_RANK |= {"dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"}


@dataclass(frozen=True)
class Built:
    """What `load_model` made of the flags.

    model: before a strategy wraps it; remarks: how it came to be, for the log; extras: of a Hub checkpoint, tensors
    that are exported again but play no part here.
    """

    model: esm2.Esm2ForMaskedLM
    backend: str
    gelu: str
    remarks: tuple[str, ...]
    precision: Precision
    extras: dict[str, Tensor]

    @property
    def config(self) -> Esm2Config:
        return self.model.config

    @property
    def weights(self) -> nn.Module:
        """What is updated, saved and exported: the model's parameters, or their fp32 masters."""
        masters = self.precision.masters
        return masters.weights if masters else self.model


def load_model(
    args: TrainArguments,
    world: World,
    shard: Callable[[esm2.Esm2ForMaskedLM], None] | None = None,
    device: torch.device | None = None,
    torch_only: tuple[str, ...] = (),
) -> Built:
    """The model on the rank's device: random weights of --config_name, or those of --model_name_or_path.

    shard: called while the model has no storage yet; then each rank makes, or reads, only what is its own; device:
    where the weights are kept, if not on the rank's own; torch_only: the strategy's flags that only the torch backend
    can honour.
    """
    so_far = {}
    with world.main_does() as mine:
        if mine:
            so_far = settled_so_far(args)
    so_far = world.share(so_far)
    with world.together():
        if args.tokenizer_name:
            check_tokenizer(args.tokenizer_name)
        config = presets.load_config(args.config_name or args.model_name_or_path)
        if args.config_overrides:
            config = override(config, args.config_overrides)
        torch_only += ("--emulate_precision",) * args.emulate_precision
        backend, why = choose_backend(args, world.device, args.bf16, torch_only, so_far.get("backend"))
        check_device(world.device, args.bf16, config.hidden_size // config.num_attention_heads, backend)
        check_context(args, args.cp_layout, world.cp_size, backend, config)
        gelu, remark = choose_gelu(args.gelu or so_far.get("gelu"), backend, config)
    flags = {name: value for name, value in asdict(args).items() if name not in OF_A_RANK}
    software = {"torch": torch.__version__, "device": world.device.type, "backend": f"{backend} ({why})", "gelu": gelu}
    world.agree(flags | software | {f"model's {name}": value for name, value in asdict(config).items()})
    with world.together():
        plan = choose_plan(args, config, world.device, backend, why, sharded=shard is not None)
        te_stats = start_te_stats(args, plan, world, args.log_directory(args.output_dir))
        with torch.device("meta"):
            model = esm2.Esm2ForMaskedLM(config, backend)
        precision = set_formats(model, plan, args, args.seed, world, te_stats)
        if world.cp_group is not None:
            share_context(model, world.cp_group, args.cp_comm_type)
        if args.torch_compile:
            compile_layers(model, world.device.type)
    if shard is not None:
        shard(model)
    extras = {}
    with world.together():
        if next(model.parameters()).is_meta:  # a strategy may have made the storage itself
            model.to_empty(device=device or world.device)
        if not world.rehearsed:
            extras = _give_values(model, args)
        if args.fp8_params:
            precision = replace(precision, masters=precision.quantised.quantise_weights())
    attention = f"Attention by torch's kernels: {NO_KERNEL}" if backend == "te" and not te_attends(config) else None
    remarks = tuple(line for line in (f"Backend: {backend} ({why})", attention, remark) if line)
    return Built(model, backend, gelu, remarks, precision, extras)


def _give_values(model: esm2.Esm2ForMaskedLM, args: TrainArguments) -> dict[str, Tensor]:
    """Random weights, or given ones; returns what `Built` has as extras."""
    initialise(model, args.seed, model.config.initializer_range)
    if not args.model_name_or_path:
        return {}
    pieces, extras = read_pretrained(args.model_name_or_path, model.config)
    parameters = dict(model.named_parameters())
    for name, tensor in pieces:
        copy_rows(parameters[name], tensor)
    return extras
