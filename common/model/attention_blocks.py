"""Attention of a pack's queries to one block of keys and values, of several that make up the sequences.

Softmax is over all blocks in the end: a block gives its own result with the logarithm of the sum of its weights (lse),
`merge` puts results of blocks together, and the backward pass of a block takes the result and lse of all of them.
Everything is added up in fp32 (float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int]) -> tuple[Tensor, Tensor]:
    """q [Tq, H, D], k and v [Tk, H, D]; sequence b has the queries [queries[b], queries[b + 1]), and keys alike.

    Returns out [Tq, H, D] and lse [Tq, H], fp32; 0 and -inf where a sequence has no key in the block. Scores
    are scaled by 1/sqrt(D).
    """
    if _has_varlen_kernel(q):
        bounds = _on_device(queries, keys, q.device)
        longest = _longest(queries), _longest(keys)
        flash = torch.ops.aten._flash_attention_forward
        out, lse, *_ = flash(q, k, v, *bounds, *longest, 0.0, False, False, scale=q.shape[-1] ** -0.5)
        unseen = _without_keys(queries, keys, q.device)
        return out.float().masked_fill(unseen[:, None, None], 0), lse.t().masked_fill(unseen[:, None], -math.inf)
    kind = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(q.shape, dtype=kind), q.new_full(q.shape[:2], -math.inf, dtype=kind)
    for mine, theirs in _pairs(queries, keys):
        attended, logarithm = _one(*(x.to(kind) for x in (q[mine], k[theirs], v[theirs])))
        out[mine], lse[mine] = attended, logarithm
    return out, lse


def merge(out: Tensor, lse: Tensor, more: Tensor, lse_of_more: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over different keys as one over all of them. Every query has a key in the first."""
    together = torch.logaddexp(lse, lse_of_more)
    out = out * (lse - together).exp()[..., None]
    return out.addcmul_(more, (lse_of_more - together).exp()[..., None]), together


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, queries: list[int], keys: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """What the block adds to the gradients of q, and those of k and v; fp32. out, lse: over all blocks."""
    if _has_varlen_kernel(q):
        bounds = _on_device(queries, keys, q.device)
        longest = _longest(queries), _longest(keys)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is none of
        flash = torch.ops.aten._flash_attention_backward
        by = (grad.to(q.dtype), q, k, v, out.to(q.dtype), lse.t().contiguous())
        dq, dk, dv = flash(*by, *bounds, *longest, 0.0, False, state, state.new_empty(0), scale=q.shape[-1] ** -0.5)
        unseen = _without_keys(queries, keys, q.device)
        return dq.float().masked_fill(unseen[:, None, None], 0), dk.float(), dv.float()
    kind = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=kind) for x in (q, k, v))
    for mine, theirs in _pairs(queries, keys):
        inputs = (grad[mine], q[mine], k[theirs], v[theirs], out[mine])
        parts = _one_backward(*(x.to(kind) for x in inputs), lse[mine])
        dq[mine], dk[theirs], dv[theirs] = parts
    return dq, dk, dv


def _one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: [Tq, H, D], [Tk, H, D] twice -> [Tq, H, D], lse [Tq, H]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q[None], k[None], v[None], scale=scale)
        return out[0].transpose(0, 1), lse[0].t()
    scores = q @ k.mT * scale
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).transpose(0, 1), lse.t()


def _one_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    grad, q, k, v, out = (x.transpose(0, 1) for x in (grad, q, k, v, out))
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        inputs = (x[None] for x in (grad, q, k, v, out))
        return tuple(x[0].transpose(0, 1) for x in kernel(*inputs, lse.t()[None], 0.0, False, scale=scale))
    weights = (q @ k.mT * scale - lse.t()[..., None]).exp()
    of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return tuple(x.transpose(0, 1) for x in (of_scores @ k, of_scores.mT @ q, weights.mT @ grad))


def _has_varlen_kernel(q: Tensor) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)


def _pairs(queries: list[int], keys: list[int]) -> list[tuple[slice, slice]]:
    """Of the sequences that have both."""
    ends = zip(queries, queries[1:], keys, keys[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends if b > a and d > c]


def _on_device(queries: list[int], keys: list[int], device: torch.device) -> tuple[Tensor, ...]:
    both = torch.tensor([queries, keys], dtype=torch.int32).to(device, non_blocking=True)
    return both[0], both[1]


def _longest(bounds: list[int]) -> int:
    return max((b - a for a, b in zip(bounds, bounds[1:], strict=False)), default=0)


def _without_keys(queries: list[int], keys: list[int], device: torch.device) -> Tensor:
    """Which queries have no key in the block; bool [Tq]."""
    counts = torch.tensor([queries, keys]).diff()
    return torch.repeat_interleave(counts[1] == 0, counts[0]).to(device, non_blocking=True)
