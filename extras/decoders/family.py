"""Llama, Mistral and Mixtral as a family (common.models.registry): choice, FLOPs, weights from and to transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.cli import UserError
from common.distributed.world import World
from common.models.layers.backend import Heads, check_device, choose_backend
from common.models.layers.hf_directory import (
    SHARD_BYTES,
    UNKNOWN,
    Export,
    Training,
    check_finite,
    check_tensors,
    read_tensors,
    write_directory,
)
from common.models.registry import Family, ModelSpec
from common.precision.plan import PrecisionFlags
from extras.decoders.config import DecoderConfig, load_decoder_config
from extras.decoders.model import DecoderForCausalLM

# Weights between our decoders' names and Hugging Face's (Llama-, Mistral-, MixtralForCausalLM), without loss.
#
# Ours fuse query, key and value into one matrix, gate and up into another, and keep all experts of a layer in one.
# Mixtral's experts have the names of the Hub's checkpoints, which transformers 4 and 5 both read.

NVFP4_EXPERTS = 128  # what its `split_quantize` asks of rows

# What a checkpoint may keep of constants, by the ends of names.
_REDUNDANT = ("rotary_emb.inv_freq",)

# Our tensor, and the ones that it is made of: end to end, by rows.
Parts = tuple[str, tuple[str, ...], tuple[int, ...]]


def parts(config: DecoderConfig) -> Iterator[Parts]:
    """(our name, their names, rows of each) for every parameter, in the order of a checkpoint."""
    hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads, experts = config.num_attention_heads, config.num_key_value_heads, config.num_local_experts
    yield "embed_tokens.weight", ("model.embed_tokens.weight",), (config.vocab_size,)
    for n in range(config.num_hidden_layers):
        ours, theirs = f"layers.{n}", f"model.layers.{n}"
        attention, mlp = f"{ours}.self_attention", f"{ours}.layernorm_mlp"
        qkv = tuple(f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv")
        yield f"{attention}.layernorm_qkv.layer_norm_weight", (f"{theirs}.input_layernorm.weight",), (hidden,)
        yield f"{attention}.layernorm_qkv.weight", qkv, (heads * dim, kv_heads * dim, kv_heads * dim)
        yield f"{attention}.proj.weight", (f"{theirs}.self_attn.o_proj.weight",), (hidden,)
        yield f"{mlp}.layer_norm_weight", (f"{theirs}.post_attention_layernorm.weight",), (hidden,)
        if experts:
            moe = f"{theirs}.block_sparse_moe"
            fc1 = tuple(f"{moe}.experts.{e}.{w}.weight" for e in range(experts) for w in ("w1", "w3"))
            fc2 = tuple(f"{moe}.experts.{e}.w2.weight" for e in range(experts))
            yield f"{mlp}.gate_weight", (f"{moe}.gate.weight",), (experts,)
        else:
            fc1 = tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))
            fc2 = (f"{theirs}.mlp.down_proj.weight",)
        yield f"{mlp}.fc1_weight", fc1, (ffn,) * len(fc1)
        yield f"{mlp}.fc2_weight", fc2, (hidden,) * len(fc2)
    yield "norm.weight", ("model.norm.weight",), (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", ("lm_head.weight",), (config.vocab_size,)


def pieces_to_hf(get: Callable[[str], Tensor], config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Theirs, one tensor at a time: `get` is asked for each of our parameters once, always in the same order."""
    for ours, theirs, rows in parts(config):
        for name, tensor in zip(theirs, get(ours).split(rows), strict=True):
            yield name, tensor.contiguous()


def pieces_from_hf(theirs: Mapping[str, Tensor], config: DecoderConfig, where: str) -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor), one at a time, in fp32. UserError unless `theirs` are such a model's tensors, and finite."""
    with torch.device("meta"):
        expected = dict(pieces_to_hf(DecoderForCausalLM(config).state_dict().__getitem__, config))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    tensors = {name: tensor for name, tensor in theirs.items() if name not in tied and not name.endswith(_REDUNDANT)}
    check_tensors(tensors, expected, config.architecture, where)
    return (
        (ours, torch.cat([check_finite(name, theirs[name], where).float() for name in names]))
        for ours, names, _ in parts(config)
    )


def read_decoder(directory: str, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Our parameters as (name, tensor) of a local directory's safetensors, or of a Hub repository's."""
    root, theirs = read_tensors(directory)
    return pieces_from_hf(theirs, config, str(root))


def save_decoder(
    pieces: Iterator[tuple[str, Tensor]],
    config: DecoderConfig,
    directory: Path,
    save_tokenizer: Callable[[Path], None],
    training: Training = UNKNOWN,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that `AutoModelForCausalLM.from_pretrained` opens offline.

    pieces: Hugging Face's tensors as `pieces_to_hf` gives them; training: for the model card. As
    common.models.layers.hf_directory.write_directory.
    """
    with torch.device("meta"):
        model = DecoderForCausalLM(config)
        expected = dict(pieces_to_hf(model.state_dict().__getitem__, config))
    export = Export(
        config,
        config.architecture,
        tags=("text-generation", config.model_type),
        expected=expected,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        finish=save_tokenizer,
        training=training,
    )
    write_directory(pieces, export, directory, shard_bytes)


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
        read = partial(self.read, flags.model_name_or_path, config) if flags.model_name_or_path else None
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, causal=True)
        attention, kernels = flags.choose_attention(heads, bf16, world)
        remarks = (remark, f"Backend: {backend} ({why})", *([kernels] if kernels else []))
        make = partial(DecoderForCausalLM, config, backend)
        return ModelSpec(config, backend, why, "", remarks, make, read, attention)

    def read(self, name: str, config: DecoderConfig) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
        return read_decoder(name, config), {}

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
