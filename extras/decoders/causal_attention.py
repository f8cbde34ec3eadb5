"""Causal self-attention over a pack: a token attends to those of its own sequence up to itself, and to no other.

On CUDA in bf16/fp16 `varlen_attn`; on a CPU the library's flash kernel in fp32, sequence by sequence, as
common.models.layers.attention has it; anything else `scaled_dot_product_attention`, sequence by sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.compat import cpu_flash_backward, cpu_flash_forward
from common.models.layers.attention import Kept, has_varlen_kernel, rotate, rotated_attention, spans
from common.models.layers.cpu import device_type


def causal_attention(
    qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Rotary self-attention of a pack.

    qkv [T, H + 2 K, D]: the heads of all queries, then of all keys, then of all values, not yet rotated; K = kv_heads
    divides H: neighbours among the queries' heads share a head of keys and values. The rest as for `packed_attention`.
    Returns [T, H * D].
    """
    if device_type(qkv) == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16):
        if torch.compiler.is_compiling():
            return _in_a_graph(qkv, kv_heads, cos, sin, cu_seqlens)[0]
        return _CpuCausalAttention.apply(qkv, kv_heads, cos, sin, cu_seqlens.tolist()).flatten(1)
    q, k, v = _by_kind(qkv, kv_heads)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if has_varlen_kernel(q):
        return rotated_attention(q, k, v, cu_seqlens, max_seqlen, causal=True)
    with torch.autocast(q.device.type, enabled=False):
        return rotated_attention(q, k, v, cu_seqlens, max_seqlen, causal=True)


class _CpuCausalAttention(torch.autograd.Function):
    """As `_CpuAttention`, which says what is kept: rotated is [T, H + 2 K, D] here."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # autocast would turn the fp32 products of the scores into bf16 ones
    def forward(ctx, qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, bounds: list[int]) -> Tensor:
        tokens, heads, dim = qkv.shape
        heads -= 2 * kv_heads
        rotated, out = torch.empty_like(qkv), qkv.new_empty(tokens, heads, dim)
        lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
        turns = _turns(cos, sin)
        for span in spans(bounds):
            _turn(qkv[span], rotated[span], kv_heads, *(t[span] for t in turns))
            parts = _by_head(rotated[span].float(), kv_heads)
            attended, logarithm = cpu_flash_forward(*parts, 0.0, True, scale=dim**-0.5)
            out[span] = attended[0].transpose(0, 1)
            lse[span] = logarithm[0].t()
        ctx.save_for_backward(rotated, out, lse, cos, sin)
        ctx.bounds, ctx.kv_heads = bounds, kv_heads
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, grad_out: Tensor):
        rotated, out, lse, cos, sin = ctx.saved_tensors
        grads = torch.empty_like(rotated)
        turns = _turns(cos, -sin)
        for span in spans(ctx.bounds):
            grad, attended = (x[span].float().transpose(0, 1)[None] for x in (grad_out, out))
            parts = _by_head(rotated[span].float(), ctx.kv_heads)
            by_head = cpu_flash_backward(
                grad, *parts, attended, lse[span].t()[None], 0.0, True, scale=rotated.shape[-1] ** -0.5
            )
            together = torch.cat([x[0].transpose(0, 1) for x in by_head], dim=1)  # [T, H + 2 K, D]
            _turn(together, grads[span], ctx.kv_heads, *(t[span] for t in turns))
        return grads, None, None, None, None


# In a graph that is compiled the loop over sequences is one operator: neither unrolled nor a break in the graph.
@torch.library.custom_op("decoder::attention", mutates_args=())
def _in_a_graph(
    qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_CpuCausalAttention`; also what its backward pass needs: rotated [T, H + 2 K, D] and lse [T, H]."""
    context = Kept()
    out = _CpuCausalAttention.forward(context, qkv, kv_heads, cos, sin, cu_seqlens.tolist())
    rotated, _, lse, _, _ = context.saved_tensors
    return out.flatten(1), rotated, lse


@_in_a_graph.register_fake
def _(qkv: Tensor, kv_heads: int, cos: Tensor, sin: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, dim = qkv.shape
    heads -= 2 * kv_heads
    lse = qkv.new_empty(tokens, heads, dtype=torch.float32)
    return qkv.new_empty(tokens, heads * dim), torch.empty_like(qkv), lse


@torch.library.custom_op("decoder::attention_backward", mutates_args=())
def _backward_in_a_graph(
    grad: Tensor,
    rotated: Tensor,
    out: Tensor,
    lse: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    kv_heads: int,
) -> Tensor:
    by_head = lse.shape[0], lse.shape[1], rotated.shape[-1]
    context = Kept((rotated, out.view(by_head), lse, cos, sin), cu_seqlens.tolist(), kv_heads)
    return _CpuCausalAttention.backward(context, grad.view(by_head))[0]


@_backward_in_a_graph.register_fake
def _(grad, rotated, out, lse, cos, sin, cu_seqlens, kv_heads) -> Tensor:
    return torch.empty_like(rotated)


def _keep(ctx, inputs, output) -> None:
    _, ctx.kv_heads, cos, sin, cu_seqlens = inputs
    out, rotated, lse = output
    ctx.save_for_backward(rotated, out, lse, cos, sin, cu_seqlens)


def _backward(ctx, grad: Tensor, *_):
    return _backward_in_a_graph(grad.contiguous(), *ctx.saved_tensors, ctx.kv_heads), None, None, None, None


_in_a_graph.register_autograd(_backward, setup_context=_keep)


def _by_kind(qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H + 2 K, D] -> queries [T, H, D], keys and values [T, K, D], without a copy."""
    return qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)


def _by_head(qkv: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same as [1, heads, T, D]."""
    return tuple(x.transpose(0, 1)[None] for x in _by_kind(qkv, kv_heads))


def _turns(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[T, D/2] each -> what `_turn` multiplies heads by, themselves and with their halves swapped: [T, 1, D]."""
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def _turn(qkv: Tensor, out: Tensor, kv_heads: int, direct: Tensor, crossed: Tensor) -> None:
    """Write [T, H + 2 K, D] to `out`, queries and keys rotated in fp32."""
    turned = qkv.shape[1] - kv_heads
    x = qkv[:, :turned].float()
    out[:, :turned] = (x * direct).addcmul_(x.roll(x.shape[-1] // 2, -1), crossed)
    out[:, turned:] = qkv[:, turned:]
