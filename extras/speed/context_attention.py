"""Context parallelism: attention of sequences that several ranks share, each with the queries of its own tokens.

Two ways to get keys and values to the queries, with the same result:
- `p2p`, a ring: each rank's block is sent from neighbour to neighbour, and the next block is received while a rank
  computes on the last. At most two blocks are in memory. In the backward pass a block's gradients travel with it.
- `all_gather`: every rank gets all blocks at once: one collective a pass, with cp blocks in memory.

Neither keeps another rank's keys from the forward to the backward pass: they are communicated again.

A decoder's attention is causal, with the layout `dual_chunk`: of another rank's block, the queries of both chunks
attend to the first chunk, or those of the second chunk to both. Either is half of the block, without a mask inside it:
all ranks have as much work in every turn of the ring. Only a rank's own block has a mask.

With sets of sequences (extras.families.sets) attention is block-causal: of each rank's block, too.

In a compiled layer all of it is one operator, which takes tensors in place of a `CpLayout`: the layer is one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.compat import resolve_process_group
from common.models.layers import cpu
from common.models.layers.attention import rotate
from common.models.layers.compiling import OPERATORS
from extras.speed.block_attention import (
    AttendedBlock,
    Bounds,
    attend_all,
    block_causal,
    gradients_of_all,
    placed,
    runs,
)
from extras.speed.context_parallel import ContextGroup, SendReceive

OPERATORS.append(sys.modules[__name__])

# By their newer names, where torch (2.13) has them: it warns of the older ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CpLayout:
    """Index tables of a shared pack, for all layers: this rank's real tokens and where each rank's keys lie.

    own [R]: the indices of this rank's real tokens; parts: for each rank, the bounds of its part of each sequence in
    its block; rows: how many rows a block is sent with, the same on all ranks. Built once a batch: what the host
    counts and copies to the device is not repeated in each layer.
    """

    def __init__(
        self,
        real: Tensor,
        bounds: Tensor,
        device: torch.device,
        context: ContextGroup,
        sets: Tensor | None = None,
    ):
        """real, bounds: of the `CpPack`; sets: boundaries of sets in sequences, int64 [S + 1] on the host, None if
        each sequence is alone."""
        self.real, self.bounds, self.context = real, bounds, context
        self.sets = torch.arange(bounds.shape[1]) if sets is None else sets
        self.names = context.group.group_name, context.comm_type
        self._device = device
        self._ends = F.pad(real.cumsum(1), (1, 0))  # [cp, B + 1]
        self.parts = Bounds.make(self._ends, self._device)
        self.own = self._indices(bounds[context.rank, :-1], real[context.rank])
        self.rows = max(1, int(self._ends[:, -1].max()))

    def attention(self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int = 0) -> Tensor:
        """Rotary self-attention of this rank's tokens to the tokens of their sequences: to all, or if causal up to
        itself.

        kv_heads 0: an encoder's qkv [T, H, 3, D] (query, key, value of each head, not yet rotated). Else a decoder's,
        causal: qkv [T, H + 2 K, D] with K = kv_heads, the layout `dual_chunk`. cos and sin [T, D/2] by position in the
        whole sequence. Returns [T, H * D]; 0 where a token is padding, which gets no attention and no gradient.
        """
        if torch.compiler.is_compiling():
            return operator(qkv, cos, sin, self.real, self.bounds, self.sets, *self.names, kv_heads)[0]
        with torch.autocast(qkv.device.type, enabled=False):
            out = _ContextAttention.apply(*_rotated(qkv, cos, sin, self, kv_heads), self, kv_heads > 0)
        return scatter(out, self, len(qkv)).flatten(1)

    def without_padding(self, x: Tensor) -> Tensor:
        """x [T, ...] of this rank's tokens, 0 where a token is padding."""
        return scatter(x[self.own], self, len(x))

    def matches(self, real: Tensor, bounds: Tensor, sets: Tensor, device: torch.device) -> bool:
        pairs = (self.real, real), (self.bounds, bounds), (self.sets, sets)
        return self._device == device and all(torch.equal(*pair) for pair in pairs)

    def _indices(self, begins: Tensor, counts: Tensor) -> Tensor:
        return runs(begins, counts).to(self._device, non_blocking=True)

    @property
    def queries(self) -> Bounds:
        return self.parts[self.context.rank]

    @cached_property
    def all_parts(self) -> Bounds:
        """The bounds of the sequences in all ranks' parts together."""
        return Bounds.make(self._ends.sum(0)[None], self._device)[0]

    @cached_property
    def gathered_rows(self) -> Tensor:
        """The rows of all blocks end to end, sequence by sequence and in a sequence rank by rank; int64 [L]."""
        begins = self._ends[:, :-1] + self.rows * torch.arange(len(self._ends))[:, None]
        return self._indices(begins.t().flatten(), self.real.t().flatten())

    def attended_blocks(self, rank: int, causal: bool) -> list[AttendedBlock]:
        """What this rank's queries attend to of a rank's block."""
        return [self._attended_causally[rank]] if causal else self._attended[rank]

    @cached_property
    def _attended(self) -> list[list[AttendedBlock]]:
        return [block_causal(self.sets, self.queries, part) for part in self.parts]

    @cached_property
    def attended_of_all(self) -> list[AttendedBlock]:
        """What this rank's queries attend to of all ranks' keys together, if not causal."""
        return block_causal(self.sets, self.queries, self.all_parts)

    @cached_property
    def _attended_causally(self) -> list[AttendedBlock]:
        """What this rank's queries attend to of each rank's block, in the layout `dual_chunk`: a rank has one chunk of
        the first half of each sequence, and one of the second."""
        own, size = self.context.rank, self.context.size
        chunks = self.bounds.diff() // 2  # padding included, the same on all ranks
        first = (self.real.sum(0) - torch.arange(size)[:, None] * chunks).clamp(min=0).minimum(chunks)  # [cp, B]
        second = self.real[own] - first[own]
        ends = F.pad(torch.cat((first, second[None])).cumsum(1), (1, 0))
        *first_chunks, second_chunks = Bounds.make(ends, self._device)
        rows = self._indices(self._ends[own, :-1] + first[own], second)
        attended = []
        for rank in range(size):
            if rank < own:
                columns = self._indices(self._ends[rank, :-1], first[rank])
                attended.append(AttendedBlock(self.queries, first_chunks[rank], columns=columns))
            elif rank > own:
                attended.append(AttendedBlock(second_chunks, self.parts[rank], rows=rows))
            else:
                attended.append(AttendedBlock(self.queries, self.queries, causal=True))
        return attended

    def block(self, kv: Tensor) -> Tensor:
        """[R, ...] padded to `rows`."""
        return placed(kv, None, self.rows)

    def part(self, block: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a rank's block [rows, 2, H, D], without the padding."""
        keys, values = block[: self.parts[rank].host[-1]].unbind(1)
        return keys, values


_latest: list[CpLayout] = []  # at most two: layers have the same, or those that read sets another than the rest


def layout_of(
    real: Tensor, bounds: Tensor, sets: Tensor, device: torch.device, group: str, comm_type: str
) -> CpLayout:
    """The `CpLayout` of a pack, an earlier call's if it matches. group: a process group's name."""
    for layout in _latest:
        if layout.names == (group, comm_type) and layout.matches(real, bounds, sets, device):
            return layout
    context = ContextGroup(resolve_process_group(group), comm_type)
    _latest[:] = [CpLayout(real, bounds, device, context, sets), *_latest[:1]]
    return _latest[0]


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, layout: CpLayout, kv_heads: int) -> tuple[Tensor, Tensor]:
    """(q [R, H, D], kv [R, 2, K, D]) of this rank's real tokens, rotated; an encoder has K = H."""
    own = layout.own
    q, k, v = cpu.split_heads(qkv[own], kv_heads)
    q, k = (rotate(x, cos[own], sin[own]) for x in (q, k))
    return q, torch.stack((k, v), 1)


