"""ESM C's configuration: config.json's fields, alphabet, the three published sizes (without a network), checks.

Sources: `transformers.EsmcConfig`, whose defaults are those of the 6B; for the other two sizes `ESMC_300M_202412` and
`ESMC_600M_202412` in the authors' package esm, whose feed-forward width is 8/3 of the hidden size, rounded up to a
multiple of 256.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from common.cli import UserError, one_line
from common.files.safe_files import shorten
from common.models.esm2.alphabet import TOKENS as ESM2_TOKENS
from common.models.layers import hf_directory
from common.models.layers.config_base import ConfigBase

# ESM-2's, but for the chain break: the ids of residues, <mask> and the like are the same.
TOKENS = tuple("|" if token == "<null_1>" else token for token in ESM2_TOKENS)
ALPHABET = " ".join(TOKENS)
VOCAB_SIZE = 64  # rows of the embedding and of the decoder, all of them trained


@dataclass
class EsmcConfig(ConfigBase):
    """The fields of an ESM C config.json, with the defaults of `transformers.EsmcConfig`. others: all other keys."""

    set_by: ClassVar[str] = "--config_overrides {name}={size}, or another --config_name"
    architecture: ClassVar[str] = "EsmcForMaskedLM"
    layer_norm_eps: ClassVar[float] = 1e-5  # not in config.json: of every LayerNorm
    token_dropout: ClassVar[bool] = False
    described = "ESM C here has"
    fixed = {  # None: the default
        "model_type": "esmc",
        "vocab_size": VOCAB_SIZE,
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "tie_word_embeddings": (False, None),
        "rope_theta": (10000.0, None),
        "pad_token_id": (1, None),
        "mask_token_id": (32, None),
        "rope_type": ("default", None),
    }
    positive = ("initializer_range",)
    fingerprint_fields = (
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    )
    vocabulary = ALPHABET

    model_type: str = "esmc"
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 2560
    intermediate_size: int = 6912
    num_hidden_layers: int = 80
    num_attention_heads: int = 40
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        config = super().of(content)
        # Both follow from the fields above, which --config_overrides may change.
        derived = {"num_key_value_heads": config.num_attention_heads}
        derived["head_dim"] = config.hidden_size // max(1, config.num_attention_heads)
        for name, expected in derived.items():
            if (value := config.others.pop(name, None)) not in (None, expected):
                raise ValueError(f"{name} is {shorten(value)}, ESM C has {expected} with these sizes")
        return config

    def stated(self) -> dict[str, Any]:
        return super().stated() | (self.others.get("rope_parameters") or {})

    def check(self, where: str) -> None:
        rope = self.others.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise UserError(f"{where}: rope_parameters is {shorten(rope)}: must be an object")
        super().check(where)

    def to_transformers(self):
        """The same as a `transformers.EsmcConfig`."""
        from transformers import EsmcConfig

        return EsmcConfig.from_dict(self.content())


# name: (layers, hidden size, attention heads, feed-forward size)
ESMC_SIZES = {
    "biohub/ESMC-300M-hf": (30, 960, 15, 2560),
    "biohub/ESMC-600M-hf": (36, 1152, 18, 3072),
    "biohub/ESMC-6B-hf": (80, 2560, 40, 6912),
}


def esmc_config(layers: int, hidden_size: int, heads: int, ffn_size: int) -> EsmcConfig:
    """An ESM C configuration of any size."""
    return EsmcConfig(
        num_hidden_layers=layers, hidden_size=hidden_size, num_attention_heads=heads, intermediate_size=ffn_size
    )


def load_config(name: str) -> EsmcConfig:
    """The configuration behind a built-in name, a local directory, or a name on the Hub (in this order)."""
    if name in ESMC_SIZES:
        return esmc_config(*ESMC_SIZES[name])
    config = hf_directory.load_config(name, EsmcConfig.read, name, ESMC_SIZES, "")
    config.check(name)
    try:
        config.to_transformers()
    except Exception as error:  # its checks of the fields that are unused here
        raise UserError(f"{name}: transformers refuses its config.json: {one_line(error)[:160]}") from error
    return config
