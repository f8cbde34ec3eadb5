"""E1's layer in plain PyTorch, on any device, with the parameter names of ESM-2's.

ESM-2's layer with RMSNorm in the place of LayerNorm, SwiGLU in that of GELU, and no biases; queries, keys and values
are clipped before they are rotated. The encoder gives a layer that attends to sets another layout and rotation.
"""

from __future__ import annotations

from torch import Tensor, nn

from common.models.esm2 import layers_torch
from common.models.esm2.layers_torch import prepare as prepare
from common.models.layers.linear import Linear
from common.models.layers.residual import begin as begin
from extras.families.decoders.layers import FeedForward, NormLinear
from extras.families.e1.config import E1Config


class ClippedNormLinear(NormLinear):
    """Linear(RMSNorm(x)), clipped to [-clip, clip]; None: not."""

    def __init__(self, in_features: int, out_features: int, eps: float, clip: float | None):
        super().__init__(in_features, out_features, eps)
        self.clip = clip

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.clip is None else x.clamp(-self.clip, self.clip)


class SelfAttention(layers_torch.SelfAttention):
    """Rows of the fused matrix: query, key and value of head 0, then of head 1, ..."""

    def __init__(self, config: E1Config):
        nn.Module.__init__(self)
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.layernorm_qkv = ClippedNormLinear(size, 3 * size, config.rms_norm_eps, config.clip_qkv)
        self.proj = Linear(size, size, bias=False)


class SwiGlu(FeedForward):
    """fc2(silu(gate) * up), where gate and up are the upper and the lower half of fc1(RMSNorm(x))."""

    def forward(self, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  # without a router's result
        return super().forward(x)[0]


class TransformerLayer(layers_torch.TransformerLayer):
    """number: which one it is, from 0; these do not need to know."""

    def __init__(self, config: E1Config, number: int = 0):
        nn.Module.__init__(self)
        self.self_attention = SelfAttention(config)
        self.layernorm_mlp = SwiGlu(config)  # pyrefly: ignore[bad-argument-type]  # which has what a decoder's has
