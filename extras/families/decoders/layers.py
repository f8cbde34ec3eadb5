"""The decoder layer of Llama, Mistral and Mixtral in plain PyTorch, on any device.

Pre-norm: x + proj(attention(RMSNorm(x))), then x + feed-forward(RMSNorm(x)). Attention is causal, several heads of
queries may share one of keys and values (GQA, Ainslie et al. 2023), the feed-forward block is SwiGLU (Shazeer 2020),
in Mixtral one of several for each token. There are no biases. Modules and matmuls have the names of ESM-2's layers,
so that the same code quantises, recomputes and shards them.

Every activation is [T, hidden]: all tokens of a pack end to end. Norms, rotation and the router compute in fp32. The
next layer adds the last sum (common.models.layers.residual).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.layers import cpu
from common.models.layers.attention import Layout, has_cpu_kernel, has_varlen_kernel, rotate, rotated_attention
from common.models.layers.linear import Linear, linear
from common.models.layers.residual import Stream, total
from common.models.layers.residual import begin as begin  # layers_te has its own
from extras.families.decoders.config import DecoderConfig
from extras.families.decoders.grouped import grouped_linear

TOKENS = 1  # the number of tokens of a pass is a multiple of it


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension of x, in fp32 (float64 for float64) for any dtype of x and the weight."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class NormLinear(Linear):
    """Linear(RMSNorm(x))."""

    def __init__(self, in_features: int, out_features: int, eps: float):
        super().__init__(in_features, out_features, bias=False)
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rms_norm(x, self.layer_norm_weight, self.eps))


def causal_attention(
    qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Causal rotary self-attention of a pack: each token attends to its own sequence up to itself.

    qkv [T, H + 2 K, D]: the heads of all queries, then of all keys, then of all values, not yet rotated; K = kv_heads.
    The rest as for `packed_attention`. Returns [T, H * D].
    """
    if has_cpu_kernel(qkv):
        return cpu.attention(qkv, cos, sin, cu_seqlens, kv_heads)
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if has_varlen_kernel(q):
        return rotated_attention(q, k, v, cu_seqlens, max_seqlen, causal=True)
    with torch.autocast(q.device.type, enabled=False):
        return rotated_attention(q, k, v, cu_seqlens, max_seqlen, causal=True)


class SelfAttention(nn.Module):
    """Rows of the fused matrix: all queries, then all keys, then all values."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.shape, self.kv_heads = (-1, heads + 2 * kv_heads, dim), kv_heads
        self.layernorm_qkv = NormLinear(config.hidden_size, (heads + 2 * kv_heads) * dim, config.rms_norm_eps)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None = None,
    ) -> Tensor:
        qkv = self.layernorm_qkv(x).view(self.shape)  # [T, H + 2 K, D]
        if layout is not None:
            return self.proj(layout.attention(qkv, *rotary, self.kv_heads))
        return self.proj(causal_attention(qkv, self.kv_heads, *rotary, cu_seqlens, max_seqlen))


class FeedForward(nn.Module):
    """SwiGLU: fc2(silu(gate) * up), where gate and up are the upper and the lower half of fc1(RMSNorm(x))."""

    matmul_weights = ("fc1_weight", "fc2_weight")

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.fc1_matmul = self.fc2_matmul = linear
        self.layer_norm_weight = nn.Parameter(torch.empty(config.hidden_size))
        self.fc1_weight = nn.Parameter(torch.empty(2 * config.intermediate_size, config.hidden_size))
        self.fc2_weight = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))

    def forward(self, x: Tensor, layout: Layout | None = None, tokens: int | None = None) -> tuple[Tensor, None]:
        x = rms_norm(x, self.layer_norm_weight, self.eps)
        return self.of_normed(x, None), None

    def of_normed(self, x: Tensor, extra: Tensor | None) -> Tensor:
        """extra: what the matmuls take beside rows and matrix: no bias, or how many rows each expert has."""
        gate, up = self.fc1_matmul(x, self.fc1_weight, extra).chunk(2, dim=-1)
        return self.fc2_matmul(F.silu(gate) * up, self.fc2_weight, extra)


class Experts(FeedForward):
    """Mixtral's: a router sends each token to the `top` of its experts, whose results count by its probabilities.

    The experts' matrices lie one after the other, by rows: strategies shard rows, evenly also where there are more
    ranks than experts. Tokens are sorted by expert; no shape depends on what the router chooses.
    """

    matmul_weights = ()  # rounded at every use

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.experts, self.top = config.num_local_experts, config.num_experts_per_tok
        self.fc1_matmul = self.fc2_matmul = grouped_linear
        self.gate_weight = nn.Parameter(torch.empty(self.experts, config.hidden_size))
        for name in ("fc1_weight", "fc2_weight"):
            rows, columns = getattr(self, name).shape
            setattr(self, name, nn.Parameter(torch.empty(self.experts * rows, columns)))

    def forward(self, x: Tensor, layout: Layout | None = None, tokens: int | None = None) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> the same, and [2, experts] of the router: how often each expert was chosen, and its
        probabilities summed over tokens: over this rank's real ones where ranks share a pack, else over the first
        `tokens` (None: all)."""
        x = rms_norm(x, self.layer_norm_weight, self.eps)
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x, self.gate_weight.to(x.dtype)).softmax(-1)  # [T, experts]
        weights, chosen = probabilities.topk(self.top, dim=-1)  # [T, top]
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # assignments by expert
        rows = order // self.top  # the token of each
        result = self.of_normed(x[rows], self._count(chosen))
        result = result * weights.flatten()[order, None].to(result.dtype)
        real = slice(tokens) if layout is None else layout.own  # padding is of no pack
        shares = torch.stack((self._count(chosen[real]).to(probabilities.dtype), probabilities[real].sum(0)))
        return torch.zeros_like(x, dtype=result.dtype).index_add(0, rows, result), shares

    def _count(self, chosen: Tensor) -> Tensor:
        """int64 [experts]: how often each is in `chosen`. Not bincount, whose shape depends on values."""
        return (chosen.flatten()[:, None] == torch.arange(self.experts, device=chosen.device)).sum(0)


class DecoderLayer(nn.Module):
    """number: which one it is, from 0; these do not need to know."""

    def __init__(self, config: DecoderConfig, number: int = 0):
        super().__init__()
        self.self_attention = SelfAttention(config)
        self.layernorm_mlp = (Experts if config.num_local_experts else FeedForward)(config)

    def forward(
        self,
        stream: Tensor | Stream,
        rotary: tuple[Tensor, Tensor],
        cu_seqlens: Tensor,
        max_seqlen: int,
        layout: Layout | None = None,
        tokens: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The stream's two, and what `Experts` tells of its router; None without one. layout: of a pack that ranks
        share. tokens: how many there are before fillers; None: all.

        Side by side: Megatron-FSDP looks for tensors in a result, but not in a part of it.
        """
        x = total(stream)
        x = x + self.self_attention(x, rotary, cu_seqlens, max_seqlen, layout)
        more, shares = self.layernorm_mlp(x, layout, tokens)
        return x, more, shares


def rotary_frequencies(config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor:
    """Radians a token of each pair of a head's numbers, fp32 [D / 2] (RoFormer); Llama 3's scaling included.

    That one (section 3 of arXiv:2407.21783, as in transformers) divides frequencies whose wavelength is beyond the
    context of pretraining by `factor`, leaves high ones, and goes over from the one to the other in between.
    """
    dim = config.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    frequencies = 1.0 / config.rope_theta**exponents
    if (scaling := config.rope_scaling) is None:
        return frequencies
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies
