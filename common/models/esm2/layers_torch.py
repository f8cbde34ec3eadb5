"""The encoder layer in plain PyTorch, on any device, with Transformer Engine's parameter names and shapes.

Pre-norm transformer layer as in ESM-2: x + proj(attention(LN(x))), then x + fc2(gelu(fc1(LN(x)))), with the GELU that
the configuration names (common.models.esm2.family). Every activation is [T, hidden]: all tokens of a pack end to end.
The next layer adds the last sum (common.models.layers.residual).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.esm2.config import Esm2Config, gelu_of
from common.models.layers.attention import Layout, packed_attention, rotary_tables
from common.models.layers.linear import Linear, linear
from common.models.layers.residual import Stream, total
from common.models.layers.residual import begin as begin  # layers_te has its own


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension of x, in fp32 (float64 for float64) for any dtype of x and the parameters.

    In bf16 torch's CPU kernel sums the parameters' gradients in bf16: 13 % off after some 2,000 rows.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` that calls `layer_norm`. A module: a strategy may all-gather its weights when it is called."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.weight, self.bias, self.eps)


class LayerNormLinear(nn.Module):
    """Linear(LayerNorm(x)). QKV rows are interleaved per head: q, k, v of head 0, then of head 1, ..."""

    matmul_weights = ("weight", "bias")

    def __init__(self, in_features: int, out_features: int, eps: float):
        super().__init__()
        self.eps = eps
        self.matmul = linear  # or an EmulatedMatmul
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features))
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        x = layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return self.matmul(x, self.weight, self.bias)


class LayerNormMLP(nn.Module):
    """fc2(gelu(fc1(LayerNorm(x))))."""

    matmul_weights = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")

    def __init__(self, hidden_size: int, ffn_size: int, eps: float, gelu: str):
        super().__init__()
        self.eps = eps
        self.fc1_matmul = self.fc2_matmul = linear
        self.fused: Callable[..., Tensor] | None = None  # all after the norm: extras.speed.fused_gelu
        self.approximate = "tanh" if gelu == "tanh" else "none"
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size))
        self.fc1_weight = nn.Parameter(torch.empty(ffn_size, hidden_size))
        self.fc1_bias = nn.Parameter(torch.empty(ffn_size))
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_size))
        self.fc2_bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        x = layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps)
        if self.fused is not None:
            return self.fused(x, self.fc1_weight, self.fc1_bias, self.fc2_weight, self.fc2_bias)
        x = F.gelu(self.fc1_matmul(x, self.fc1_weight, self.fc1_bias), approximate=self.approximate)
        return self.fc2_matmul(x, self.fc2_weight, self.fc2_bias)


class SelfAttention(nn.Module):
    def __init__(self, config: Esm2Config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.layernorm_qkv = LayerNormLinear(config.hidden_size, 3 * config.hidden_size, config.layer_norm_eps)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None = None,
        at: Tensor | None = None,
    ) -> Tensor:
        qkv = self.layernorm_qkv(x).view(len(x), self.heads, 3, -1)  # [T, H, 3, D]
        if layout is not None:
            attended = layout.attention(qkv, *rotary)
            return self.proj(attended if at is None else attended[at])
        return self.proj(packed_attention(qkv, *rotary, cu_seqlens, max_seqlen, at))


class TransformerLayer(nn.Module):
    def __init__(self, config: Esm2Config, number: int = 0):
        super().__init__()
        self.self_attention = SelfAttention(config)
        size, ffn_size, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.layernorm_mlp = LayerNormMLP(size, ffn_size, eps, gelu_of(config))

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
        attended = self.self_attention(x, rotary, cu_seqlens, max_seqlen, layout, at)
        x = (x if at is None else x[at]) + attended
        return Stream(x, self.layernorm_mlp(x))


def prepare(tokens: int, cu_seqlens: Tensor, max_seqlen: int, head_dim: int) -> tuple[tuple[Tensor, Tensor], int]:
    """What all layers share: (cosines and sines of each token's position in its sequence, the longest sequence)."""
    starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=tokens)
    return rotary_tables(torch.arange(tokens, device=cu_seqlens.device) - starts, head_dim), max_seqlen
