"""The flags of a decoder: a published model, or one of any size. The FSDP guides' names are aliases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.cli import UserError
from common.flags import Missing, flag
from common.models.layers.backend import BackendFlags
from extras.decoders.config import (
    MODEL_TYPES,
    PRESETS,
    DecoderConfig,
    check_supported,
    load_decoder_config,
    preset_like,
)

# Flags that replace the configuration's field of the same name and type.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "initializer_range", "rope_theta"),
)
NEOX = (
    "--model_type gpt_neox: its layers (LayerNorm with biases, rotary embeddings of a quarter of each head) are not "
    "implemented: choose " + ", ".join(MODEL_TYPES)
)


@dataclass(frozen=True)
class DecoderFlags(BackendFlags):
    group = "model"
    required = ("model",)
    advanced = ("intermediate_size", "num_key_value_heads", "initializer_range", "rope_theta", "vocab_size")

    model: str | None = flag(
        None,
        f"The decoder to train from random weights: {', '.join(PRESETS)}, a directory with config.json, a Hub name.",
    )
    model_type: str | None = flag(
        None,
        f"Instead, a decoder of this family and of the sizes below: {', '.join(MODEL_TYPES)}. Sizes that are not "
        "given are those of the family's published model with these sizes, or of its first.",
    )
    hidden_size: int | None = flag(None, "Hidden size. Default: the model's.", "hidden_width")
    intermediate_size: int | None = flag(None, "Of the feed-forward block. Default: the model's.")
    num_hidden_layers: int | None = flag(None, "Layers. Default: the model's.", "num_layers")
    num_attention_heads: int | None = flag(None, "Heads of queries. Default: the model's.", "num_heads")
    num_key_value_heads: int | None = flag(
        None, "Heads of keys and values. Default: the model's; with another number of --num_attention_heads, as many."
    )
    vocab_size: int | None = flag(None, "Size of the vocabulary, at least the tokenizer's. Default: the model's.")
    initializer_range: float | None = flag(None, "Standard deviation of initial weights. Default: the model's, 0.02.")
    rope_theta: float | None = flag(
        None, "Base of the rotary embedding's wavelengths. Default: the model's.", "rotary_emb_base"
    )

    changed = {
        "model_name_or_path": flag(
            None,
            "In place of --model, given weights: a directory (say final_model/), or with --model_type a Hub name.",
        )
    }
    overrides = {"model": ("model_name_or_path",), "model_name_or_path": ("model",)}
    last_wins = ("model", "model_name_or_path")

    def missing(self) -> Iterator[Missing]:
        if not (self.model or self.model_type or self.model_name_or_path):
            yield Missing("--model", "the decoder to train", "llama3_2_1b")

    def check(self) -> None:
        if self.model_type == "gpt_neox":
            raise UserError(NEOX)
        self.require_choice("model_type", (None, *MODEL_TYPES))
        if self.model and self.model_name_or_path:
            raise UserError("--model (random weights) excludes --model_name_or_path (given weights)")
        self.require_at_least(1, *(name for name in SIZES if name not in ("initializer_range", "rope_theta")))
        self.require_above(0, "initializer_range", "rope_theta")

    def decoder_config(self, context: int) -> tuple[DecoderConfig, str | None]:
        """(configuration for contexts of so many tokens, remark for the log). UserError for an impossible one."""
        sizes = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        base = self.model or self.model_name_or_path or preset_like(self.model_type, sizes)
        config = load_decoder_config(base)
        if self.model_type and config.model_type != PRESETS[MODEL_TYPES[self.model_type][0]].config.model_type:
            raise UserError(f"--model_type {self.model_type}: {base} is a {config.model_type}: drop one of the two")
        changed = ", ".join(f"--{name}" for name, size in sizes.items() if size != getattr(config, name))
        if self.model_name_or_path and changed:
            raise UserError(f"{changed}: cannot change the weights of --model_name_or_path: drop one of the two")
        heads = sizes.get("num_attention_heads", config.num_attention_heads)
        if heads != config.num_attention_heads:
            sizes.setdefault("num_key_value_heads", heads)
        differing = [f"{k} {v}, not {getattr(config, k)}" for k, v in sizes.items() if v != getattr(config, k)]
        # A longer context than the model was published for is recorded; for a shorter one nothing changes.
        longest = max(config.max_position_embeddings, context)
        config = replace(config, **sizes, max_position_embeddings=longest)
        named = f"--model_type {self.model_type} (as {base})" if self.model_type else f"--model {base}"
        check_supported(config, named)
        remark = f"Model: {base}" + (f", but for {'; '.join(differing)}" if differing else "")
        return config, remark