def scatter(x: Tensor, layout: CpLayout, tokens: int) -> Tensor:
    """[R, ...] of the real tokens -> [T, ...], 0 where a token is padding."""
    return placed(x, layout.own, tokens)


class _ContextAttention(torch.autograd.Function):
    """q [R, H, D], kv [R, 2, K, D] (rotated) -> [R, H, D]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, layout: CpLayout, causal: bool) -> Tensor:
        out, lse = COMM_TYPES[layout.context.comm_type].forward(q, kv, layout, causal)
        ctx.layout, ctx.causal = layout, causal
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        layout, causal = ctx.layout, ctx.causal
        return *COMM_TYPES[layout.context.comm_type].backward(grad, *ctx.saved_tensors, layout, causal), None, None


def attend_blocks(
    q: Tensor, blocks: Iterable[tuple[int, Tensor]], layout: CpLayout, causal: bool
) -> tuple[Tensor, Tensor]:
    """out [R, H, D] in q's dtype, lse [R, H]. blocks: (rank, its block), this rank's own first."""
    parts = (
        (*layout.part(block, rank), attended)
        for rank, block in blocks
        for attended in layout.attended_blocks(rank, causal)
    )
    return attend_all(q, parts)


def gradients_of_block(
    saved: tuple[Tensor, Tensor, Tensor, Tensor], rank: int, block: Tensor, layout: CpLayout, causal: bool
) -> tuple[Tensor, Tensor]:
    """fp32: a block's part of the gradient of q [R, H, D], and that of the block. saved: grad, q, out and lse."""
    dq, dk, dv = gradients_of_all(saved, *layout.part(block, rank), layout.attended_blocks(rank, causal))
    return dq, placed(torch.stack((dk, dv), 1), None, layout.rows)


