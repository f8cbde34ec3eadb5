"""ESM C for masked language modelling: what differs from ESM-2's model (common.models.esm2.model).

Fidelity to `transformers.EsmcForMaskedLM` (fp32 logits, loss and every gradient within 1e-5) is tested for the shapes
of all three sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.esm2.layers_torch import LayerNorm
from common.models.esm2.model import Embeddings, Encoder, Esm2ForMaskedLM
from common.models.layers.linear import Linear
from common.models.layers.residual import Block, Model
from extras.families.esmc.config import EsmcConfig


class LMHead(nn.Module):
    """dense -> GELU -> LayerNorm -> decoder, which is not tied to the embedding."""

    def __init__(self, config: EsmcConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = Linear(config.hidden_size, config.vocab_size)

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        """[T, hidden] -> logits fp32 [T, 64]. embedding: of ESM-2's head."""
        return self.decoder(self.layer_norm(F.gelu(self.dense(x)))).float()


class EsmcForMaskedLM(Esm2ForMaskedLM):
    """ESM C of any size, with the interface of `Esm2ForMaskedLM`; logits are of all 64 rows, as transformers'."""

    zero_rows: dict[str, Any] = {}
    padded_vocab: dict[str, Any] = {}

    def __init__(self, config: EsmcConfig, backend: str = "torch", residual: torch.dtype = torch.float32):
        Model.__init__(self)
        layers: Any
        if backend == "te":
            from extras.families.esmc import layers_te as layers
        else:
            from extras.families.esmc import layers
        self.config, self.backend = config, backend
        self.embeddings = Embeddings(config, residual)
        final_norm = LayerNorm(config.hidden_size, config.layer_norm_eps, bias=False)
        self.encoder = Encoder(config, layers, final_norm)
        self.lm_head = LMHead(config)

    def hidden_matrices(self) -> dict[str, list[Block]]:
        size, ffn = self.config.hidden_size, self.config.intermediate_size
        of_layer = {
            "self_attention.layernorm_qkv.weight": [Block(size)] * 3,
            "self_attention.proj.weight": [Block(size)],
            "layernorm_mlp.fc1_weight": [Block(ffn)] * 2,  # gate and up
            "layernorm_mlp.fc2_weight": [Block(size)],
        }
        layers = range(self.config.num_hidden_layers)
        blocks = {f"encoder.layers.{n}.{name}": of for n in layers for name, of in of_layer.items()}
        return blocks | {"lm_head.dense.weight": [Block(size)]}
