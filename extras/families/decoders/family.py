"""Llama, Mistral and Mixtral as a family (common.models.family): checks, FLOPs, weights from and to transformers."""

from __future__ import annotations

from typing import Any

from common.cli import UserError
from common.distributed.world import World
from common.models.family import BackendFamily
from common.models.layers.backend import Heads
from common.models.layers.state_dict_adapter import StateDictAdapter
from common.precision import PrecisionFlags
from extras.families.decoders.config import DecoderConfig, load_decoder_config
from extras.families.decoders.convert import ADAPTER

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


class Decoders(BackendFamily):
    task = "clm"
    adapter: StateDictAdapter = ADAPTER

    def load_config(self, name: str) -> DecoderConfig:
        return load_decoder_config(name)

    def configuration(self, args: Any) -> tuple[DecoderConfig, str | None]:
        return args.model.decoder_config(args.data.max_seq_length)

    def heads(self, config: DecoderConfig) -> Heads:
        return Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, causal=True)

    def check_run(self, args: Any, config: DecoderConfig, backend: str, world: World) -> None:
        if world.cp_size > 1:
            check_context(args.model.cp_comm_type, args.data.cp_layout, args.precision, config)
        if config.num_local_experts:
            check_experts(config, args.precision)

    def flops(
        self, config: DecoderConfig, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0
    ) -> float:
        """Floating-point operations of a training step: of Mixtral the experts that a token is routed to, of attention
        the half that a causal mask leaves."""
        hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
        active = config.num_experts_per_tok if config.num_local_experts else 1
        feed_forward = active * 3 * hidden * config.intermediate_size + hidden * config.num_local_experts
        per_token = config.num_hidden_layers * (2 * hidden * hidden + 2 * hidden * kv + feed_forward)
        per_token += hidden * config.vocab_size
        attention = 2 * config.num_hidden_layers * hidden * squared_lengths
        return 3.0 * (2 * per_token * tokens + attention)


FAMILY = Decoders()
