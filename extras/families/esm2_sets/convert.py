"""Weights of an ESM-2 with attention over sets, between this project's names and those of an export.

ESM-2's part has transformers' names (common.models.esm2.convert). The rest is named as transformers names attention,
and begins with `esm.encoder.set_layer`: without it, an export is an ESM-2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from common.models.esm2.convert import ADAPTER as ESM2
from common.models.esm2.convert import Esm2Adapter
from common.models.layers.state_dict_adapter import Pieces
from extras.families.esm2_sets.config import EsmSetsConfig
from extras.families.esm2_sets.model import EsmSetsForMaskedLM

if TYPE_CHECKING:
    from common.models.layers.model_card import Training

ADDED = "esm.encoder.set_layer"
# Of one attention over sets: ours -> theirs.
_LAYER = {
    "layernorm_qkv.layer_norm_weight": ("LayerNorm.weight",),
    "layernorm_qkv.layer_norm_bias": ("LayerNorm.bias",),
    **{
        f"layernorm_qkv.{kind}": tuple(f"self.{x}.{kind}" for x in ("query", "key", "value"))
        for kind in ("weight", "bias")
    },
    "proj.weight": ("output.dense.weight",),
    "proj.bias": ("output.dense.bias",),
}
NOTE = (
    f"Attention over sets of homologs follows some layers; its tensors begin with `{ADDED}`. Without them, and with "
    "`model_type` esm and `architectures` EsmForMaskedLM in config.json, this is an ESM-2 that transformers opens."
)


class EsmSetsAdapter(Esm2Adapter):
    model = EsmSetsForMaskedLM
    opened_by = "this project's `--model_name_or_path`"

    def parts(self, config: EsmSetsConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
        yield from super().parts(config)
        for n in filter(config.is_global, range(config.num_hidden_layers)):
            for ours, theirs in _LAYER.items():
                yield f"encoder.layers.{n}.set_attention.{ours}", tuple(f"{ADDED}.{n}.attention.{x}" for x in theirs)

    def read(self, name: str, config: EsmSetsConfig) -> tuple[Pieces, dict[str, Tensor]]:
        """Of an ESM-2, what it has: attention over sets keeps its initial weights."""
        return ESM2.read(name, config.esm2()) if config.is_of_esm2 else super().read(name, config)

    def finish(self, directory: Path, training: Training, tokenizer: Any) -> Mapping[str, str]:
        return {**super().finish(directory, training, tokenizer), "Sets": NOTE}


ADAPTER = EsmSetsAdapter()
