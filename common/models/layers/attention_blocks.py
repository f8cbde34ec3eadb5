"""Attention of a pack's queries to one block of keys and values, of several that make up the sequences.

Softmax is over all blocks in the end: a block gives its own result with the logarithm of the sum of its weights (lse),
`merge` puts results of blocks together, and the backward pass of a block takes the result and lse of all of them.
Everything is added up in fp32 (float64 for float64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from common.compat import cpu_flash_backward, cpu_flash_forward, cuda_flash_backward, cuda_flash_forward
from common.models.layers.attention import has_varlen_kernel


@dataclass(frozen=True)
class Bounds:
    """Which of some queries, or keys, are of which sequence: of sequence b those in [host[b], host[b + 1]).

    device: the same, int32 [B + 1], where the kernels want it.
    """

    host: list[int]
    device: Tensor

    @classmethod
    def make(cls, rows: Tensor, device: torch.device | str) -> list[Bounds]:
        """One for each row of a tensor on the host, sent in one go."""
        there = rows.to(torch.int32).to(device, non_blocking=True)
        return [cls(row.tolist(), moved) for row, moved in zip(rows, there, strict=True)]

    @property
    def longest(self) -> int:
        return max((b - a for a, b in zip(self.host, self.host[1:], strict=False)), default=0)


def attend(q: Tensor, k: Tensor, v: Tensor, queries: Bounds, keys: Bounds) -> tuple[Tensor, Tensor]:
    """q [Tq, H, D], k and v [Tk, H, D]: each query to the keys of its own sequence.

    Returns out [Tq, H, D] and lse [Tq, H], fp32; 0 and -inf where a sequence has no key in the block. Scores
    are scaled by 1/sqrt(D).
    """
    if _by_kernel(q, k):
        flash, sequences = cuda_flash_forward, _of_sequences(queries, keys)
        out, lse, *_ = flash(q, k, v, *sequences, 0.0, False, False, scale=q.shape[-1] ** -0.5)
        unseen = _without_keys(queries, keys)
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
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, queries: Bounds, keys: Bounds
) -> tuple[Tensor, Tensor, Tensor]:
    """What the block adds to the gradients of q, and those of k and v; fp32. out, lse: over all blocks."""
    if _by_kernel(q, k):
        flash, sequences = cuda_flash_backward, _of_sequences(queries, keys)
        by = (grad.to(q.dtype), q, k, v, out.to(q.dtype), lse.t().contiguous())
        # Of a dropout that there is none of: as torch.nn.attention.varlen has them.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = flash(*by, *sequences, 0.0, False, *state, scale=q.shape[-1] ** -0.5)
        unseen = _without_keys(queries, keys)
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
        out, lse = cpu_flash_forward(q[None], k[None], v[None], scale=scale)
        return out[0].transpose(0, 1), lse[0].t()
    scores = q @ k.mT * scale
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).transpose(0, 1), lse.t()


def _one_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    grad, q, k, v, out = (x.transpose(0, 1) for x in (grad, q, k, v, out))
    scale = q.shape[-1] ** -0.5
    if q.device.type == "cpu":
        inputs = (x[None] for x in (grad, q, k, v, out))
        return tuple(x[0].transpose(0, 1) for x in cpu_flash_backward(*inputs, lse.t()[None], 0.0, False, scale=scale))
    weights = (q @ k.mT * scale - lse.t()[..., None]).exp()
    of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return tuple(x.transpose(0, 1) for x in (of_scores @ k, of_scores.mT @ q, weights.mT @ grad))


def _by_kernel(q: Tensor, k: Tensor) -> bool:
    """Not for nothing: CUDA starts no kernel of no threads ("invalid argument")."""
    return has_varlen_kernel(q) and len(q) > 0 and len(k) > 0


def _pairs(queries: Bounds, keys: Bounds) -> list[tuple[slice, slice]]:
    """Of the sequences that have both."""
    ends = zip(queries.host, queries.host[1:], keys.host, keys.host[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends if b > a and d > c]


def _of_sequences(queries: Bounds, keys: Bounds) -> tuple[Tensor, Tensor, int, int]:
    return queries.device, keys.device, queries.longest, keys.longest


def _without_keys(queries: Bounds, keys: Bounds) -> Tensor:
    """Which queries have no key in the block; bool [Tq]."""
    missing = keys.device.diff() == 0
    return torch.repeat_interleave(missing, queries.device.diff(), output_size=queries.host[-1])
