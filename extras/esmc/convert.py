"""ESM C's weights between this project's names and transformers' (`EsmcForMaskedLM`), lossless in both directions.

Ours fuse query, key and value into one matrix, gate and up into another, and fold each LayerNorm into the block that
follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

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
from common.models.layers.initialise import count_parameters
from extras.esmc.config import ESMC_SIZES, EsmcConfig
from extras.esmc.model import EsmcForMaskedLM

ARCHITECTURE = "EsmcForMaskedLM"
# One layer: ours -> theirs, end to end by rows, of equally many each.
_LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight": ("input_layernorm.weight",),
    "self_attention.layernorm_qkv.layer_norm_bias": ("input_layernorm.bias",),
    "self_attention.layernorm_qkv.weight": tuple(f"self_attn.{x}_proj.weight" for x in "qkv"),
    "self_attention.q_norm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_norm.weight": ("self_attn.k_norm.weight",),
    "self_attention.proj.weight": ("self_attn.o_proj.weight",),
    "layernorm_mlp.layer_norm_weight": ("post_attention_layernorm.weight",),
    "layernorm_mlp.layer_norm_bias": ("post_attention_layernorm.bias",),
    "layernorm_mlp.fc1_weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "layernorm_mlp.fc2_weight": ("mlp.down_proj.weight",),
}
_HEAD = tuple(f"lm_head.{part}.{kind}" for part in ("dense", "layer_norm", "decoder") for kind in ("weight", "bias"))
_REDUNDANT = ("inv_freq",)  # what a checkpoint may keep of constants, by the ends of names


def _parts(config: EsmcConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(our name, their names) of every parameter, in the order of an export."""
    yield "embeddings.word_embeddings.weight", ("esmc.embed_tokens.weight",)
    for n in range(config.num_hidden_layers):
        for ours, theirs in _LAYER.items():
            yield f"encoder.layers.{n}.{ours}", tuple(f"esmc.layers.{n}.{name}" for name in theirs)
    yield "encoder.emb_layer_norm_after.weight", ("esmc.norm.weight",)
    yield from ((name, (name,)) for name in _HEAD)


def pieces_to_hf(get: Callable[[str], Tensor], config: EsmcConfig) -> Iterator[tuple[str, Tensor]]:
    """Theirs, one tensor at a time: `get` is asked for each of our parameters once, always in the same order."""
    for ours, names in _parts(config):
        for name, tensor in zip(names, get(ours).chunk(len(names)), strict=True):
            yield name, tensor.contiguous()


def pieces_from_hf(theirs: Mapping[str, Tensor], config: EsmcConfig, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """(our name, tensor), one at a time, in fp32. UserError unless `theirs` are such a model's tensors, and finite."""
    tensors = {name: tensor for name, tensor in theirs.items() if not name.endswith(_REDUNDANT)}
    check_tensors(tensors, _expected(config), ARCHITECTURE, where)
    return (
        (ours, torch.cat([check_finite(name, theirs[name], where).float() for name in names]))
        for ours, names in _parts(config)
    )


def read_pretrained(directory: str, config: EsmcConfig) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Tensor]]:
    """(our parameters as (name, tensor), {}) of a local directory's safetensors, or of a Hub repository's."""
    root, theirs = read_tensors(directory)
    return pieces_from_hf(theirs, config, str(root)), {}


def save_pretrained(
    pieces: Iterator[tuple[str, Tensor]],
    config: EsmcConfig,
    directory: Path,
    training: Training = UNKNOWN,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a directory that stock `EsmcForMaskedLM` / `AutoModelForMaskedLM` / `AutoTokenizer.from_pretrained` open
    offline. pieces: transformers' tensors as `pieces_to_hf` gives them; training: for the model card."""
    with torch.device("meta"):
        parameters = count_parameters(EsmcForMaskedLM(config))
    export = Export(
        config,
        ARCHITECTURE,
        tags=("fill-mask", "esmc", "protein"),
        expected=_expected(config),
        parameters=parameters,
        finish=write_tokenizer,
        training=training,
        published=ESMC_SIZES,
    )
    write_directory(pieces, export, directory, shard_bytes)


def _expected(config: EsmcConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return dict(pieces_to_hf(EsmcForMaskedLM(config).state_dict().__getitem__, config))


def write_tokenizer(directory: Path) -> None:
    from transformers import EsmcTokenizer

    EsmcTokenizer().save_pretrained(directory)
