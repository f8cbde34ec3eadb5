"""Llama, Mistral and Mixtral as a family (common.models.family): choice, FLOPs, weights from and to transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from common.cli import UserError
from common.distributed.world import World
from common.models.family import Family, ModelSpec
from common.models.layers.backend import Heads, check_device, choose_backend
from common.precision.plan import PrecisionFlags
from extras.families.decoders.config import DecoderConfig, load_decoder_config
from extras.families.decoders.convert import ADAPTER
from extras.families.decoders.model import DecoderForCausalLM

NVFP4_EXPERTS = 128  # what its `split_quantize` asks of rows


def check_context(way: str, layout: str, precision: PrecisionFlags, config: DecoderConfig) -> None:
    """UserError if a decoder's ranks cannot share packs so. way, layout: --cp_comm_type and --cp_layout."""
    if way == "a2a":
        raise UserError("--cp_comm_type a2a: decoders have no all-to-all: choose p2p or all_gather")
    if layout != "dual_chunk":
        raise UserError(
            f"--cp_layout {layout}: causal attention would leave the first ranks little to do: choose dual_chunk"
        )
    if config.num_local_experts and precision.fp8 and precision.fp8_recipe == "current":
        raise UserError(
            "--fp8_recipe current: with --cp_size a rank may have no token of an expert, whose scale ranks share: "
            "choose delayed, block or mxfp8"
        )


def check_experts(config: DecoderConfig, flags: PrecisionFlags) -> None:
    """UserError for what a layer with experts cannot have of the number formats."""
    if flags.quant_stats:
        raise UserError("--quant_stats: not of a layer with experts, whose matrices are several: drop the flag")
    if flags.fp8_params:
        raise UserError(
            "--fp8_params: not of a layer with experts, whose matrices are parts of one parameter: drop the flag"
        )
    for name in ("hidden_size", "intermediate_size"):
        if flags.fp4 and not flags.emulate_precision and getattr(config, name) % NVFP4_EXPERTS:
            raise UserError(
                f"--fp4: Transformer Engine 2.20 casts rows of experts to NVFP4 by {NVFP4_EXPERTS} numbers, and "
                f"{name} is {getattr(config, name)}: choose a multiple, or add --emulate_precision"
            )


class Decoders(Family):
    task = "clm"
    adapter = ADAPTER

    def load_config(self, name: str) -> DecoderConfig:
        return load_decoder_config(name)

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        flags, bf16 = args.model, args.precision.bf16
        config, remark = flags.decoder_config(args.data.max_seq_length)
        torch_only += args.precision.torch_only()
        backend, why = choose_backend(flags, world.device, bf16, torch_only, previous.get("backend"))
        check_device(world.device, bf16, config.head_dim, "torch")  # both backends have torch's attention
        if world.cp_size > 1:
            check_context(flags.cp_comm_type, args.data.cp_layout, args.precision, config)
        if config.num_local_experts:
            check_experts(config, args.precision)
        read = partial(ADAPTER.read, flags.model_name_or_path, config) if flags.model_name_or_path else None
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, causal=True)
        attention, kernels = flags.choose_attention(heads, bf16, world)
        remarks = (remark, f"Backend: {backend} ({why})", *([kernels] if kernels else []))
        make = partial(DecoderForCausalLM, config, backend)
        return ModelSpec(config, backend, why, "", remarks, make, read, attention)

    def flops(self, config: DecoderConfig, tokens: int, squared_lengths: int, targets: int) -> float:
        """Of Mixtral the experts that a token is routed to; of attention the half that a causal mask leaves."""
        hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
        active = config.num_experts_per_tok if config.num_local_experts else 1
        feed_forward = active * 3 * hidden * config.intermediate_size + hidden * config.num_local_experts
        per_token = config.num_hidden_layers * (2 * hidden * hidden + 2 * hidden * kv + feed_forward)
        per_token += hidden * config.vocab_size
        attention = 2 * config.num_hidden_layers * hidden * squared_lengths
        return 3.0 * (2 * per_token * tokens + attention)


FAMILY = Decoders()
