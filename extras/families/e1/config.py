"""E1's configuration: config.json's fields, the sizes (without a network), checks.

Source: `E1Config` of the authors' package, Profluent-AI/E1 (Apache 2.0), which gives the fields and their defaults,
and config.json of the models of 300M and 600M parameters. That of 150M was not seen: its shape here has the number of
parameters that is published. transformers has no class of it: the names are the authors'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from common.cli import UserError
from common.files.safe_files import shorten
from common.models.layers import hf_directory
from common.models.layers.config_base import ConfigBase
from extras.families.e1.alphabet import ALPHABET

MOST_SEQUENCES = 1 << 16  # of a set: each has an embedding
MODEL_TYPE = "e1"  # of --model_type and checkpoints; config.json has it in capitals
# What a config.json may say otherwise, and this implementation does not compute.
FIXED = {
    "vocab_size": (ALPHABET.vocab_size, None),
    "hidden_act": "silu",
    "gated_mlp": True,
    "tie_word_embeddings": False,
    "rope_theta_within_seq": 10000.0,
    "pad_token_id": ALPHABET.pad,
    "bos_token_id": ALPHABET.begin,
    "eos_token_id": ALPHABET.end,
}


@dataclass
class E1Config(ConfigBase):
    """The fields of an E1 config.json, with the defaults of its authors' class. others: all other keys.

    global_attention_every_n_layers: the last of so many layers attends to the set, the others within a sequence; 0:
    none does. max_num_positions_global: tokens of a set. profluent_e1, a key of ours: whether the weights are the
    published ones or were trained from them, as their licence asks to show; absent from published config.json's.
    """

    set_by: ClassVar[str] = "--config_overrides {name}={size}, or another --config_name"
    architecture: ClassVar[str] = "E1ForMaskedLM"
    token_dropout: ClassVar[bool] = False
    described = "E1 here has"
    fixed = FIXED
    positive = ("rms_norm_eps", "initializer_range", "rope_theta_global")
    fingerprint_fields = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps"),
        *("global_attention_every_n_layers", "max_num_sequences", "rope_theta_global", "clip_qkv"),
    )
    vocabulary = str(ALPHABET)

    model_type: str = "E1"
    hidden_size: int = 4096
    intermediate_size: int = 16384
    gated_mlp: bool = False
    num_hidden_layers: int = 40
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    global_attention_every_n_layers: int = 0
    max_num_sequences: int = 512
    max_num_positions_within_seq: int = 8192
    max_num_positions_global: int = 131072
    rope_theta_within_seq: float = 10000.0
    rope_theta_global: float = 100000.0
    clip_qkv: float | None = None
    profluent_e1: bool = True
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        heads = content.get("num_attention_heads")
        if content.get("num_key_value_heads", heads) not in (heads, None):
            raise ValueError("num_key_value_heads is not num_attention_heads: E1 here has no grouped queries")
        return super().of({name: value for name, value in content.items() if name != "num_key_value_heads"})

    @property
    def max_position_embeddings(self) -> int:
        return self.max_num_positions_within_seq

    def is_global(self, n: int) -> bool:
        """Whether layer n, from 0, attends to the set."""
        every = self.global_attention_every_n_layers
        return every > 0 and (n + 1) % every == 0

    def content(self) -> dict[str, Any]:
        fixed = {"vocab_size": ALPHABET.vocab_size, "num_key_value_heads": self.num_attention_heads}
        return FIXED | super().content() | fixed

    def fingerprint(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE} | super().fingerprint()

    def check(self, where: str) -> None:
        if str(self.model_type).lower() != MODEL_TYPE:
            raise UserError(f"{where}: model_type is {shorten(self.model_type)}, not E1")
        super().check(where)
        names = ["max_num_sequences", "max_num_positions_within_seq", "max_num_positions_global"]
        hf_directory.check_positive(self, where, *names, *["clip_qkv"] * (self.clip_qkv is not None))
        for name, most in {"max_num_sequences": MOST_SEQUENCES, "global_attention_every_n_layers": 1 << 10}.items():
            if not 0 <= getattr(self, name) <= most:
                raise UserError(f"{where}: {name} is {getattr(self, name)}: must be 0 to {most:,}")

    def to_transformers(self):
        """The same as an object with transformers' `save_pretrained`, which has no class of its own."""
        from transformers import PretrainedConfig

        class E1Config(PretrainedConfig):
            model_type = "E1"

        return E1Config.from_dict(self.content())


# name: (layers, hidden size, attention heads, intermediate size)
E1_SIZES = {
    "Profluent-Bio/E1-150m": (20, 768, 12, 2304),
    "Profluent-Bio/E1-300m": (20, 1024, 16, 3072),
    "Profluent-Bio/E1-600m": (30, 1280, 20, 3840),
}


def e1_config(layers: int, hidden_size: int, heads: int, intermediate_size: int) -> E1Config:
    """An E1 configuration of any size, for weights of one's own."""
    return E1Config(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
        gated_mlp=True,
        global_attention_every_n_layers=3,
        max_num_positions_global=65536,
        rope_theta_global=500000.0,
        clip_qkv=8.0,
        profluent_e1=False,
    )


def load_config(name: str) -> E1Config:
    """The configuration behind a built-in name, a local directory, or a name on the Hub (in this order)."""
    if name in E1_SIZES:
        return e1_config(*E1_SIZES[name])
    config = hf_directory.load_config(name, E1Config.read, name, E1_SIZES, "")
    config.check(name)
    return config
