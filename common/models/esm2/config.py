"""ESM-2's configuration: config.json's fields, the six published sizes (without a network), checks, overrides.

Source: config.json of the facebook/esm2_* checkpoints and table S1 of Lin et al., Science 379:1123 (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UserError
from common.files.safe_files import shorten
from common.hooks import extra
from common.models.esm2 import alphabet
from common.models.layers import hf_directory
from common.models.layers.hf_directory import (
    Config,
    check_heads,
    check_no_dropout,
    check_positive,
    check_sizes,
    fields_of,
    read_config,
)

# Must agree for a checkpoint to be of the same model; the rest of config.json may differ.
FINGERPRINT_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "layer_norm_eps", "token_dropout", "position_embedding_type", "hidden_act"),
)
MOST_POSITIONS = 1 << 20
HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}


@dataclass
class Esm2Config:
    """The fields of an ESM-2 config.json, with the defaults of `transformers.EsmConfig`.

    A class of our own: importing transformers' takes longer than everything else before the first step. others: all
    other keys of a config.json (but those that load code), unused here and written again.
    """

    set_by: ClassVar[str] = "--config_overrides {name}={size}, or another --config_name"
    architecture: ClassVar[str] = "EsmForMaskedLM"

    model_type: str = "esm"
    vocab_size: int | None = None
    num_hidden_layers: int = 12
    hidden_size: int = 768
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 1026
    position_embedding_type: str | None = "absolute"
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-12
    hidden_act: str | None = None
    initializer_range: float = 0.02
    token_dropout: bool = False
    emb_layer_norm_before: bool | None = None
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    pad_token_id: int | None = None
    mask_token_id: int | None = None
    tie_word_embeddings: bool = True
    is_folding_model: bool | None = False
    is_decoder: bool | None = False
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Esm2Config:
        """From a config.json. ValueError if it is malformed, OSError if it cannot be read."""
        content = read_config(path)
        if content.get("model_type") == "nv_esm":
            content = extra().recipe_config(content)
        return cls.of(content)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Esm2Config:
        """From the content of a config.json. ValueError if it is malformed."""
        values, others = fields_of(cls, content)
        return cls(**values, others=others)

    def content(self) -> dict[str, Any]:
        """The inverse of `read`: names and values of a config.json."""
        values = asdict(self)
        others = values.pop("others")
        if values["hidden_act"] is None:  # a field of ours alone: absent stays absent
            del values["hidden_act"]
        return others | values

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of the same model: its shape, and its alphabet."""
        return {name: getattr(self, name) for name in FINGERPRINT_FIELDS} | {"alphabet": " ".join(alphabet.TOKENS)}

    def to_transformers(self):
        """The same as a `transformers.EsmConfig`."""
        from transformers import EsmConfig

        return EsmConfig.from_dict(self.content())


def gelu_of(config: Esm2Config) -> str:
    """`exact` or `tanh`, by config.json. Any other `hidden_act` is ignored, as in transformers."""
    return "tanh" if getattr(config, "hidden_act", None) == HIDDEN_ACT["tanh"] else "exact"


def check_supported(config: Esm2Config, where: str) -> None:
    """Refuse a configuration that this implementation would silently compute differently, but for dropout, which only
    training applies (`check_no_dropout`)."""
    expected = {
        "model_type": "esm",
        "vocab_size": alphabet.VOCAB_SIZE,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": (False, None),
        "pad_token_id": alphabet.PAD,
        "mask_token_id": alphabet.MASK,
        "tie_word_embeddings": True,
        "is_folding_model": (False, None),
        "is_decoder": (False, None),
        "rope_theta": 10000.0,
    }
    for name, allowed in expected.items():
        value, allowed = getattr(config, name), allowed if isinstance(allowed, tuple) else (allowed,)
        if value not in allowed:
            raise UserError(f"{where}: {name} is {shorten(value)}, ESM-2 pretraining here needs {allowed[0]!r}")
    check_sizes(config, where)
    if config.max_position_embeddings > MOST_POSITIONS:
        raise UserError(
            f"{where}: max_position_embeddings is {config.max_position_embeddings}: an export has an embedding for "
            f"each, of at most {MOST_POSITIONS:,}"
        )
    check_positive(config, where, "layer_norm_eps", "initializer_range")
    check_heads(config, where)


def override(config: Config, changes: str, check: Callable[[Any, str], None] = check_supported) -> Config:
    """Apply `--config_overrides name=value,name=value`; values take the type of what they replace. check: of the
    family of the configuration."""
    for change in changes.split(","):
        name, _, text = (part.strip() for part in change.partition("="))
        old = vars(config).get(name)
        try:
            if not isinstance(old, int | float):
                raise ValueError
            kind = {"true": True, "false": False}.__getitem__ if isinstance(old, bool) else type(old)
            value = kind(text.lower())
        except (ValueError, KeyError):
            raise UserError(f"--config_overrides {change}: expected name=value, a number or true/false") from None
        setattr(config, name, value)
    check(config, "--config_overrides")
    check_no_dropout(config, "--config_overrides")
    return config


# name: (layers, hidden size, attention heads); the feed-forward size is four times the hidden size
ESM2_SIZES = {
    "facebook/esm2_t6_8M_UR50D": (6, 320, 20),
    "facebook/esm2_t12_35M_UR50D": (12, 480, 20),
    "facebook/esm2_t30_150M_UR50D": (30, 640, 20),
    "facebook/esm2_t33_650M_UR50D": (33, 1280, 20),
    "facebook/esm2_t36_3B_UR50D": (36, 2560, 40),
    "facebook/esm2_t48_15B_UR50D": (48, 5120, 40),
}


def esm2_config(layers: int, hidden_size: int, heads: int, **overrides) -> Esm2Config:
    """An ESM-2 configuration of any size, with everything but the size as published."""
    published = Esm2Config(
        vocab_size=alphabet.VOCAB_SIZE,
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=4 * hidden_size,
        position_embedding_type="rotary",
        layer_norm_eps=1e-5,
        hidden_act="gelu",  # exact: see common.models.esm2.family
        token_dropout=True,
        emb_layer_norm_before=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=alphabet.PAD,
        mask_token_id=alphabet.MASK,
        others={"architectures": ["EsmForMaskedLM"], "vocab_list": None},
    )
    return replace(published, **overrides)


def load_config(name: str) -> Esm2Config:
    """The configuration behind a built-in name, a local directory, or a name on the Hub (in this order)."""
    if name in ESM2_SIZES:
        return esm2_config(*ESM2_SIZES[name])
    config = hf_directory.load_config(name, Esm2Config.read, name, ESM2_SIZES, "")
    check_supported(config, name)
    return config
