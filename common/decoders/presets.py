"""The nine decoders of the FSDP guides with their published configurations, and what the guides train them with.

Sources: config.json of the models named beside each on the Hub; Touvron et al. 2023 (Llama 2, arXiv:2307.09288),
Grattafiori et al. 2024 (Llama 3, arXiv:2407.21783), Jiang et al. 2024 (Mixtral, arXiv:2401.04088).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from common.cli import UserError, one_line
from common.decoders.config import DecoderConfig, check_supported


def _llama3(factor: float) -> dict:
    """The rotary scaling of Llama 3.1 (factor 8) and 3.2 (factor 32)."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA2 = DecoderConfig(max_position_embeddings=4096)
_LLAMA3 = DecoderConfig(
    vocab_size=128256,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling=_llama3(8.0),
)
_LLAMA3_2 = replace(_LLAMA3, intermediate_size=8192, rope_scaling=_llama3(32.0), tie_word_embeddings=True)
_MISTRAL = DecoderConfig(
    model_type="mistral",
    vocab_size=32768,
    intermediate_size=14336,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    rope_theta=1e6,
)


class Preset(NamedTuple):
    """hub: the model on the Hub; context: tokens that the guides train it on; config: as published."""

    hub: str
    context: int
    config: DecoderConfig


def _sized(of: DecoderConfig, hidden: int, ffn: int, layers: int, heads: int, kv: int) -> DecoderConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return replace(of, **sizes, num_attention_heads=heads, num_key_value_heads=kv)


_MIXTRAL = replace(_MISTRAL, model_type="mixtral", vocab_size=32000, num_local_experts=8, num_experts_per_tok=2)
PRESETS = {
    "llama2_7b": Preset("meta-llama/Llama-2-7b-hf", 4096, _LLAMA2),
    "llama2_13b": Preset("meta-llama/Llama-2-13b-hf", 4096, _sized(_LLAMA2, 5120, 13824, 40, 40, 40)),
    "llama2_70b": Preset("meta-llama/Llama-2-70b-hf", 4096, _sized(_LLAMA2, 8192, 28672, 80, 64, 8)),
    "llama3_1_8b": Preset("meta-llama/Llama-3.1-8B", 8192, _LLAMA3),
    "llama3_1_70b": Preset("meta-llama/Llama-3.1-70B", 8192, _sized(_LLAMA3, 8192, 28672, 80, 64, 8)),
    "llama3_2_1b": Preset("meta-llama/Llama-3.2-1B", 8192, _sized(_LLAMA3_2, 2048, 8192, 16, 32, 8)),
    "llama3_2_3b": Preset("meta-llama/Llama-3.2-3B", 8192, _sized(_LLAMA3_2, 3072, 8192, 28, 24, 8)),
    "mathstral_7b": Preset("mistralai/Mathstral-7B-v0.1", 32768, _MISTRAL),
    "mistral_8x7b": Preset("mistralai/Mixtral-8x7B-v0.1", 32768, replace(_MIXTRAL, router_aux_loss_coef=0.02)),
}
# The guides' --model_type: which presets are of it, the one that sizes other than theirs start from first.
MODEL_TYPES = {
    "llama_v2": ("llama2_7b", "llama2_13b", "llama2_70b"),
    "llama_v3": ("llama3_1_8b", "llama3_1_70b", "llama3_2_1b", "llama3_2_3b"),
    "mistral": ("mathstral_7b",),
    "mixtral": ("mistral_8x7b",),
}


@dataclass(frozen=True)
class GuideRun:
    """A run of the guides: steps, and steps between checkpoints and validations; None where they have none."""

    max_steps: int
    checkpoint_freq: int | None
    validation_freq: int | None
    checkpoint_dir: str | None = "checkpoints"
    train_batch_size: int = 1


GUIDE_RUNS = {
    "llama2_7b": GuideRun(100, 50, 100),
    "llama2_13b": GuideRun(50, 50, 25),
    "llama2_70b": GuideRun(30, 1000, 10),
    "llama3_1_8b": GuideRun(100, 50, 25),
    "llama3_1_70b": GuideRun(30, 1000, 10),
    "llama3_2_1b": GuideRun(100, 50, 100),
    "llama3_2_3b": GuideRun(100, 50, 100),
    "mathstral_7b": GuideRun(5000, 50, 500, "checkpoints/mathstral-7B"),
    "mistral_8x7b": GuideRun(5000, None, None, None, train_batch_size=4),
}


def load_decoder_config(name: str) -> DecoderConfig:
    """The configuration of a preset, of a local directory, or of a name on the Hub (in this order)."""
    if name in PRESETS:
        return replace(PRESETS[name].config)
    directory, known = Path(name), ", ".join(PRESETS)
    path = directory / "config.json"
    if not directory.is_dir() and not (name.count("/") == 1 and not name.startswith((".", "/"))):
        raise UserError(f"--model {name}: neither one of {known} nor a directory; ESM-2 is named by --config_name")
    try:
        if not directory.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(name, "config.json"))
        config = DecoderConfig.read(path)
    except Exception as error:  # of the Hub's many, and of a broken config.json
        reason = one_line(error)[:160]
        raise UserError(
            f"--model {name}: no decoder's configuration found, neither there nor on the Hub ({reason}); a gated "
            f"model needs HF_TOKEN; built-in names: {known}"
        ) from error
    check_supported(config, name)
    return config


def preset_like(model_type: str, sizes: dict[str, int]) -> str:
    """Of the guides' model_type, the preset with these sizes (those of hidden_size, num_hidden_layers and
    num_attention_heads that are given); where none has them, the type's first."""
    told = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in MODEL_TYPES[model_type]:
        if all(sizes.get(size) in (None, getattr(PRESETS[name].config, size)) for size in told):
            return name
    return MODEL_TYPES[model_type][0]
