"""Attention of packed sequences whose keys lie in several blocks, one a rank (extras.speed.context_attention).

A block gives its own result with its lse (log-sum-exp of the scores), `merge_blocks` combines two results, and the
backward pass of a block takes the output and lse over all blocks. Sums are fp32 (float64 for float64).

Block-causal attention over sets of sequences (extras.families.sets) has its keys in blocks, too, by halving: each
sequence itself, then of every 2 w sequences of a set the second w attend to the first w, for w = 1, 2, 4, ...: for n
sequences 1 + ceil(log2(n)) calls, of exactly the pairs that are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from common.compat import cuda_flash_backward, cuda_flash_forward
from common.models.layers import cpu
from common.models.layers.attention import has_varlen_kernel


@dataclass(frozen=True)
class Bounds:
    """cu_seqlens of a block of queries or keys, as a list and on the device (int32 [B + 1])."""

    host: list[int]
    device: Tensor

    @classmethod
    def make(cls, rows: Tensor, device: torch.device | str) -> list[Bounds]:
        """One for each row of a tensor on the host, copied to the device together."""
        moved = rows.to(torch.int32).to(device, non_blocking=True)
        return [cls(row.tolist(), on_device) for row, on_device in zip(rows, moved, strict=True)]

    @property
    def longest(self) -> int:
        return max((b - a for a, b in zip(self.host, self.host[1:], strict=False)), default=0)


@dataclass(frozen=True)
class AttendedBlock:
    """What of a block of keys this rank's queries attend to, and which of them: rows and columns are indices of
    queries and keys, None for all. causal: of `attend_block`."""

    queries: Bounds
    keys: Bounds
    rows: Tensor | None = None
    columns: Tensor | None = None
    causal: bool = False


def block_causal(sets: Tensor, queries: Bounds, keys: Bounds) -> list[AttendedBlock]:
    """What the queries of sequences attend to: the keys of their own sequence, and of those before it in their set.

    sets: boundaries of the sets in sequences, int64 [S + 1] on the host; queries, keys: of the same sequences, a part
    of each perhaps. The first block has all queries.
    """
    (query_ends, key_ends), device = (torch.tensor(x.host) for x in (queries, keys)), queries.device.device
    blocks, width, bounds = [AttendedBlock(queries, keys)], 1, sets.tolist()
    while halves := [
        (first, first + width, min(first + 2 * width, end))
        for begin, end in pairwise(bounds)
        for first in range(begin, end - width, 2 * width)
    ]:
        first, middle, end = torch.tensor(halves).t()
        begins = torch.stack((query_ends[middle], key_ends[first]))
        counts = torch.stack((query_ends[end], key_ends[middle])) - begins
        both = (counts > 0).all(0)  # batches are filled up with empty sequences
        begins, counts = begins[:, both], counts[:, both]
        if counts.numel():
            rows, columns = (runs(*x).to(device, non_blocking=True) for x in zip(begins, counts, strict=True))
            of_queries, of_keys = Bounds.make(F.pad(counts.cumsum(1), (1, 0)), device)
            blocks.append(AttendedBlock(of_queries, of_keys, rows, columns))
        width *= 2
    return blocks


def runs(begins: Tensor, counts: Tensor) -> Tensor:
    """Runs of consecutive indices, end to end: run n has counts[n] of them, the first of which is begins[n]."""
    shift = torch.repeat_interleave(begins - (counts.cumsum(0) - counts), counts)
    return torch.arange(len(shift)) + shift


def attend_all(q: Tensor, parts: Iterable[tuple[Tensor, Tensor, AttendedBlock]]) -> tuple[Tensor, Tensor]:
    """out [T, H, D] in q's dtype, lse [T, H]. parts: (keys, values, what is attended to of them); in the first every
    query has a key."""
    results = (
        (
            *attend_block(
                taken(q, of.rows), taken(k, of.columns), taken(v, of.columns), of.queries, of.keys, of.causal
            ),
            of,
        )
        for k, v, of in parts
    )
    out, lse, _ = next(results)
    for other, other_lse, of in results:
        merged = merge_blocks(taken(out, of.rows), taken(lse, of.rows), other, other_lse)
        if of.rows is None:
            out, lse = merged
        else:
            out, lse = (x.index_copy_(0, of.rows, y) for x, y in zip((out, lse), merged, strict=True))
    return out.to(q.dtype), lse


def gradients_of_all(
    saved: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor, blocks: Iterable[AttendedBlock]
) -> tuple[Tensor, ...]:
    """fp32: what these blocks, all of the same keys, add to the gradient of q [T, H, D], and the gradients of k and v.
    saved: grad, q, out and lse, the last two over all keys."""
    totals: tuple[Tensor, ...] = ()
    for of in blocks:
        grad, q, out, lse = (taken(x, of.rows) for x in saved)
        keys, values = taken(k, of.columns), taken(v, of.columns)
        parts = block_gradients(grad, q, keys, values, out, lse, of.queries, of.keys, of.causal)
        indices = of.rows, of.columns, of.columns
        if totals:
            totals = tuple(map(_add, totals, parts, indices))
        else:
            totals = tuple(map(placed, parts, indices, (len(saved[1]), len(k), len(v))))
    return totals


def _add(total: Tensor, part: Tensor, index: Tensor | None) -> Tensor:
    return total.add_(part) if index is None else total.index_add_(0, index, part)


def placed(x: Tensor, index: Tensor | None, rows: int) -> Tensor:
    """[R, ...] -> [rows, ...]: x at the rows of an index, None for the first ones, and 0 elsewhere."""
    if index is not None:
        return x.new_zeros(rows, *x.shape[1:]).index_copy(0, index, x)
    return x if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


def taken(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


def attend_block(
    q: Tensor, k: Tensor, v: Tensor, queries: Bounds, keys: Bounds, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """q [Tq, H, D], k and v [Tk, K, D] -> out [Tq, H, D], lse [Tq, H] fp32; 0 and -inf where there are no keys.

    Grouped-query attention if K < H. causal: of each sequence, query n attends to the first n + 1 keys; its queries
    and keys are of the same tokens.
    """
    if _has_kernel(q, k):
        flash, sequences = cuda_flash_forward, _sequence_bounds(queries, keys)
        out, lse, *_ = flash(q, k, v, *sequences, 0.0, causal, False, scale=q.shape[-1] ** -0.5)
        keyless = _without_keys(queries, keys)
        return out.float().masked_fill(keyless[:, None, None], 0), lse.t().masked_fill(keyless[:, None], -math.inf)
    kind = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(q.shape, dtype=kind), q.new_full(q.shape[:2], -math.inf, dtype=kind)
    for rows, columns in _pairs(queries, keys):
        out[rows], lse[rows] = _attend_one(*(x.to(kind) for x in (q[rows], k[columns], v[columns])), causal=causal)
    return out, lse


def merge_blocks(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the results over two blocks of keys. Every query has a key in the first."""
    total = torch.logaddexp(lse, other_lse)
    out = out * (lse - total).exp()[..., None]
    return out.addcmul_(other, (other_lse - total).exp()[..., None]), total


