"""E1 as a family (common.models.family): FLOPs, weights from and to its authors' names."""

from __future__ import annotations

from typing import Any

from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter
from extras.families.e1.alphabet import ALPHABET
from extras.families.e1.config import E1_SIZES, E1Config, load_config
from extras.families.e1.convert import ADAPTER
from extras.families.esmc.family import swiglu_flops
from extras.families.sets.family import SetFamily


class E1(SetFamily):
    alphabet, tokens = str(ALPHABET), ALPHABET
    title, published = "E1", tuple(E1_SIZES)
    form = "in its authors' names, for --model_name_or_path; transformers has no class of it"
    adapter: StateDictAdapter = ADAPTER

    def load_config(self, name: str) -> E1Config:
        return load_config(name)

    def configuration(self, args: Any) -> tuple[Any, None]:
        config, remark = super().configuration(args)
        if args.model.config_name:
            config.profluent_e1 = False  # random weights
        return config, remark

    def flops(self, config: E1Config, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0) -> float:
        """The LM head runs on the masked positions only."""
        hidden = config.hidden_size
        head = hidden * hidden + hidden * ALPHABET.vocab_size
        matmuls = swiglu_flops(config, config.intermediate_size, head, tokens, 0, targets)
        across = sum(config.is_global(n) for n in range(config.num_hidden_layers))
        pairs = (config.num_hidden_layers - across) * squared_lengths + across * (set_pairs or squared_lengths)
        return matmuls + 3.0 * 4 * hidden * pairs

    def from_transformers(self, model: Any) -> tuple[E1Config, Pieces]:
        return model.config, self.adapter.from_hf(model.tensors, model.config)[0]


FAMILY = E1()
