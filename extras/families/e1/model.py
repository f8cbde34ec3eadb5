"""E1 for masked language modelling: what differs from ESM-2's model (common.models.esm2.model).

Fidelity to the authors' description (fp32 logits, loss and every gradient within 1e-5 of float64) is tested on sets of
several sequences, for the shapes of all sizes. Inside, the vocabulary has 64 rows, as ESM-2's: 34 of them are tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.esm2.layers_torch import LayerNorm
from common.models.esm2.model import PADDED_VOCAB, Embeddings, Esm2ForMaskedLM
from common.models.layers.linear import Embedding, Linear
from common.models.layers.residual import Block, Model
from extras.families.decoders.layers import RMSNorm
from extras.families.e1 import layers
from extras.families.e1.alphabet import ALPHABET
from extras.families.e1.config import E1Config
from extras.families.sets.encoder import SetEncoder, SetModel

EMBEDDING, DECODER = "embeddings.word_embeddings.weight", "lm_head.decoder"
FILLERS = range(ALPHABET.vocab_size, PADDED_VOCAB)


class NumberedEncoder(SetEncoder):
    """Adds to each token the embedding of its sequence's number in the set, before the first layer."""

    def __init__(self, config: E1Config):
        super().__init__(config, layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.embed_number = Embedding(config.max_num_sequences, config.hidden_size)

    def numbered(self, x: Tensor, numbers: Tensor) -> Tensor:
        return x + self.embed_number(numbers).to(x.dtype)


class LMHead(nn.Module):
    """dense -> GELU -> LayerNorm -> decoder, which is not tied to the embedding."""

    def __init__(self, config: E1Config):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = LayerNorm(config.hidden_size, config.rms_norm_eps)
        self.decoder = Linear(config.hidden_size, PADDED_VOCAB)

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        """[T, hidden] -> logits fp32 [T, 34]. embedding: of ESM-2's head."""
        x = self.decoder(self.layer_norm(F.gelu(self.dense(x))))
        return x[..., : ALPHABET.vocab_size].float()


class E1ForMaskedLM(SetModel, Esm2ForMaskedLM):
    """E1 of any size, with the interface of `Esm2ForMaskedLM`; logits are of its 34 tokens."""

    zero_rows: dict[str, Any] = {EMBEDDING: (ALPHABET.pad, *FILLERS), f"{DECODER}.weight": FILLERS}
    padded_vocab: dict[str, Any] = dict.fromkeys(
        (EMBEDDING, f"{DECODER}.weight", f"{DECODER}.bias"), ALPHABET.vocab_size
    )

    def __init__(self, config: E1Config, backend: str = "torch", residual: torch.dtype = torch.float32):
        Model.__init__(self)
        self.config, self.backend = config, backend
        self.embeddings = Embeddings(config, residual)  # pyrefly: ignore[bad-argument-type]  # what it reads is there
        self.encoder = NumberedEncoder(config)
        self.lm_head = LMHead(config)

    def hidden_matrices(self) -> dict[str, list[Block]]:
        size, ffn, heads = self.config.hidden_size, self.config.intermediate_size, self.config.num_attention_heads
        of_layer = {
            "self_attention.layernorm_qkv.weight": [Block(3 * size, groups=heads, parts=3)],
            "self_attention.proj.weight": [Block(size)],
            "layernorm_mlp.fc1_weight": [Block(ffn)] * 2,  # gate and up
            "layernorm_mlp.fc2_weight": [Block(size)],
        }
        numbers = range(self.config.num_hidden_layers)
        blocks = {f"encoder.layers.{n}.{name}": of for n in numbers for name, of in of_layer.items()}
        return blocks | {"lm_head.dense.weight": [Block(size)]}
