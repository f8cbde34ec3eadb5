"""Llama, Mistral and Mixtral as a family (common.models.registry)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from common.cli import UserError
from common.distributed.world import World
from common.models.layers.backend import check_device, choose_backend
from common.models.layers.hf_directory import Training
from common.models.registry import Family, ModelSpec
from extras.decoders.config import DecoderConfig, load_decoder_config
from extras.decoders.convert import pieces_to_hf, read_decoder, save_decoder
from extras.decoders.model import DecoderForCausalLM


class Decoders(Family):
    task = "clm"

    def load_config(self, name: str) -> DecoderConfig:
        return load_decoder_config(name)

    def choose(self, args: Any, world: World, torch_only: tuple[str, ...], previous: dict) -> ModelSpec:
        flags, bf16 = args.model, args.precision.bf16
        config, remark = flags.decoder_config(args.data.max_seq_length)
        torch_only += ("--emulate_precision",) * args.precision.emulate_precision
        torch_only += ("--model with experts (Mixtral)",) * bool(config.num_local_experts)
        backend, why = choose_backend(flags, world.device, bf16, torch_only, previous.get("backend"))
        check_device(world.device, bf16, config.head_dim, "torch")  # both backends have torch's attention
        if world.cp_size > 1:
            raise UserError(
                f"--cp_size {world.cp_size}: context parallelism has no causal attention yet: use train_fsdp2.py with "
                "--activation_checkpointing full, or a shorter --max_seq_length"
            )
        if args.precision.quant_stats and config.num_local_experts:
            raise UserError("--quant_stats: not of a layer with experts, whose matrices are several: drop the flag")
        read = None
        if where := flags.model_name_or_path:
            read = lambda: (read_decoder(where, config), {})  # noqa: E731
        remarks = (remark, f"Backend: {backend} ({why})")
        return ModelSpec(config, backend, why, "", remarks, partial(DecoderForCausalLM, config, backend), read)

    def make(self, config: DecoderConfig) -> DecoderForCausalLM:
        return DecoderForCausalLM(config)

    def flops(self, config: DecoderConfig, tokens: int, squared_lengths: int, targets: int) -> float:
        """Of Mixtral the experts that a token is routed to; of attention the half that a causal mask leaves."""
        hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
        active = config.num_experts_per_tok if config.num_local_experts else 1
        feed_forward = active * 3 * hidden * config.intermediate_size + hidden * config.num_local_experts
        per_token = config.num_hidden_layers * (2 * hidden * hidden + 2 * hidden * kv + feed_forward)
        per_token += hidden * config.vocab_size
        attention = 2 * config.num_hidden_layers * hidden * squared_lengths
        return 3.0 * (2 * per_token * tokens + attention)

    def to_hf(
        self, get: Callable[[str], Tensor], config: DecoderConfig, extras: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        return pieces_to_hf(get, config)

    def save(
        self,
        tensors: Iterator[tuple[str, Tensor]],
        config: DecoderConfig,
        directory: Path,
        training: Training,
        tokenizer: Any,
    ) -> None:
        save_decoder(tensors, config, directory, tokenizer.save, training)


FAMILY = Decoders()
