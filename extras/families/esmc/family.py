"""ESM C as a family (common.models.family): FLOPs, weights from and to transformers."""

from __future__ import annotations

from typing import Any

from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.family import EncoderFamily
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter
from extras.families.esmc.config import ALPHABET, ESMC_SIZES, EsmcConfig, load_config
from extras.families.esmc.convert import ADAPTER


def swiglu_flops(config: Any, ffn: int, head: int, tokens: int, squared_lengths: int, targets: int) -> float:
    """Floating-point operations of a training step of an encoder with SwiGLU. ffn: its width; head: weights of the LM
    head."""
    hidden = config.hidden_size
    per_token = 2 * config.num_hidden_layers * (4 * hidden * hidden + 3 * hidden * ffn)
    attention = 4 * config.num_hidden_layers * hidden * squared_lengths
    return 3.0 * (per_token * tokens + attention + 2 * targets * head)


class Esmc(EncoderFamily):
    alphabet = ALPHABET
    tokens = ESM2_TOKENS  # the ids that reading and masking need are ESM-2's
    title, published = "ESM C", tuple(ESMC_SIZES)
    stock, lora_targets = "Esmc", "q_proj,k_proj,v_proj"
    adapter: StateDictAdapter = ADAPTER

    def load_config(self, name: str) -> EsmcConfig:
        return load_config(name)

    def flops(self, config: EsmcConfig, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0) -> float:
        """The LM head runs on the masked positions only."""
        hidden, ffn = config.hidden_size, config.intermediate_size
        head = hidden * hidden + hidden * config.vocab_size
        return swiglu_flops(config, ffn, head, tokens, squared_lengths, targets)

    def from_transformers(self, model: Any) -> tuple[Any, Pieces]:
        config = EsmcConfig.of(model.config.to_dict())
        return config, self.adapter.from_hf(model.state_dict(), config)[0]


FAMILY = Esmc()
