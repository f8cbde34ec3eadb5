"""Which decoder the flags ask for, and whether this machine can have it."""

from __future__ import annotations

from functools import partial

from common.cli import UserError
from common.decoders.model import DecoderForCausalLM
from common.decoders.pretrained import read_decoder
from common.layers.backend import check_device, choose_backend
from common.ranks.world import World
from common.tasks.built import ModelChoice
from common.tasks.causal_arguments import CausalArguments


def choose_decoder(args: CausalArguments, world: World, torch_only: tuple[str, ...], so_far: dict) -> ModelChoice:
    """As `choose_esm2`."""
    config, told = args.decoder_config(args.max_seq_length)
    torch_only += ("--emulate_precision",) * args.emulate_precision
    torch_only += ("--model with experts (Mixtral)",) * bool(config.num_local_experts)
    backend, why = choose_backend(args, world.device, args.bf16, torch_only, so_far.get("backend"))
    check_device(world.device, args.bf16, config.head_dim, "torch")  # whose attention it is with both
    if world.cp_size > 1:
        raise UserError(
            f"--cp_size {world.cp_size}: a decoder's contexts are not shared by ranks yet (causal attention): use "
            "train_fsdp2.py with --activation_checkpointing full, or a shorter --max_seq_length"
        )
    if args.quant_stats and config.num_local_experts:
        raise UserError("--quant_stats: not of a layer with experts, whose matrices are several: drop the flag")
    read = None
    if args.model_name_or_path:
        where = args.model_name_or_path
        read = lambda: (read_decoder(where, config), {})  # noqa: E731
    remarks = (told, f"Backend: {backend} ({why})", *args.remarks())
    return ModelChoice(config, backend, why, "", remarks, partial(DecoderForCausalLM, config, backend), read)
