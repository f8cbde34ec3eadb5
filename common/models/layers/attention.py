"""Self-attention over a pack of sequences: every token attends to the tokens of its own sequence, and to no other.

Three ways to the same numbers, chosen by `packed_attention`:
- CUDA, bf16/fp16: `torch.nn.attention.varlen.varlen_attn`, one fused kernel over the whole pack;
- CPU: `_CpuAttention`, sequence by sequence, the library's flash kernel in fp32. bf16 numbers are widened for it: they
  are multiplied exactly so, on every CPU, and faster than by bf16 instructions (benchmarks/results/cpu_products.md);
- anything else (float64, fp32 on CUDA): `scaled_dot_product_attention`, sequence by sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor

from common.compat import assume_constant_result, cpu_flash_backward, cpu_flash_forward
from common.models.layers.cpu import device_type


def rotary_angles(positions: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Angles of the rotary embedding, fp32 [T, D/2], for integer positions [T] (RoFormer, eq. 34)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    return positions.float()[:, None] * (1.0 / base**exponents)


def rotary_tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of those angles."""
    angles = rotary_angles(positions, head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [T, H, D] by the angles of `rotary_tables`, in fp32; keeps x's dtype."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def packed_attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Rotary self-attention of a pack.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2], cu_seqlens int32 [B + 1]
    (on the CPU too when qkv is there), max_seqlen the longest sequence. Returns [T, H * D]. Scores are scaled by
    1/sqrt(D).
    """
    if device_type(qkv) == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16):
        return _cpu_attention(qkv, cos, sin, cu_seqlens)
    q, k, v = qkv.unbind(2)
    return rotated_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, cu_seqlens, max_seqlen)


def has_varlen_kernel(q: Tensor) -> bool:
    """Whether there is a fused kernel for packs of such numbers."""
    return device_type(q) == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


def rotated_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool = False
) -> Tensor:
    """The same of queries and keys that are rotated already: q [T, H, D], k and v [T, K, D] -> [T, H * D].

    K divides H: neighbours among the queries' heads share a head of keys and values. causal: a token attends to those
    up to itself only.
    """
    if has_varlen_kernel(q):
        from torch.nn.attention.varlen import varlen_attn  # torch >= 2.10; CUDA only

        options = {}
        if causal:  # torch's versions have other names for it
            options = {"is_causal": True} if _varlen_has("is_causal") else {"window_size": (-1, 0)}
        if q.shape[1] != k.shape[1] and _varlen_has("enable_gqa"):
            options["enable_gqa"] = True
        bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        return varlen_attn(q, k, v.contiguous(), *bounds, **options).flatten(1)
    lengths = cu_seqlens.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)), strict=True)
    options = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    attended = [F.scaled_dot_product_attention(*(x[None] for x in part), **options)[0] for part in parts]
    return torch.cat(attended, dim=1).transpose(0, 1).flatten(1)


@assume_constant_result
def _varlen_has(option: str) -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return option in signature(varlen_attn).parameters


def _cpu_attention(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return _in_a_graph(qkv, cos, sin, cu_seqlens)[0]
    return _CpuAttention.apply(qkv, cos, sin, cu_seqlens.tolist()).flatten(1)


class _CpuAttention(torch.autograd.Function):
    """Rotary attention of a pack on the CPU, sequence by sequence: what is worked on stays in the cache.

    Heads stay where the products around it have them, [T, H, ...]: the kernel takes any strides, and copies that bring
    the tokens of a head together cost as much as a third of the kernel at heads of 16. `lse` [T, H], fp32, is the
    logarithm of the sum of a query's weights.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # autocast would turn the fp32 products of the scores into bf16 ones
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, bounds: list[int]) -> Tensor:
        tokens, heads, _, dim = qkv.shape
        rotated, out = qkv.new_empty(qkv.shape), qkv.new_empty(tokens, heads, dim)
        lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
        turns = _turns(cos, sin)
        for span in spans(bounds):
            rotated[span] = _turn(qkv[span].float(), *(t[span] for t in turns))
            attended, logarithm = cpu_flash_forward(*_by_head(rotated[span].float()), scale=dim**-0.5)
            out[span] = attended[0].transpose(0, 1)
            lse[span] = logarithm[0].t()
        ctx.save_for_backward(rotated, out, lse, cos, sin)
        ctx.bounds = bounds
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad_out: Tensor):
        rotated, out, lse, cos, sin = ctx.saved_tensors
        grads = rotated.new_empty(rotated.shape)
        turns = _turns(cos, -sin)
        for span in spans(ctx.bounds):
            grad, attended = (x[span].float().transpose(0, 1)[None] for x in (grad_out, out))
            logarithm = lse[span].t()[None]
            inputs = grad, *_by_head(rotated[span].float()), attended, logarithm
            by_head = cpu_flash_backward(*inputs, 0.0, False, scale=rotated.shape[-1] ** -0.5)
            together = torch.stack([x[0].transpose(0, 1) for x in by_head], dim=2)  # [T, H, 3, D]
            grads[span] = _turn(together, *(t[span] for t in turns))
        return grads, None, None, None


