"""AMPLIFY as a family (common.models.family): FLOPs, weights from and to its authors' names."""

from __future__ import annotations

from typing import Any

from common.models.esm2.family import EncoderFamily
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter
from extras.families.amplify.alphabet import ALPHABET
from extras.families.amplify.config import AMPLIFY_SIZES, AmplifyConfig, load_config
from extras.families.amplify.convert import ADAPTER
from extras.families.esmc.family import swiglu_flops


class Amplify(EncoderFamily):
    alphabet, tokens = str(ALPHABET), ALPHABET
    title, published = "AMPLIFY", tuple(AMPLIFY_SIZES)
    form = "in its authors' names, for --model_name_or_path; transformers has no class of it"
    adapter: StateDictAdapter = ADAPTER

    def load_config(self, name: str) -> AmplifyConfig:
        return load_config(name)

    def flops(
        self, config: AmplifyConfig, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0
    ) -> float:
        """The decoder runs on the masked positions only."""
        head = config.hidden_size * ALPHABET.vocab_size
        return swiglu_flops(config, config.ffn_size, head, tokens, squared_lengths, targets)

    def from_transformers(self, model: Any) -> tuple[AmplifyConfig, Pieces]:
        return model.config, self.adapter.from_hf(model.tensors, model.config)[0]


FAMILY = Amplify()
