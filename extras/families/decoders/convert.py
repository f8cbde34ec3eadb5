"""Weights of Llama, Mistral and Mixtral between this project's names and transformers', lossless in both directions.

Ours fuse query, key and value into one matrix, gate and up into another, and keep all experts of a layer in one.
Mixtral's experts have the names of the Hub's checkpoints, which transformers 4 and 5 both read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from common.models.layers.state_dict_adapter import StateDictAdapter
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.model import DecoderForCausalLM

if TYPE_CHECKING:
    from common.models.layers.model_card import Training

QKV = "self_attention.layernorm_qkv.weight"


class DecoderAdapter(StateDictAdapter):
    model = DecoderForCausalLM
    tags = ("text-generation",)
    redundant = ("rotary_emb.inv_freq",)

    def parts(self, config: DecoderConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield "embed_tokens.weight", ("model.embed_tokens.weight",)
        for n in range(config.num_hidden_layers):
            ours, theirs = f"layers.{n}", f"model.layers.{n}"
            attention, mlp = f"{ours}.self_attention", f"{ours}.layernorm_mlp"
            yield f"{attention}.layernorm_qkv.layer_norm_weight", (f"{theirs}.input_layernorm.weight",)
            yield f"{ours}.{QKV}", tuple(f"{theirs}.self_attn.{x}_proj.weight" for x in "qkv")
            yield f"{attention}.proj.weight", (f"{theirs}.self_attn.o_proj.weight",)
            yield f"{mlp}.layer_norm_weight", (f"{theirs}.post_attention_layernorm.weight",)
            if experts := config.num_local_experts:
                moe = f"{theirs}.block_sparse_moe"
                fc1 = tuple(f"{moe}.experts.{e}.{w}.weight" for e in range(experts) for w in ("w1", "w3"))
                fc2 = tuple(f"{moe}.experts.{e}.w2.weight" for e in range(experts))
                yield f"{mlp}.gate_weight", (f"{moe}.gate.weight",)
            else:
                fc1 = tuple(f"{theirs}.mlp.{x}_proj.weight" for x in ("gate", "up"))
                fc2 = (f"{theirs}.mlp.down_proj.weight",)
            yield f"{mlp}.fc1_weight", fc1
            yield f"{mlp}.fc2_weight", fc2
        yield "norm.weight", ("model.norm.weight",)
        if not config.tie_word_embeddings:
            yield "lm_head.weight", ("lm_head.weight",)

    def split(self, name: str, tensor: Tensor, parts: int, config: DecoderConfig) -> Sequence[Tensor]:
        if not name.endswith(QKV):
            return super().split(name, tensor, parts, config)
        kv_rows = config.num_key_value_heads * config.head_dim
        return tensor.split((len(tensor) - 2 * kv_rows, kv_rows, kv_rows))

    def current_name(self, name: str, config: DecoderConfig) -> str | None:
        is_tied = config.tie_word_embeddings and name == "lm_head.weight"
        return None if is_tied else super().current_name(name, config)

    def finish(self, directory: Path, training: Training, tokenizer: Any) -> Mapping[str, str]:
        """Also the keys by which transformers 4 rotates: it ignores those that 5 writes; 5 reads both."""
        path = directory / "config.json"
        content = json.loads(path.read_text())
        scaling = dict(content["rope_parameters"])
        content["rope_theta"] = scaling.pop("rope_theta")
        content["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        return super().finish(directory, training, tokenizer)

    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        tokenizer.save(directory)


ADAPTER = DecoderAdapter()
