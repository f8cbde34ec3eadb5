"""ESM-2 with attention over sets as a family (common.models.family): it continues an ESM-2, or itself."""

from __future__ import annotations

from typing import Any

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.distributed.world import World
from common.models.esm2.alphabet import ESM2_TOKENS, TOKENS
from common.models.esm2.family import FAMILY as ESM2
from common.models.layers.state_dict_adapter import Pieces, StateDictAdapter
from extras.families.esm2_sets.config import EsmSetsConfig, load_config
from extras.families.esm2_sets.convert import ADAPTER
from extras.families.sets.family import SetFamily


class EsmSets(SetFamily):
    alphabet, tokens = " ".join(TOKENS), ESM2_TOKENS
    title, continues = "ESM-2 with sets", "esm"
    form = "for --model_name_or_path; transformers has no class of it, but one of its ESM-2"
    adapter: StateDictAdapter = ADAPTER

    def load_config(self, name: str) -> EsmSetsConfig:
        return load_config(name)

    def tokens_of(self, config: EsmSetsConfig) -> Alphabet:
        return config.tokens

    def check_run(self, args: Any, config: EsmSetsConfig, backend: str, world: World) -> None:
        super().check_run(args, config, backend, world)
        if args.precision.below_bf16:
            name = "fp8" if args.precision.fp8 else "fp4"
            raise UserError(f"--{name}: {self.title} has no such layers: drop the flag, or train ESM-2 or E1 with it")

    def flops(
        self, config: EsmSetsConfig, tokens: int, squared_lengths: int, targets: int, set_pairs: int = 0
    ) -> float:
        hidden, added = config.hidden_size, sum(map(config.is_global, range(config.num_hidden_layers)))
        matmuls, pairs = 2 * 4 * hidden * hidden * tokens, 4 * hidden * (set_pairs or squared_lengths)
        return ESM2.flops(config, tokens, squared_lengths, targets) + 3.0 * added * (matmuls + pairs)

    def from_transformers(self, model: Any) -> tuple[EsmSetsConfig, Pieces]:
        return model.config, self.adapter.from_hf(model.tensors, model.config)[0]


FAMILY = EsmSets()
