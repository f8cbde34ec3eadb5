"""ESM C's weights between this project's names and transformers' (`EsmcForMaskedLM`), lossless in both directions.

Ours fuse query, key and value into one matrix, gate and up into another, and fold each LayerNorm into the block that
follows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.models.layers.state_dict_adapter import StateDictAdapter
from extras.families.esmc.config import ESMC_SIZES, EsmcConfig
from extras.families.esmc.model import EsmcForMaskedLM

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


class EsmcAdapter(StateDictAdapter):
    model = EsmcForMaskedLM
    published = ESMC_SIZES
    redundant = ("inv_freq",)

    def parts(self, config: EsmcConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield "embeddings.word_embeddings.weight", ("esmc.embed_tokens.weight",)
        for n in range(config.num_hidden_layers):
            for ours, theirs in _LAYER.items():
                yield f"encoder.layers.{n}.{ours}", tuple(f"esmc.layers.{n}.{name}" for name in theirs)
        yield "encoder.emb_layer_norm_after.weight", ("esmc.norm.weight",)
        yield from ((name, (name,)) for name in _HEAD)

    def write_tokenizer(self, directory: Path, tokenizer: Any = None) -> None:
        from transformers import EsmcTokenizer

        EsmcTokenizer().save_pretrained(directory)


ADAPTER = EsmcAdapter()