def block_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Bounds,
    keys: Bounds,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32: the block's part of the gradient of q, and those of k and v. out, lse: over all blocks; causal: as for
    `attend_block`."""
    if _has_kernel(q, k):
        flash, sequences = cuda_flash_backward, _sequence_bounds(queries, keys)
        by = (grad.to(q.dtype), q, k, v, out.to(q.dtype), lse.t().contiguous())
        # The random state of dropout, unused: as torch.nn.attention.varlen passes it.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = flash(*by, *sequences, 0.0, causal, *state, scale=q.shape[-1] ** -0.5)
        keyless = _without_keys(queries, keys)
        return dq.float().masked_fill(keyless[:, None, None], 0), dk.float(), dv.float()
    kind = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=kind) for x in (q, k, v))
    for rows, columns in _pairs(queries, keys):
        inputs = (grad[rows], q[rows], k[columns], v[columns], out[rows], lse[rows])
        dq[rows], dk[columns], dv[columns] = _one_gradients(*(x.to(kind) for x in inputs), causal=causal)
    return dq, dk, dv


def _attend_one(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One sequence: [Tq, H, D], [Tk, K, D] twice -> [Tq, H, D], lse [Tq, H]."""
    return (cpu.flash if q.device.type == "cpu" else attend_by_matmuls)(q, k, v, causal)


def _one_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    return (cpu.flash_backward if q.device.type == "cpu" else gradients_by_matmuls)(grad, q, k, v, out, lse, causal)


QUERIES_AT_A_TIME = 1024  # their scores are in memory: linear in the number of keys


def attend_by_matmuls(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k, v [S, K, D] -> out [T, H, D], lse [T, H], where no kernel takes the dtype (fp32 on a GPU)."""
    if len(q) > QUERIES_AT_A_TIME and not causal:
        parts = [attend_by_matmuls(x, k, v) for x in q.split(QUERIES_AT_A_TIME)]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return out, lse
    scores, (_, _, v) = _scores(q, k, v, causal)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v).transpose(0, 1), lse.t()


def gradients_by_matmuls(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, of the shapes in `attend_by_matmuls`."""
    if len(q) > QUERIES_AT_A_TIME and not causal:
        pieces = zip(*(x.split(QUERIES_AT_A_TIME) for x in (grad, q, out, lse)), strict=True)
        parts = [gradients_by_matmuls(g, x, k, v, o, of_x) for g, x, o, of_x in pieces]
        dq, dk, dv = zip(*parts, strict=True)
        return torch.cat(dq), sum(dk[1:], dk[0]), sum(dv[1:], dv[0])
    kv_heads = k.shape[1]
    scores, (q, k, v) = _scores(q, k, v, causal)
    grad, out = (x.transpose(0, 1) for x in (grad, out))
    weights = (scores - lse.t()[..., None]).exp()
    grad_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = (x.unflatten(0, (kv_heads, -1)).sum(1) for x in (grad_scores.mT @ q, weights.mT @ grad))
    return tuple(x.transpose(0, 1) for x in (grad_scores @ k, dk, dv))


def _scores(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Scores [H, Tq, Tk], and q, k, v with H heads, head by head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores, (q, k, v)


def _has_kernel(q: Tensor, k: Tensor) -> bool:
    """Not for empty tensors: CUDA launches no kernel without threads ("invalid argument")."""
    return has_varlen_kernel(q) and len(q) > 0 and len(k) > 0


def _pairs(queries: Bounds, keys: Bounds) -> list[tuple[slice, slice]]:
    """(rows, columns) of each sequence that has both."""
    ends = zip(queries.host, queries.host[1:], keys.host, keys.host[1:], strict=False)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends if b > a and d > c]


def _sequence_bounds(queries: Bounds, keys: Bounds) -> tuple[Tensor, Tensor, int, int]:
    return queries.device, keys.device, queries.longest, keys.longest


def _without_keys(queries: Bounds, keys: Bounds) -> Tensor:
    """Which queries have no key in the block; bool [Tq]."""
    missing = keys.device.diff() == 0
    return torch.repeat_interleave(missing, queries.device.diff(), output_size=queries.host[-1])