# In a graph that is compiled the loop over sequences is one operator: neither unrolled nor a break in the graph.
@torch.library.custom_op("esm2::attention", mutates_args=())
def _in_a_graph(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_CpuAttention`; also what its backward pass needs: rotated [T, H, 3, D] and lse [T, H]."""
    context = Kept()
    out = _CpuAttention.forward(context, qkv, cos, sin, cu_seqlens.tolist())
    rotated, _, lse, _, _ = context.saved_tensors
    return out.flatten(1), rotated, lse


@_in_a_graph.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _, dim = qkv.shape
    lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
    return qkv.new_empty(tokens, heads * dim), qkv.new_empty(qkv.shape), lse


@torch.library.custom_op("esm2::attention_backward", mutates_args=())
def _backward_in_a_graph(
    grad: Tensor, rotated: Tensor, out: Tensor, lse: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor
) -> Tensor:
    tokens, heads, _, dim = rotated.shape
    context = Kept((rotated, out.view(tokens, heads, dim), lse, cos, sin), cu_seqlens.tolist())
    return _CpuAttention.backward(context, grad.view(tokens, heads, dim))[0]


@_backward_in_a_graph.register_fake
def _(grad, rotated, out, lse, cos, sin, cu_seqlens) -> Tensor:
    return rotated.new_empty(rotated.shape)


def _keep(ctx, inputs, output) -> None:
    _, cos, sin, cu_seqlens = inputs
    out, rotated, lse = output
    ctx.save_for_backward(rotated, out, lse, cos, sin, cu_seqlens)


def _backward(ctx, grad: Tensor, *_):
    return _backward_in_a_graph(grad.contiguous(), *ctx.saved_tensors), None, None, None


_in_a_graph.register_autograd(_backward, setup_context=_keep)


@dataclass
class Kept:
    """The part of a context of autograd that attention on a CPU uses."""

    saved_tensors: tuple[Tensor, ...] = ()
    bounds: list[int] | None = None
    kv_heads: int = 0

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def _turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[T, D/2] each -> what `_turn` multiplies [T, 1, 3, D] by itself and by its swapped halves: values stay."""
    direct = torch.cat((cos, cos), -1)
    crossed = torch.cat((-sin, sin), -1)
    direct = torch.stack((direct, direct, torch.ones_like(direct)), 1)
    crossed = torch.stack((crossed, crossed, torch.zeros_like(crossed)), 1)
    return direct[:, None], crossed[:, None]


def _turn(x: Tensor, direct: Tensor, crossed: Tensor) -> Tensor:
    """The rotation of queries and keys in fp32 [T, H, 3, D]; every pass is over whole rows of 3 D numbers."""
    return (x * direct).addcmul_(x.roll(x.shape[-1] // 2, -1), crossed)


def _by_head(qkv: Tensor) -> Tensor:
    """[T, H, 3, D] -> three of [1, H, T, D], without a copy."""
    return qkv.permute(2, 1, 0, 3)[:, None]


def spans(bounds: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
