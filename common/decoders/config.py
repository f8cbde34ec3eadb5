"""What a decoder is made of (Llama, Mistral, Mixtral), under transformers' names: the fields of its config.json.

Defaults of what a config.json leaves out are transformers' own: a directory is read by its classes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from common.cli import UserError
from common.files.untrusted import shorten
from common.layers.model_config import check_positive, check_sizes, read_config

# model_type: transformers' class of the model
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM"}
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass
class DecoderConfig:
    """rope_scaling: None, or Llama 3's {rope_type: llama3, factor, low_freq_factor, ...}.

    num_local_experts: of Mixtral; 0 for a feed-forward block that is the same for all tokens. others: what else a
    config.json holds, but for what names code; it plays no part here, and is written again.
    """

    set_by: ClassVar[str] = "--{name} {size}, or another --model"

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
    def architecture(self) -> str:
        return ARCHITECTURES[self.model_type]

    @classmethod
    def read(cls, path: Path) -> DecoderConfig:
        """From a config.json. ValueError where it is none of a decoder's, OSError where it cannot be read."""
        content = read_config(path)
        if content.get("model_type") not in ARCHITECTURES:
            raise ValueError(f"model_type is {content.get('model_type')!r}, expected {', '.join(ARCHITECTURES)}")
        stock = _stock_class(content["model_type"]).from_dict(content)
        values = {f.name: getattr(stock, f.name) for f in fields(cls) if hasattr(stock, f.name)}
        rope = dict(stock.rope_parameters)
        values["rope_theta"] = float(rope.pop("rope_theta"))
        values["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        if (dim := getattr(stock, "head_dim", None)) not in (None, stock.hidden_size // stock.num_attention_heads):
            raise ValueError(f"head_dim is {dim}, decoders here have hidden_size / num_attention_heads")
        known = {f.name for f in fields(cls)} | {"rope_parameters", "head_dim"}
        return cls(**values, others={name: value for name, value in content.items() if name not in known})

    def content(self) -> dict[str, Any]:
        """What `read` makes this of: names and values of a config.json, as the Hub's own have them."""
        values = asdict(self)
        others = values.pop("others")
        if not self.num_local_experts:
            for name in ("num_local_experts", "num_experts_per_tok", "router_aux_loss_coef"):
                del values[name]
        if self.model_type != "llama":
            values["sliding_window"] = None  # transformers' default for Mistral is 4096
        return {"architectures": [self.architecture], "hidden_act": "silu"} | others | values

    def fingerprint(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of the same model."""
        free = {"initializer_range", "router_aux_loss_coef", "max_position_embeddings", "others"}
        return {name: value for name, value in asdict(self).items() if name not in free}

    def to_transformers(self):
        """The same as transformers' own configuration."""
        return _stock_class(self.model_type).from_dict(self.content())


def _stock_class(model_type: str):
    import transformers

    return getattr(transformers, ARCHITECTURES[model_type].replace("ForCausalLM", "Config"))


def check_supported(config: DecoderConfig, where: str) -> None:
    """Refuse what this implementation would silently compute differently, and sizes that make no model."""
    expected = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
    expected |= {"sliding_window": None, "router_jitter_noise": 0.0}
    for name, allowed in expected.items():
        value = config.others.get(name, allowed)
        if value != allowed:
            raise UserError(f"{where}: {name} is {shorten(value)}, decoders here have {allowed!r}")
    check_sizes(config, where)
    check_positive(config, where, "rms_norm_eps", "rope_theta", "initializer_range")
    if config.hidden_size % (2 * config.num_attention_heads):
        raise UserError(
            f"{where}: hidden_size {config.hidden_size} is not a multiple of 2 x num_attention_heads "
            f"({config.num_attention_heads}): rotary embeddings need an even head dimension"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{where}: num_attention_heads {config.num_attention_heads} is not a multiple of num_key_value_heads "
            f"{config.num_key_value_heads}: every key and value serves as many queries"
        )
    if (scaling := config.rope_scaling) is not None:
        numbers = [scaling.get(name) for name in LLAMA3_SCALING]
        if scaling.get("rope_type") != "llama3" or not all(type(n) in (int, float) and n > 0 for n in numbers):
            raise UserError(
                f"{where}: rope_scaling {shorten(scaling)}: only llama3's is here, with {', '.join(LLAMA3_SCALING)}"
            )
    if config.num_local_experts and not 1 <= config.num_experts_per_tok <= config.num_local_experts:
        raise UserError(
            f"{where}: num_experts_per_tok {config.num_experts_per_tok}: choose 1-{config.num_local_experts}"
        )
