"""AMPLIFY's configuration: config.json's fields, the two published sizes (without a network), checks.

Source: `AMPLIFYConfig` and conf/ of the authors' package, chandar-lab/AMPLIFY (MIT), and config.json of
chandar-lab/AMPLIFY_120M and AMPLIFY_350M. transformers has no class of it: the names are the authors'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.cli import UserError
from common.files.safe_files import shorten
from common.models.layers import hf_directory
from common.models.layers.config_base import ConfigBase
from common.models.layers.hf_directory import DROPOUT
from extras.families.amplify.alphabet import ALPHABET

MODEL_TYPE = "amplify"  # of --model_type and checkpoints; config.json has it in capitals
# What a config.json may say otherwise, and this implementation does not compute.
FIXED = {
    "vocab_size": len(ALPHABET.letters),
    "hidden_act": "SwiGLU",
    "rms_norm": True,
    "layer_norm_after_embedding": False,
    "layer_norm_before_last_layer": True,
    "ffn_bias": False,
    "att_bias": False,
    "dropout_prob": 0,
    "pad_token_id": ALPHABET.pad,
    "unk_token_id": ALPHABET.unknown,
    "mask_token_id": ALPHABET.mask,
    "bos_token_id": ALPHABET.begin,
    "eos_token_id": ALPHABET.end,
    "other_special_token_ids": None,
}


@dataclass
class AmplifyConfig(ConfigBase):
    """The fields of an AMPLIFY config.json, with the defaults of its authors (the 350M). others: all other keys."""

    set_by: ClassVar[str] = (
        "ffn_size is int(2 x intermediate_size / 3), rounded up to a multiple of 8: set hidden_size and "
        "intermediate_size by --config_overrides, or name another --config_name"
    )
    architecture: ClassVar[str] = "AMPLIFY"
    matmul_sizes: ClassVar[tuple[str, ...]] = ("hidden_size", "ffn_size")
    token_dropout: ClassVar[bool] = False
    described = "AMPLIFY here has"
    fixed = {name: value for name, value in FIXED.items() if name not in DROPOUT}
    positive = ("norm_eps", "embedding_init_range", "decoder_init_range")
    fingerprint_fields = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "norm_eps")
    vocabulary = str(ALPHABET)

    model_type: str = "AMPLIFY"
    hidden_size: int = 960
    num_hidden_layers: int = 32
    num_attention_heads: int = 15
    intermediate_size: int = 3840
    norm_eps: float = 1e-5
    embedding_init_range: float = 0.02
    decoder_init_range: float = 0.02
    max_length: int = 2048
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward block: SwiGLU has three matrices, which are to cost what two would."""
        return -(-int(2 * self.intermediate_size / 3) // 8) * 8

    @property
    def initializer_range(self) -> float:
        return self.decoder_init_range

    @property
    def max_position_embeddings(self) -> int:
        return self.max_length

    def content(self) -> dict[str, Any]:
        return FIXED | super().content()

    def fingerprint(self) -> dict[str, Any]:
        return {"model_type": MODEL_TYPE} | super().fingerprint()

    def check(self, where: str) -> None:
        if str(self.model_type).lower() != MODEL_TYPE:
            raise UserError(f"{where}: model_type is {shorten(self.model_type)}, not AMPLIFY")
        super().check(where)
        if self.embedding_init_range != self.decoder_init_range:
            raise UserError(f"{where}: embedding_init_range and decoder_init_range differ: give one value to both")

    def to_transformers(self):
        """The same as an object with transformers' `save_pretrained`, which has no class of its own."""
        from transformers import PretrainedConfig

        length = {"max_length": self.max_length}

        class AMPLIFYConfig(PretrainedConfig):
            model_type = "AMPLIFY"

            def to_diff_dict(self) -> dict[str, Any]:  # transformers' own leaves it out: it is one of generation
                return super().to_diff_dict() | length

        return AMPLIFYConfig.from_dict(self.content())


# name: (layers, hidden size, attention heads, intermediate size)
AMPLIFY_SIZES = {
    "chandar-lab/AMPLIFY_120M": (24, 640, 10, 2560),
    "chandar-lab/AMPLIFY_350M": (32, 960, 15, 3840),
}


def amplify_config(layers: int, hidden_size: int, heads: int, intermediate_size: int) -> AmplifyConfig:
    """An AMPLIFY configuration of any size."""
    return AmplifyConfig(
        num_hidden_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        intermediate_size=intermediate_size,
    )


def load_config(name: str) -> AmplifyConfig:
    """The configuration behind a built-in name, a local directory, or a name on the Hub (in this order)."""
    if name in AMPLIFY_SIZES:
        return amplify_config(*AMPLIFY_SIZES[name])
    config = hf_directory.load_config(name, AmplifyConfig.read, name, AMPLIFY_SIZES, "")
    config.check(name)
    return config
