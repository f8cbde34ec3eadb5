"""Self-attention of packed sequences: every token attends to the tokens of its own sequence, and to no other.

- CUDA, bf16/fp16: `torch.nn.attention.varlen.varlen_attn`, one fused kernel over the whole pack.
- CPU, fp32/bf16: common.models.layers.cpu.
- Anything else (float64, fp32 on CUDA), and `--attention sdpa`: `scaled_dot_product_attention`, sequence by sequence.
"""

from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.compat import assume_constant_result, varlen_takes_cudnn
from common.models.layers import cpu
from common.models.layers.cpu import device_type

BY_MATMULS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # neither flash nor cuDNN
_kernels = "auto"


def use_kernels(name: str) -> None:
    """--attention, of this process: sdpa or cudnn; other names are of torch's flash kernels, which torch's own switch
    replaces (extras.speed.attention_kernels)."""
    global _kernels
    _kernels = name


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Angles of the rotary embedding, fp32 [T, D/2], for integer positions [T] (RoFormer, eq. 34)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    return positions.float()[:, None] * (1.0 / base**exponents)


def rotary_tables(positions: Tensor, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of those angles."""
    angles = rotary_angles(positions, head_dim, base)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [T, H, D] by the angles of `rotary_tables`, in fp32; keeps x's dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def packed_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int, at: Tensor | None = None
) -> Tensor:
    """Rotary self-attention of a pack.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2], cu_seqlens int32 [B + 1]
    (on the CPU too when qkv is there), max_seqlen the longest sequence. at: int64 [P], the tokens wanted; None: all.
    Returns [T, H * D], or [P, H * D]. Scores are scaled by 1/sqrt(D).
    """
    if at is not None:
        if has_cpu_kernel(qkv) and not torch.is_grad_enabled():
            return cpu.attention_at(qkv, cos, sin, cu_seqlens, at)
        return packed_attention(qkv, cos, sin, cu_seqlens, max_seqlen)[at]
    if has_cpu_kernel(qkv):
        return cpu.attention(qkv, cos, sin, cu_seqlens)
    q, k, v = qkv.unbind(2)
    return rotated_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, cu_seqlens, max_seqlen)


def has_cpu_kernel(qkv: Tensor) -> bool:
    """Whether common.models.layers.cpu attends."""
    return device_type(qkv) == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16) and _kernels != "sdpa"


def has_varlen_kernel(q: Tensor) -> bool:
    """Whether there is a fused varlen kernel for this device and dtype."""
    return device_type(q) == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and _kernels != "sdpa"


def rotated_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool = False
) -> Tensor:
    """Self-attention of a pack whose queries and keys are rotated: q [T, H, D], k and v [T, K, D] -> [T, H * D].

    Grouped-query attention if K < H: neighbouring query heads share a head of keys and values.
    """
    if has_varlen_kernel(q):
        from torch.nn.attention.varlen import varlen_attn  # torch >= 2.10; CUDA only

        options: dict[str, Any] = {}
        if causal:  # torch 2.11 has another name for it
            options = {"is_causal": True} if _varlen_has("is_causal") else {"window_size": (-1, 0)}
        if q.shape[1] != k.shape[1] and _varlen_has("enable_gqa"):
            options["enable_gqa"] = True
        bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        # By itself torch would take cuDNN's kernels for the packs that they can do, and flash for the others.
        allowed = SDPBackend.CUDNN_ATTENTION if _kernels == "cudnn" else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(allowed) if varlen_takes_cudnn() else nullcontext():
            out: Any = varlen_attn(q, k, v.contiguous(), *bounds, **options)  # a tuple with return_aux only
        return out.flatten(1)
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    options = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    with sdpa_kernel(BY_MATMULS) if _kernels == "sdpa" and device_type(q) == "cuda" else nullcontext():
        attended = [F.scaled_dot_product_attention(*(x[None] for x in part), **options)[0] for part in parts]
    return torch.cat(attended, dim=1).transpose(0, 1).flatten(1)


@assume_constant_result
def _varlen_has(option: str) -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return option in signature(varlen_attn).parameters


class Layout(Protocol):
    """What tokens attend to, where that is not their own sequence on this rank: sequences that several ranks share
    (extras.speed.context_attention), sets of sequences (extras.families.sets.layout)."""

    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int = 0) -> Tensor:
        """Rotary self-attention of this rank's tokens: [T, H * D].

        qkv: [T, H, 3, D] of an encoder (kv_heads 0), else [T, H + 2 K, D] with K = kv_heads; cos, sin: [T, D/2].
        """
