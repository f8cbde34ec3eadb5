"""AMPLIFY for masked language modelling: what differs from ESM-2's model (common.models.esm2.model).

Fidelity to the authors' description (fp32 logits, loss and every gradient within 1e-5 of float64) is tested for the
shapes of both sizes. Inside, the vocabulary has 64 rows, as ESM-2's: 27 of them are tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.models.esm2.model import PADDED_VOCAB, Embeddings, Encoder, Esm2ForMaskedLM
from common.models.layers.linear import Linear
from common.models.layers.residual import Block, Model
from extras.families.amplify.alphabet import ALPHABET
from extras.families.amplify.config import AmplifyConfig
from extras.families.decoders.layers import RMSNorm

EMBEDDING, DECODER = "embeddings.word_embeddings.weight", "lm_head.decoder"
FILLERS = range(ALPHABET.vocab_size, PADDED_VOCAB)


class LMHead(nn.Module):
    """A decoder alone, not tied to the embedding."""

    def __init__(self, config: AmplifyConfig):
        super().__init__()
        self.decoder = Linear(config.hidden_size, PADDED_VOCAB)

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        """[T, hidden] -> logits fp32 [T, 27]. embedding: of ESM-2's head."""
        return self.decoder(x)[..., : ALPHABET.vocab_size].float()


class AmplifyForMaskedLM(Esm2ForMaskedLM):
    """AMPLIFY of any size, with the interface of `Esm2ForMaskedLM`; logits are of its 27 tokens."""

    uniform = True  # for layers.initialise
    zero_rows: dict[str, Any] = {EMBEDDING: FILLERS, f"{DECODER}.weight": FILLERS}
    padded_vocab: dict[str, Any] = dict.fromkeys(
        (EMBEDDING, f"{DECODER}.weight", f"{DECODER}.bias"), ALPHABET.vocab_size
    )

    def __init__(self, config: AmplifyConfig, backend: str = "torch", residual: torch.dtype = torch.float32):
        Model.__init__(self)
        layers: Any
        if backend == "te":
            from extras.families.amplify import layers_te as layers
        else:
            from extras.families.amplify import layers
        self.config, self.backend = config, backend
        self.embeddings = Embeddings(config, residual)
        self.encoder = Encoder(config, layers, RMSNorm(config.hidden_size, config.norm_eps))
        self.lm_head = LMHead(config)

    def hidden_matrices(self) -> dict[str, list[Block]]:
        size, ffn, heads = self.config.hidden_size, self.config.ffn_size, self.config.num_attention_heads
        of_layer = {
            "self_attention.layernorm_qkv.weight": [Block(3 * size, groups=heads, parts=3)],
            "self_attention.proj.weight": [Block(size)],
            "layernorm_mlp.fc1_weight": [Block(ffn)] * 2,  # gate and up
            "layernorm_mlp.fc2_weight": [Block(size)],
        }
        layers = range(self.config.num_hidden_layers)
        return {f"encoder.layers.{n}.{name}": of for n in layers for name, of in of_layer.items()}
