"""ESM C's configuration: config.json's fields, alphabet, the three published sizes (without a network), checks.

Sources: `transformers.EsmcConfig`, whose defaults are those of the 6B; for the other two sizes `ESMC_300M_202412` and
`ESMC_600M_202412` in the authors' package esm, whose feed-forward width is 8/3 of the hidden size, rounded up to a
multiple of 256.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UserError, one_line
from common.files.safe_files import shorten
from common.models.esm2.alphabet import TOKENS as ESM2_TOKENS
from common.models.layers import hf_directory
from common.models.layers.hf_directory import check_heads, check_positive, check_sizes, fields_of, read_config

# ESM-2's, but for the chain break: the ids of residues, <mask> and the like are the same.
TOKENS = tuple("|" if token == "<null_1>" else token for token in ESM2_TOKENS)
ALPHABET = " ".join(TOKENS)
VOCAB_SIZE = 64  # rows of the embedding and of the decoder, all of them trained
# What a config.json may say otherwise, and this implementation does not compute; None: the default.
FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "pad_token_id": 1,
    "mask_token_id": 32,
}
FINGERPRINT_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
)


@dataclass
class EsmcConfig:
    """The fields of an ESM C config.json, with the defaults of `transformers.EsmcConfig`. others: all other keys."""

    set_by: ClassVar[str] = "--config_overrides {name}={size}, or another --config_name"
    architecture: ClassVar[str] = "EsmcForMaskedLM"
    layer_norm_eps: ClassVar[float] = 1e-5  # not in config.json: of every LayerNorm
    token_dropout: ClassVar[bool] = False

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
    def read(cls, path: Path) -> EsmcConfig:
        """From a config.json. ValueError if it is malformed, OSError if it cannot be read."""
        return cls.of(read_config(path))

    @classmethod
    def of(cls, content: dict[str, Any]) -> EsmcConfig:
        """From the content of a config.json. ValueError if it is malformed."""
        values, others = fields_of(cls, content)
        config = cls(**values)
        # Both follow from the fields above, which --config_overrides may change.
        derived = {"num_key_value_heads": config.num_attention_heads}
        derived["head_dim"] = config.hidden_size // max(1, config.num_attention_heads)
        for name, expected in derived.items():
            if (value := others.pop(name, None)) not in (None, expected):
                raise ValueError(f"{name} is {shorten(value)}, ESM C has {expected} with these sizes")
        config.others = others
        return config

    def content(self) -> dict[str, Any]:
        """The inverse of `read`: names and values of a config.json."""
        values = asdict(self)
        return values.pop("others") | values

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of the same model."""
        return {name: getattr(self, name) for name in FINGERPRINT_FIELDS} | {"alphabet": ALPHABET}

    def to_transformers(self):
        """The same as a `transformers.EsmcConfig`."""
        from transformers import EsmcConfig

        return EsmcConfig.from_dict(self.content())


def check_supported(config: EsmcConfig, where: str) -> None:
    """Refuse a configuration that this implementation would silently compute differently, but for dropout, which only
    training applies (`check_no_dropout`)."""
    if config.model_type != "esmc":
        raise UserError(f"{where}: model_type is {shorten(config.model_type)}, not esmc")
    if config.vocab_size != VOCAB_SIZE:
        raise UserError(f"{where}: vocab_size is {shorten(config.vocab_size)}, ESM C has {VOCAB_SIZE}")
    rope = config.others.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where}: rope_parameters is {shorten(rope)}: must be an object")
    given = config.others | rope
    for name, allowed in (FIXED | {"rope_type": "default"}).items():
        if given.get(name) not in (None, allowed):
            raise UserError(f"{where}: {name} is {shorten(given[name])}, ESM C here has {allowed!r}")
    check_sizes(config, where)
    check_positive(config, where, "initializer_range")
    check_heads(config, where)


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
    check_supported(config, name)
    try:
        config.to_transformers()
    except Exception as error:  # its checks of the fields that are unused here
        raise UserError(f"{name}: transformers refuses its config.json: {one_line(error)[:160]}") from error
    return config
