"""What an ESM-2 model is made of, under transformers' names: the fields of its config.json.

A class of our own, since importing transformers' takes a process longer than it needs for everything else it does
before its first step; a directory is written by transformers itself (`to_transformers`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UserError
from common.files import alphabet
from common.files.untrusted import check_type, shorten
from common.layers.model_config import check_positive, check_sizes, read_config

# What must agree for a checkpoint to be of the same model; the rest of config.json is free to differ.
FINGERPRINT_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "layer_norm_eps", "token_dropout", "position_embedding_type", "hidden_act"),
)
MOST_POSITIONS = 1 << 20


@dataclass
class Esm2Config:
    """The values here are those that `transformers.EsmConfig` gives to what a config.json leaves out.

    others: what else a config.json holds, but for what names code; it plays no part here, and is written again.
    """

    set_by: ClassVar[str] = "--config_overrides {name}={size}, or another --config_name"

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
        """From a config.json. ValueError where it is none, OSError where it cannot be read."""
        content = read_config(path)
        known = {f.name: f.type for f in fields(cls) if f.name != "others"}
        for name in known.keys() & content.keys():
            check_type(name, content[name], known[name])
        values = {name: value for name, value in content.items() if name in known}
        return cls(**values, others={name: value for name, value in content.items() if name not in known})

    def content(self) -> dict[str, Any]:
        """What `read` makes this of: names and values of a config.json."""
        values = asdict(self)
        others = values.pop("others")
        if values["hidden_act"] is None:  # a field of ours only: absent stays absent
            del values["hidden_act"]
        return others | values

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of the same model: its shape, and which residue each of its ids
        stands for."""
        return {name: getattr(self, name) for name in FINGERPRINT_FIELDS} | {"alphabet": " ".join(alphabet.TOKENS)}

    def to_transformers(self):
        """The same as a `transformers.EsmConfig`."""
        from transformers import EsmConfig

        return EsmConfig.from_dict(self.content())


def check_supported(config: Esm2Config, where: str) -> None:
    """Refuse what this implementation of ESM-2 would silently compute differently."""
    expected = {
        "model_type": "esm",
        "vocab_size": alphabet.VOCAB_SIZE,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": (False, None),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
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
    if config.hidden_size % (2 * config.num_attention_heads):
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not a multiple of 2 x num_attention_heads "
            f"({config.num_attention_heads}): rotary embeddings need an even head dimension"
        )


def override(config: Esm2Config, changes: str) -> Esm2Config:
    """Apply `--config_overrides name=value,name=value`; values take the type of what they replace."""
    for change in changes.split(","):
        name, _, text = (part.strip() for part in change.partition("="))
        old = getattr(config, name, None)
        try:
            if not isinstance(old, int | float):
                raise ValueError
            kind = {"true": True, "false": False}.__getitem__ if isinstance(old, bool) else type(old)
            value = kind(text.lower())
        except (ValueError, KeyError):
            raise UserError(f"--config_overrides {change}: expected name=value, a number or true/false") from None
        setattr(config, name, value)
    check_supported(config, "--config_overrides")
    return config