def _ring_forward(q: Tensor, kv: Tensor, layout: CpLayout, causal: bool) -> tuple[Tensor, Tensor]:
    return attend_blocks(q, ring_blocks(layout.block(kv), layout), layout, causal)


def _ring_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, layout: CpLayout, causal: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of q and kv. A block's gradients travel with it, from rank to rank that computes on it."""
    saved = grad, q, out, lse
    blocks = ring_blocks(layout.block(kv), layout)
    grads_q, grads_kv = gradients_of_block(saved, *next(blocks), layout, causal)
    received = SendReceive(grads_kv, layout.context)
    for rank, block in blocks:
        dq, grads_kv = gradients_of_block(saved, rank, block, layout, causal)
        grads_q = grads_q + dq
        grads_kv += received.wait()
        received = SendReceive(grads_kv, layout.context)
    return grads_q.to(q.dtype), received.wait()[: len(kv)].to(kv.dtype)


def _gathered_forward(q: Tensor, kv: Tensor, layout: CpLayout, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [R, H, D], lse [R, H]) from all keys and values at once; if causal block by block."""
    gathered = _gather(kv, layout)
    if causal:
        return attend_blocks(q, _own_first(gathered, layout), layout, causal)
    keys, values = _all_keys(gathered, layout)
    return attend_all(q, ((keys, values, attended) for attended in layout.attended_of_all))


def _gathered_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, layout: CpLayout, causal: bool
) -> tuple[Tensor, Tensor]:
    gathered = _gather(kv, layout)
    by_rank = torch.zeros_like(gathered, dtype=torch.promote_types(kv.dtype, torch.float32))
    if causal:
        grads_q = torch.zeros_like(q, dtype=by_rank.dtype)
        for rank, block in _own_first(gathered, layout):
            dq, by_rank[rank] = gradients_of_block((grad, q, out, lse), rank, block, layout, causal)
            grads_q += dq
    else:
        saved = grad, q, out, lse
        grads_q, dk, dv = gradients_of_all(saved, *_all_keys(gathered, layout), layout.attended_of_all)
        by_rank.flatten(0, 1).index_copy_(0, layout.gathered_rows, torch.stack((dk, dv), 1))
    own = torch.empty_like(by_rank[0])
    reduce_scatter(own, by_rank.flatten(0, 1), group=layout.context.group)
    return grads_q.to(q.dtype), own[: len(kv)].to(kv.dtype)


@dataclass(frozen=True)
class _CommType:
    forward: Callable[[Tensor, Tensor, CpLayout, bool], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor]]


COMM_TYPES = {
    "p2p": _CommType(_ring_forward, _ring_backward),
    "all_gather": _CommType(_gathered_forward, _gathered_backward),
}

# ---- in a compiled graph: one operator, which derives the layout from tensors -----


@torch.library.custom_op("esm2::context_attention", mutates_args=())
def operator(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    real: Tensor,
    bounds: Tensor,
    sets: Tensor,
    group: str,
    comm_type: str,
    kv_heads: int,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's tokens to their whole sequences: out [T, H * D] and, for the backward pass, lse [T, H].
    Both are 0 where a token is padding."""
    layout = layout_of(real, bounds, sets, qkv.device, group, comm_type)
    with torch.autocast(qkv.device.type, enabled=False):
        out, lse = COMM_TYPES[comm_type].forward(*_rotated(qkv, cos, sin, layout, kv_heads), layout, kv_heads > 0)
    return scatter(out, layout, len(qkv)).flatten(1), scatter(lse, layout, len(qkv))


