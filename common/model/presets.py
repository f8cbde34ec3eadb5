"""The six published ESM-2 sizes, so that their names resolve without a network.

Source: config.json of the facebook/esm2_* checkpoints and table S1 of Lin et al., Science 379:1123 (2023).
"""

from __future__ import annotations

import math
from pathlib import Path

from transformers import EsmConfig

from common.cli import UserError, one_line
from common.files import alphabet

# name: (layers, hidden size, attention heads); the feed-forward size is four times the hidden size
ESM2_SIZES = {
    "facebook/esm2_t6_8M_UR50D": (6, 320, 20),
    "facebook/esm2_t12_35M_UR50D": (12, 480, 20),
    "facebook/esm2_t30_150M_UR50D": (30, 640, 20),
    "facebook/esm2_t33_650M_UR50D": (33, 1280, 20),
    "facebook/esm2_t36_3B_UR50D": (36, 2560, 40),
    "facebook/esm2_t48_15B_UR50D": (48, 5120, 40),
}


def esm2_config(layers: int, hidden_size: int, heads: int, **overrides) -> EsmConfig:
    """An ESM-2 configuration of any size, with everything but the size as published."""
    settings = {
        "architectures": ["EsmForMaskedLM"],
        "vocab_size": alphabet.VOCAB_SIZE,
        "vocab_list": None,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 1026,
        "position_embedding_type": "rotary",
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",  # exact: see common.model.backend
        "initializer_range": 0.02,
        "token_dropout": True,
        "emb_layer_norm_before": False,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": alphabet.PAD,
        "mask_token_id": alphabet.MASK,
        "tie_word_embeddings": True,
        "is_folding_model": False,
    }
    return EsmConfig(**(settings | overrides))


def load_config(name: str) -> EsmConfig:
    """The configuration behind a built-in name, a local directory, or a name on the Hub (in this order)."""
    if name in ESM2_SIZES:
        return esm2_config(*ESM2_SIZES[name])
    if not Path(name).is_dir() and not (name.count("/") == 1 and not name.startswith((".", "/"))):
        raise UserError(f"{name}: no such model: neither a directory nor one of {', '.join(ESM2_SIZES)}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UserError(f"{name}: this directory has no config.json: give one written by save_pretrained")
    try:
        config = EsmConfig.from_pretrained(name)
    except Exception as error:  # whatever a broken config.json makes of transformers
        reason = one_line(error)[:160]
        raise UserError(
            f"{name}: no configuration found, neither there nor on the Hub ({reason}); "
            f"built-in names: {', '.join(ESM2_SIZES)}"
        ) from error
    check_supported(config, name)
    return config


def check_supported(config: EsmConfig, where: str) -> None:
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
        "rope_theta": (10000.0, None),
    }
    for field, allowed in expected.items():
        value, allowed = getattr(config, field, None), allowed if isinstance(allowed, tuple) else (allowed,)
        if value not in allowed:
            raise UserError(f"{where}: {field} is {value!r}, ESM-2 pretraining here needs {allowed[0]!r}")
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"):
        if getattr(config, field) < 1:
            raise UserError(f"{where}: {field} is {getattr(config, field)}: must be at least 1")
    for field in ("max_position_embeddings", "layer_norm_eps", "initializer_range"):
        if not 0 < getattr(config, field) < math.inf:
            raise UserError(f"{where}: {field} is {getattr(config, field)}: must be above 0")
    if config.hidden_size % (2 * config.num_attention_heads):
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not a multiple of 2 x num_attention_heads "
            f"({config.num_attention_heads}): rotary embeddings need an even head dimension"
        )


def override(config: EsmConfig, changes: str) -> EsmConfig:
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
