"""ESM C's layer in plain PyTorch, on any device, with Transformer Engine's parameter names and shapes.

Pre-norm, as transformers' `EsmcLayer`: x + proj(attention(LN(x))) / s, then x + fc2(silu(gate) * up) / s, with
s = sqrt(layers / 36). Queries and keys have a LayerNorm over all heads together, before they are rotated. Matmuls have
no biases. Every activation is [T, hidden]: all tokens of a pack end to end. The next layer adds the last sum
(common.models.layers.residual).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.esm2.layers_torch import LayerNorm, layer_norm
from common.models.esm2.layers_torch import prepare as prepare
from common.models.layers.attention import Layout, packed_attention
from common.models.layers.linear import Linear, linear
from common.models.layers.residual import Stream, total
from common.models.layers.residual import begin as begin  # layers_te has its own
from extras.families.esmc.config import EsmcConfig

DEPTH = 36  # layers at which a branch is added unscaled: the 600M


class LayerNormLinear(Linear):
    """Linear(LayerNorm(x)), without a bias."""

    def __init__(self, in_features: int, out_features: int, eps: float):
        super().__init__(in_features, out_features, bias=False)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps))


class LayerNormMLP(nn.Module):
    """SwiGLU: fc2(silu(gate) * up), where gate and up are the upper and the lower half of fc1(LayerNorm(x))."""

    matmul_weights = ("fc1_weight", "fc2_weight")

    def __init__(self, hidden_size: int, ffn_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.fc1_matmul = self.fc2_matmul = linear
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size))
        self.fc1_weight = nn.Parameter(torch.empty(2 * ffn_size, hidden_size))
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_size))

    def forward(self, x: Tensor) -> Tensor:
        x = layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        gate, up = self.fc1_matmul(x, self.fc1_weight, None).chunk(2, dim=-1)
        return self.fc2_matmul(F.silu(gate) * up, self.fc2_weight, None)


class SelfAttention(nn.Module):
    """Rows of the fused matrix: all queries, then all keys, then all values."""

    def __init__(self, config: EsmcConfig):
        super().__init__()
        size, eps = config.hidden_size, config.layer_norm_eps
        self.heads = config.num_attention_heads
        self.layernorm_qkv = LayerNormLinear(size, 3 * size, eps)
        self.q_norm, self.k_norm = (LayerNorm(size, eps, bias=False) for _ in range(2))
        self.proj = Linear(size, size, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self.layernorm_qkv(x).chunk(3, dim=-1)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        qkv = torch.stack([part.unflatten(-1, (self.heads, -1)) for part in (q, k, v)], dim=2)  # [T, H, 3, D]
        if layout is not None:
            attended = layout.attention(qkv, *rotary)
            return self.proj(attended if at is None else attended[at])
        return self.proj(packed_attention(qkv, *rotary, cu_seqlens, max_seqlen, at))


class TransformerLayer(nn.Module):
    """number: which one it is, from 0; these do not need to know."""

    def __init__(self, config: EsmcConfig, number: int = 0):
        super().__init__()
        self.scale = math.sqrt(config.num_hidden_layers / DEPTH)
        self.self_attention = SelfAttention(config)
        self.layernorm_mlp = LayerNormMLP(config.hidden_size, config.intermediate_size, config.layer_norm_eps)

    def forward(
        self,
        stream: Tensor | Stream,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None = None,
        at: Tensor | None = None,
    ) -> Stream:
        """at: int64 [P], the tokens whose output is wanted; None: all."""
        x = total(stream)
        attended = self.self_attention(x, rotary, cu_seqlens, max_seqlen, layout, at) / self.scale
        x = (x if at is None else x[at]) + attended
        return Stream(x, self.layernorm_mlp(x) / self.scale)
