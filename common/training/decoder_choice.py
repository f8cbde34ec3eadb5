"""Which decoder the flags ask for, and whether this machine can have it."""

from __future__ import annotations

from functools import partial

from common.cli import UserError
from common.model.backend import check_device
from common.model.decoder import DecoderForCausalLM
from common.model.decoder_pretrained import read_decoder
from common.ranks.world import World
from common.training.built import ModelChoice
from common.training.causal_arguments import CausalArguments

WHY = "decoder layers are in plain PyTorch"


def choose_decoder(args: CausalArguments, world: World, torch_only: tuple[str, ...], so_far: dict) -> ModelChoice:
    """As `choose_esm2`; there is one backend."""
    config, told = args.decoder_config(args.max_seq_length)
    check_device(world.device, args.bf16, config.head_dim, "torch")
    if world.cp_size > 1:
        raise UserError(
            f"--cp_size {world.cp_size}: a decoder's contexts are not shared by ranks yet (causal attention): use "
            "train_fsdp2.py with --activation_checkpointing full, or a shorter --max_seq_length"
        )
    read = None
    if args.model_name_or_path:
        where = args.model_name_or_path
        read = lambda: (read_decoder(where, config), {})  # noqa: E731
    return ModelChoice(config, "torch", WHY, "", (told, *args.remarks()), partial(DecoderForCausalLM, config), read)
