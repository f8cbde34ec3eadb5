"""The six published ESM-2 sizes, so that their names resolve without a network; and every other name's configuration.

Source: config.json of the facebook/esm2_* checkpoints and table S1 of Lin et al., Science 379:1123 (2023).
"""

from __future__ import annotations

from pathlib import Path

from common.cli import UserError, one_line
from common.esm2.config import Esm2Config, check_supported
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


def esm2_config(layers: int, hidden_size: int, heads: int, **overrides) -> Esm2Config:
    """An ESM-2 configuration of any size, with everything but the size as published."""
    settings = {
        "vocab_size": alphabet.VOCAB_SIZE,
        "num_hidden_layers": layers,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden_size,
        "max_position_embeddings": 1026,
        "position_embedding_type": "rotary",
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",  # exact: see common.esm2.gelu
        "initializer_range": 0.02,
        "token_dropout": True,
        "emb_layer_norm_before": False,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": alphabet.PAD,
        "mask_token_id": alphabet.MASK,
        "others": {"architectures": ["EsmForMaskedLM"], "vocab_list": None},
    }
    return Esm2Config(**(settings | overrides))


def load_config(name: str) -> Esm2Config:
    """The configuration behind a built-in name, a local directory, or a name on the Hub (in this order)."""
    if name in ESM2_SIZES:
        return esm2_config(*ESM2_SIZES[name])
    path = Path(name) / "config.json"
    if not Path(name).is_dir() and not (name.count("/") == 1 and not name.startswith((".", "/"))):
        raise UserError(f"{name}: no such model: neither a directory nor one of {', '.join(ESM2_SIZES)}")
    if Path(name).is_dir() and not path.is_file():
        raise UserError(f"{name}: this directory has no config.json: give one written by save_pretrained")
    try:
        if not Path(name).is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        config = Esm2Config.read(path)
    except Exception as error:  # of the Hub's many, and of a broken config.json
        reason = one_line(error)[:160]
        raise UserError(
            f"{name}: no configuration found, neither there nor on the Hub ({reason}); "
            f"built-in names: {', '.join(ESM2_SIZES)}"
        ) from error
    check_supported(config, name)
    return config
