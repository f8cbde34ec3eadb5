"""ESM-2's configuration: config.json's fields, the six published sizes (without a network), checks, overrides.

Source: config.json of the facebook/esm2_* checkpoints and table S1 of Lin et al., Science 379:1123 (2023).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, Self

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.files.safe_files import shorten
from common.hooks import extra
from common.models.esm2 import alphabet
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.layers import hf_directory
from common.models.layers.config_base import ConfigBase

MOST_POSITIONS = 1 << 20
HIDDEN_ACT = {"exact": "gelu", "tanh": "gelu_pytorch_tanh"}


@dataclass
class Esm2Config(ConfigBase):
    """The fields of an ESM-2 config.json, with the defaults of `transformers.EsmConfig`.

    A class of our own: importing transformers' takes longer than everything else before the first step. alphabet: what
    declares one that is not ESM-2's (`Alphabet.declared`). others: all other keys of a config.json (but those that
    load code), unused here and written again.
    """

    set_by: ClassVar[str] = "--config_overrides {name}={size}, or another --config_name"
    architecture: ClassVar[str] = "EsmForMaskedLM"
    described = "ESM-2 pretraining here needs"
    fixed = {
        "model_type": "esm",
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": (False, None),
        "tie_word_embeddings": True,
        "is_folding_model": (False, None),
        "is_decoder": (False, None),
        "rope_theta": 10000.0,
    }
    positive = ("layer_norm_eps", "initializer_range")
    # The rest of config.json may differ.
    fingerprint_fields = (
        *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
        *("max_position_embeddings", "layer_norm_eps", "token_dropout", "position_embedding_type", "hidden_act"),
    )

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
    alphabet: dict | None = None
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        return super().of(extra().recipe_config(content) if content.get("model_type") == "nv_esm" else content)

    def content(self) -> dict[str, Any]:
        values = super().content()
        for name in ("hidden_act", "alphabet"):  # fields of ours alone: absent stays absent
            if values[name] is None:
                del values[name]
        return values

    @property
    def tokens(self) -> Alphabet:
        if self.alphabet is None:
            return ESM2_TOKENS
        return extra().alphabet(self.alphabet, "alphabet in config.json")

    @property
    def num_tokens(self) -> int:
        assert self.vocab_size is not None, "`check` was not called"
        return self.vocab_size

    @property
    def vocabulary(self) -> str:  # pyrefly: ignore[bad-override]  # of each configuration
        return f"{self.tokens} {self.tokens.declared}".strip()

    def in_alphabet(self, tokens: Alphabet) -> Self:
        """With the vocabulary of an alphabet that `extra().alphabet` made."""
        ids = {"vocab_size": tokens.vocab_size, "pad_token_id": tokens.pad, "mask_token_id": tokens.mask}
        return replace(self, **ids, alphabet=json.loads(tokens.declared) if tokens.declared else None)

    def check(self, where: str) -> None:
        super().check(where)
        tokens = self.tokens
        ids = {"vocab_size": tokens.vocab_size, "pad_token_id": tokens.pad, "mask_token_id": tokens.mask}
        for name, needed in ids.items():
            if (stated := getattr(self, name)) != needed:
                known = "" if self.alphabet else " (another alphabet needs a vocab.txt beside config.json)"
                raise UserError(f"{where}: {name} is {shorten(stated)}, {self.described} {needed}{known}")
        if self.max_position_embeddings > MOST_POSITIONS:
            raise UserError(
                f"{where}: max_position_embeddings is {self.max_position_embeddings}: an export has an embedding for "
                f"each, of at most {MOST_POSITIONS:,}"
            )

    def to_transformers(self):
        """The same as a `transformers.EsmConfig`."""
        from transformers import EsmConfig

        return EsmConfig.from_dict(self.content())


def gelu_of(config: Esm2Config) -> str:
    """`exact` or `tanh`, by config.json. Any other `hidden_act` is ignored, as in transformers."""
    return "tanh" if getattr(config, "hidden_act", None) == HIDDEN_ACT["tanh"] else "exact"


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
    config = with_vocabulary(hf_directory.load_config(name, Esm2Config.read, name, ESM2_SIZES, ""), name)
    config.check(name)
    return config


VOCABULARY_BYTES = 1 << 22  # read of a vocab.txt at most: ESM-2's has 100


def read_vocabulary(path: Path) -> list[str] | None:
    """The tokens of a vocab.txt, one a line; None if there is none."""
    if not path.is_file():
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        return [line.strip() for line in file.read(VOCABULARY_BYTES).rstrip().split("\n")]


def check_vocabulary(tokens: list[str] | None, config: Esm2Config, path: Path) -> None:
    """UserError for a vocab.txt with other tokens than the configuration's, or another order. None is needed."""
    letters = config.tokens.letters
    if tokens is not None and tokens != list(letters):
        both = zip_longest(tokens, letters, fillvalue="nothing")
        number, (theirs, ours) = next((n, pair) for n, pair in enumerate(both) if pair[0] != pair[1])
        whose = "ESM-2's vocabulary" if config.alphabet is None else f"the vocabulary {config.tokens.name}"
        raise UserError(
            f"{path}: not {whose}: token {number} is {theirs[:20]!r}, not {ours!r}: only models of "
            f"{'ESM-2' if config.alphabet is None else config.tokens.name}'s {len(letters)} tokens in their published "
            "order can be read"
        )


def with_vocabulary(config: Esm2Config, name: str) -> Esm2Config:
    """The configuration with the alphabet of its vocab.txt, if its tokens are not as many as ESM-2's.

    UserError if the two disagree.
    """
    if config.alphabet is not None or config.vocab_size in (None, ESM2_TOKENS.vocab_size):
        return config
    path = hf_directory.local_directory(name) / "vocab.txt"
    if (tokens := read_vocabulary(path)) is None:
        return config  # `check` says what it lacks
    if len(tokens) != config.vocab_size:
        raise UserError(f"{path}: has {len(tokens)} tokens, and config.json says vocab_size {config.vocab_size}")
    found = config.in_alphabet(extra().alphabet(tokens, str(path)))
    for key in ("pad_token_id", "mask_token_id"):
        if getattr(config, key) not in (None, getattr(found, key)):
            stated, theirs = getattr(config, key), found.tokens.letters[getattr(found, key)]
            raise UserError(f"{path}: {theirs} is token {getattr(found, key)}, and config.json says {key} {stated}")
    return found
