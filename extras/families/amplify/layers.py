"""AMPLIFY's layer in plain PyTorch, on any device, with Transformer Engine's parameter names and shapes.

ESM-2's layer with RMSNorm in the place of LayerNorm, SwiGLU in that of GELU, and no biases. Its authors rotate
neighbouring numbers of a query or key, (2i, 2i + 1); here these lie at (i, i + D/2), as in ESM-2's, and conversion
(extras.families.amplify.convert) permutes the rows of the matrices: the products of queries and keys are the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from common.models.esm2 import layers_torch
from common.models.esm2.layers_torch import prepare as prepare
from common.models.layers.linear import Linear
from common.models.layers.residual import begin as begin  # layers_te has its own
from extras.families.amplify.config import AmplifyConfig
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.layers import FeedForward, NormLinear


class SelfAttention(layers_torch.SelfAttention):
    """Rows of the fused matrix: query, key and value of head 0, then of head 1, ..."""

    def __init__(self, config: AmplifyConfig):
        nn.Module.__init__(self)
        self.heads = config.num_attention_heads
        self.layernorm_qkv = NormLinear(config.hidden_size, 3 * config.hidden_size, config.norm_eps)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=False)


class SwiGlu(FeedForward):
    """fc2(silu(gate) * up), where gate and up are the upper and the lower half of fc1(RMSNorm(x))."""

    def __init__(self, config: AmplifyConfig):
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.ffn_size}
        super().__init__(DecoderConfig(**sizes, rms_norm_eps=config.norm_eps))

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  # without a router's result
        return super().forward(x)[0]


class TransformerLayer(layers_torch.TransformerLayer):
    """number: which one it is, from 0; these do not need to know."""

    def __init__(self, config: AmplifyConfig, number: int = 0):
        nn.Module.__init__(self)
        self.self_attention = SelfAttention(config)
        self.layernorm_mlp = SwiGlu(config)
