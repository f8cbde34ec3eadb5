"""Which ESM-2 the flags ask for, and whether this machine can have it."""

from __future__ import annotations

from functools import partial

import torch

from common.esm2 import presets
from common.esm2.config import override
from common.esm2.flags import NO_KERNEL, check_context, te_attends
from common.esm2.gelu import choose_gelu
from common.esm2.model import Esm2ForMaskedLM
from common.esm2.pretrained import read_pretrained
from common.layers.backend import check_device, choose_backend
from common.prepare.encode_records import check_tokenizer
from common.ranks.world import World
from common.tasks.arguments import TrainArguments
from common.tasks.built import ModelChoice


def choose_esm2(args: TrainArguments, world: World, torch_only: tuple[str, ...], so_far: dict) -> ModelChoice:
    """torch_only: flags that are given and only the torch backend can honour; so_far: what the run that goes on has
    computed with. UserError for what cannot be had here. No collective."""
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
    attention = f"Attention by torch's kernels: {NO_KERNEL}" if backend == "te" and not te_attends(config) else None
    remarks = tuple(line for line in (f"Backend: {backend} ({why})", attention, remark) if line)
    read = partial(read_pretrained, args.model_name_or_path, config) if args.model_name_or_path else None
    make = partial(Esm2ForMaskedLM, config, backend, torch.bfloat16 if args.bf16_residual else torch.float32)
    return ModelChoice(config, backend, why, gelu, remarks, make, read)