@operator.register_fake
def _(qkv, cos, sin, real, bounds, sets, group, comm_type, kv_heads) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = qkv.shape[0], qkv.shape[1] - 2 * kv_heads, qkv.shape[-1]
    lse = qkv.new_empty(tokens, heads, dtype=torch.promote_types(qkv.dtype, torch.float32))
    return qkv.new_empty(tokens, heads * dim), lse


@torch.library.custom_op("esm2::context_attention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    real: Tensor,
    bounds: Tensor,
    sets: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    comm_type: str,
    kv_heads: int,
) -> Tensor:
    layout = layout_of(real, bounds, sets, qkv.device, group, comm_type)
    own = layout.own
    with torch.autocast(qkv.device.type, enabled=False):
        grad, out = (x.view(len(qkv), lse.shape[1], -1)[own] for x in (grad, out))
        inputs = grad, *_rotated(qkv, cos, sin, layout, kv_heads), out, lse[own]
        dq, dkv = COMM_TYPES[comm_type].backward(*inputs, layout, kv_heads > 0)
        dk, dv = dkv.unbind(1)
        dq, dk = (rotate(x, cos[own], -sin[own]) for x in (dq, dk))
        together = torch.cat((dq, dk, dv), 1) if kv_heads else torch.stack((dq, dk, dv), 2)
        return scatter(together, layout, len(qkv))


@_backward_operator.register_fake
def _(grad, qkv, cos, sin, real, bounds, sets, out, lse, group, comm_type, kv_heads) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.group, ctx.comm_type, ctx.kv_heads = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad: Tensor, *_):
    grads = _backward_operator(grad.contiguous(), *ctx.saved_tensors, ctx.group, ctx.comm_type, ctx.kv_heads)
    return grads, *(None,) * 8


operator.register_autograd(_differentiate, setup_context=_save)

# ---- communication -------------------------------------------------------------------------------------------------


def _gather(kv: Tensor, layout: CpLayout) -> Tensor:
    """The blocks of all ranks [cp, rows, 2, K, D]."""
    block = layout.block(kv)
    gathered = block.new_empty(layout.context.size * layout.rows, *kv.shape[1:])
    all_gather(gathered, block, group=layout.context.group)
    return gathered.unflatten(0, (layout.context.size, layout.rows))


def _all_keys(gathered: Tensor, layout: CpLayout) -> tuple[Tensor, Tensor]:
    """Keys and values of gathered blocks, sequence by sequence; [L, K, D] each."""
    keys, values = gathered.flatten(0, 1)[layout.gathered_rows].unbind(1)
    return keys, values


def _own_first(gathered: Tensor, layout: CpLayout) -> Iterator[tuple[int, Tensor]]:
    """(rank, its block) for every rank, this one's own first, from gathered blocks."""
    ranks = ((layout.context.rank - turn) % layout.context.size for turn in range(layout.context.size))
    return ((rank, gathered[rank]) for rank in ranks)


def ring_blocks(block: Tensor, layout: CpLayout) -> Iterator[tuple[int, Tensor]]:
    """(rank, its block) for every rank, this one's own first; the next block is received meanwhile."""
    context = layout.context
    for turn in range(context.size):
        received = SendReceive(block, context) if turn < context.size - 1 else None
        yield (context.rank - turn) % context.size, block
        if received is not None:
            block = received.wait()
