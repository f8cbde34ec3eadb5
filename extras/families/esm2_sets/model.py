"""ESM-2 with attention over sets: what differs from ESM-2's model (common.models.esm2.model)."""

from __future__ import annotations

from typing import Any

import torch

from common.models.esm2.layers_torch import LayerNorm
from common.models.esm2.model import Embeddings, Esm2ForMaskedLM, LMHead
from common.models.layers.residual import Block, Model
from extras.families.esm2_sets import layers
from extras.families.esm2_sets.config import EsmSetsConfig
from extras.families.sets.encoder import Inputs, SetEncoder, SetModel


class FollowedEncoder(SetEncoder):
    """Its layers over sets attend within sequences first."""

    def inputs_over_sets(self, within: Inputs, over: Inputs) -> Any:
        return tuple(zip(within, over, strict=True))


class EsmSetsForMaskedLM(SetModel, Esm2ForMaskedLM):
    """ESM-2 of any size with attention over sets, with the interface of `Esm2ForMaskedLM`."""

    def __init__(self, config: EsmSetsConfig, backend: str = "torch", residual: torch.dtype = torch.float32):
        Model.__init__(self)
        self.config, self.backend = config, backend
        self.embeddings = Embeddings(config, residual)
        self.encoder = FollowedEncoder(config, layers, LayerNorm(config.hidden_size, eps=config.layer_norm_eps))
        self.lm_head = LMHead(config)
        self._name_rows()
        self.zero_rows |= {f"{name}.proj.weight": range(config.hidden_size) for name in self._over_sets()}

    def _over_sets(self) -> list[str]:
        layers = range(self.config.num_hidden_layers)
        return [f"encoder.layers.{n}.set_attention" for n in layers if self.config.is_global(n)]

    def hidden_matrices(self) -> dict[str, list[Block]]:
        size, heads, blocks = self.config.hidden_size, self.config.num_attention_heads, super().hidden_matrices()
        for name in self._over_sets():
            blocks[f"{name}.layernorm_qkv.weight"] = [Block(3 * size, groups=heads, parts=3)]
            blocks[f"{name}.proj.weight"] = [Block(size)]
        return blocks
