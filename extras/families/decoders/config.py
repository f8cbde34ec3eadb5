"""The nine decoders of the FSDP guides with their published configurations, and what the guides train them with.

Sources: config.json of the models named beside each on the Hub; Touvron et al. 2023 (Llama 2, arXiv:2307.09288),
Grattafiori et al. 2024 (Llama 3, arXiv:2407.21783), Jiang et al. 2024 (Mixtral, arXiv:2401.04088).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from common.cli import UserError, one_line
from common.files.safe_files import shorten
from common.models.layers import hf_directory
from common.models.layers.config_base import ConfigBase
from common.models.layers.hf_directory import read_config

# What a decoder is made of (Llama, Mistral, Mixtral), under transformers' names: the fields of its config.json.
#
# Defaults of what a config.json leaves out are transformers' own: a directory is read by its classes.

# model_type: transformers' class of the model
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
TRAINED_CONTEXT = "trained_context"  # in an exported config.json: tokens of the longest context of its training
DIRECTIONS = "directions"  # there, of a protein decoder: `both` if it has learned to read backwards too
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class DecoderConfig(ConfigBase):
    """rope_scaling: None, or Llama 3's {rope_type: llama3, factor, low_freq_factor, ...}.

    num_local_experts: of Mixtral; 0 for a feed-forward block that is the same for all tokens. others: what else a
    config.json holds, but for what names code; it plays no part here, and is written again.
    """

    set_by: ClassVar[str] = "--{name} {size}, or another --model"
    described = "decoders here have"
    fixed = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }
    positive = ("rms_norm_eps", "rope_theta", "initializer_range")

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    router_aux_loss_coef: float = 0.0
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def context(self) -> int:
        """Tokens of the longest context it was trained on, where its run recorded that; else those it has room for."""
        trained = self.others.get(TRAINED_CONTEXT)
        most = self.max_position_embeddings
        return trained if type(trained) is int and 0 < trained < most else most

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.model_type]

    @classmethod
    def read(cls, path: Path) -> DecoderConfig:
        """From a config.json. ValueError where it is none of a decoder's, OSError where it cannot be read."""
        content = read_config(path)
        if content.get("model_type") not in ARCHITECTURES:
            raise ValueError(f"model_type is {content.get('model_type')!r}, expected {', '.join(ARCHITECTURES)}")
        try:
            stock = _stock_class(content["model_type"]).from_dict(content)
        except Exception as error:  # of a value's type; many types, some of them no ValueError
            raise ValueError(one_line(error)) from error
        values = {f.name: getattr(stock, f.name) for f in fields(cls) if hasattr(stock, f.name)}
        rope = dict(stock.rope_parameters)
        values["rope_theta"] = float(rope.pop("rope_theta"))
        values["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        if (dim := getattr(stock, "head_dim", None)) not in (None, stock.hidden_size // stock.num_attention_heads):
            raise ValueError(f"head_dim is {dim}, decoders here have hidden_size / num_attention_heads")
        known = {f.name for f in fields(cls)} | {"rope_parameters", "head_dim"}
        return cls(**values, others={name: value for name, value in content.items() if name not in known})

    def content(self) -> dict[str, Any]:
        """The fields of config.json as models on the Hub have them."""
        values = super().content()
        if not self.num_local_experts:
            for name in ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"):
                del values[name]
        if self.model_type != "llama":
            values["sliding_window"] = None  # transformers' default for Mistral is 4096
        return {"architectures": [self.architecture], "hidden_act": "silu"} | values

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of the same model."""
        free = {"initializer_range", "router_aux_loss_coef", "max_position_embeddings", "others"}
        return {name: value for name, value in asdict(self).items() if name not in free}

    def check(self, where: str) -> None:
        super().check(where)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"{where}: num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}: every key and value serves as many queries"
            )
        if (scaling := self.rope_scaling) is not None:
            numbers = [scaling.get(name) for name in LLAMA3_SCALING]
            if scaling.get("rope_type") != "llama3" or not all(type(n) in (int, float) and n > 0 for n in numbers):
                names = ", ".join(LLAMA3_SCALING)
                raise UserError(f"{where}: rope_scaling {shorten(scaling)}: only llama3's is here, with {names}")
        if self.num_local_experts and not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise UserError(
                f"{where}: num_experts_per_tok {self.num_experts_per_tok}: choose 1-{self.num_local_experts}"
            )

    def to_transformers(self):
        """The same as transformers' own configuration."""
        return _stock_class(self.model_type).from_dict(self.content())


def _stock_class(model_type: str):
    import transformers

    return getattr(transformers, ARCHITECTURES[model_type].replace("ForCausalLM", "Config"))


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
    seed: int | None = None


GUIDE_RUNS = {
    "llama2_7b": GuideRun(100, 50, 100),
    "llama2_13b": GuideRun(50, 50, 25),
    "llama2_70b": GuideRun(30, 1000, 10),
    "llama3_1_8b": GuideRun(100, 50, 25),
    "llama3_1_70b": GuideRun(30, 1000, 10),
    "llama3_2_1b": GuideRun(100, 50, 100),
    "llama3_2_3b": GuideRun(100, 50, 100),
    "mathstral_7b": GuideRun(5000, 50, 500, "checkpoints/mathstral-7B", seed=42),
    "mistral_8x7b": GuideRun(5000, None, None, None, train_batch_size=4, seed=42),
}


def load_decoder_config(name: str) -> DecoderConfig:
    """The configuration of a preset, of a local directory, or of a name on the Hub (in this order)."""
    if name in PRESETS:
        return replace(PRESETS[name].config)
    hint = "; ESM-2 is named by --config_name"
    config = hf_directory.load_config(name, DecoderConfig.read, f"--model {name}", PRESETS, hint)
    config.check(name)
    return config


def preset_like(model_type: str, sizes: dict[str, int]) -> str:
    """The preset of the guides' model_type with these sizes (those of hidden_size, num_hidden_layers and
    num_attention_heads that are given); where none has them, the type's first."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in MODEL_TYPES[model_type]:
        if all(sizes.get(size) in (None, getattr(PRESETS[name].config, size)) for size in names):
            return name
    return MODEL_TYPES[model_type][0]
