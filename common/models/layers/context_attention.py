"""Context parallelism: attention of sequences that several ranks share, each with the queries of its own tokens.

Two ways to get keys and values to the queries, with the same result:
- `p2p`, a ring: each rank's block is sent from neighbour to neighbour, and the next block is received while a rank
  computes on the last. At most two blocks are in memory. In the backward pass a block's gradients travel with it.
- `all_gather`: every rank gets all blocks at once: one collective a pass, with cp blocks in memory.

Neither keeps another rank's keys from the forward to the backward pass: they are communicated again.

In a compiled layer all of it is one operator, which takes tensors in place of a `CpLayout`: the layer is one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.compat import resolve_process_group
from common.distributed.context_parallel import CpPack
from common.models.layers import attention
from common.models.layers.attention import Bounds, rotate
from common.models.layers.residual import Model

# By their newer names, where torch (2.13) has them: it warns of the older ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a pack. way: `p2p`, `all_gather`, or Transformer Engine's `a2a`."""

    group: dist.ProcessGroup
    way: str = "p2p"

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def enable_context_parallel(model: Model, group: dist.ProcessGroup, way: str) -> None:
    """Have a model (`Esm2ForMaskedLM`) take packs that the ranks of a group share. way: of `ContextGroup`."""
    encoder: Any = model.get_submodule("encoder")
    encoder.context = ContextGroup(group, way)
    for layer in model.layers:
        if hasattr(layer, "set_context_parallel_group"):  # Transformer Engine's own
            ranks = dist.get_process_group_ranks(group)
            layer.set_context_parallel_group(group, ranks, torch.cuda.Stream(), way)


class CpLayout:
    """Index tables of a shared pack, for all layers: this rank's real tokens and where each rank's keys lie.

    own [R]: the indices of this rank's real tokens; parts: for each rank, the bounds of its part of each sequence in
    its block; rows: how many rows a block is sent with, the same on all ranks. Built once a batch: what the host
    counts and copies to the device is not repeated in each layer.
    """

    def __init__(self, real: Tensor, bounds: Tensor, device: torch.device, context: ContextGroup):
        """real, bounds: of the `CpPack`."""
        self.real, self.bounds, self.context = real, bounds, context
        self.names = context.group.group_name, context.way
        self._device = device
        self._ends = F.pad(real.cumsum(1), (1, 0))  # [cp, B + 1]
        self.parts = Bounds.make(self._ends, self._device)
        begins = bounds[context.rank, :-1] - self._ends[context.rank, :-1]
        self.own = self._indices(begins, real[context.rank])
        self.rows = max(1, int(self._ends[:, -1].max()))

    def matches(self, real: Tensor, bounds: Tensor, device: torch.device) -> bool:
        return self._device == device and torch.equal(self.real, real) and torch.equal(self.bounds, bounds)

    def _indices(self, shifts: Tensor, counts: Tensor) -> Tensor:
        """Runs of consecutive indices, end to end: run n has counts[n] of them, each shifts[n] beyond its place."""
        shift = torch.repeat_interleave(shifts, counts)
        return (torch.arange(len(shift)) + shift).to(self._device, non_blocking=True)

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
        counts = self._ends.diff().t().flatten()
        return self._indices(begins.t().flatten() - (counts.cumsum(0) - counts), counts)

    def block(self, kv: Tensor) -> Tensor:
        """[R, ...] padded to `rows`."""
        if len(kv) == self.rows:
            return kv
        return torch.cat((kv, kv.new_zeros(self.rows - len(kv), *kv.shape[1:])))

    def part(self, block: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a rank's block [rows, 2, H, D], without the padding."""
        keys, values = block[: self.parts[rank].host[-1]].unbind(1)
        return keys, values


_latest: list[CpLayout] = []  # at most one: it is the same for all layers


def layout_of(real: Tensor, bounds: Tensor, device: torch.device, group: str, way: str) -> CpLayout:
    """The `CpLayout` of a pack, the last call's if it matches. group: a process group's name."""
    if not _latest or _latest[0].names != (group, way) or not _latest[0].matches(real, bounds, device):
        _latest[:] = [CpLayout(real, bounds, device, ContextGroup(resolve_process_group(group), way))]
    return _latest[0]


def whole_sequences(shared: CpPack, tokens: int) -> Tensor:
    """Boundaries of the shared sequences as Transformer Engine takes them, without and with padding: int64 [2, B + 2]
    on the host. tokens: of each rank, with fillers, which are one more sequence."""
    fillers = (tokens - shared.bounds[:, -1]).sum()
    real, padded = (torch.cat((x.sum(0), fillers[None])) for x in (shared.real, shared.bounds.diff()))
    return F.pad(torch.stack((real, padded)).cumsum(1), (1, 0))


def context_attention(qkv: Tensor, cos: Tensor, sin: Tensor, layout: CpLayout) -> Tensor:
    """Rotary self-attention of this rank's tokens to all tokens of their sequences.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2] by position in the whole
    sequence. Returns [T, H * D]; 0 where a token is padding, which gets no attention and no gradient.
    """
    if torch.compiler.is_compiling():
        return _operator(qkv, cos, sin, layout.real, layout.bounds, *layout.names)[0]
    with torch.autocast(qkv.device.type, enabled=False):
        out = _ContextAttention.apply(*_rotated(qkv, cos, sin, layout), layout)
    return _scatter(out, layout, len(qkv)).flatten(1)


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, layout: CpLayout) -> tuple[Tensor, Tensor]:
    """Of this rank's real tokens: q [R, H, D], kv [R, 2, H, D]."""
    own = layout.own
    q, k, v = qkv[own].unbind(2)
    q, k = (rotate(x, cos[own], sin[own]) for x in (q, k))
    return q, torch.stack((k, v), 1)


def _scatter(x: Tensor, layout: CpLayout, tokens: int) -> Tensor:
    """[R, ...] of the real tokens -> [T, ...], 0 where a token is padding."""
    return x.new_zeros(tokens, *x.shape[1:]).index_copy(0, layout.own, x)


class _ContextAttention(torch.autograd.Function):
    """q [R, H, D], kv [R, 2, H, D] (rotated) -> [R, H, D]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, layout: CpLayout) -> Tensor:
        out, lse = WAYS[layout.context.way].forward(q, kv, layout)
        ctx.layout = layout
        ctx.save_for_backward(q, kv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        return *WAYS[ctx.layout.context.way].backward(grad, *ctx.saved_tensors, ctx.layout), None


def _ring_forward(q: Tensor, kv: Tensor, layout: CpLayout) -> tuple[Tensor, Tensor]:
    """out [R, H, D] in q's dtype, lse [R, H]."""
    parts = (
        attention.attend_block(q, *layout.part(block, rank), layout.queries, layout.parts[rank])
        for rank, block in ring_blocks(layout.block(kv), layout)
    )
    out, lse = next(parts)
    for part in parts:
        out, lse = attention.merge_blocks(out, lse, *part)
    return out.to(q.dtype), lse


def _ring_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, layout: CpLayout
) -> tuple[Tensor, Tensor]:
    """The gradients of q and kv. A block's gradients travel with it, from rank to rank that computes on it."""

    def gradients(rank: int, block: Tensor) -> tuple[Tensor, Tensor]:
        bounds = layout.queries, layout.parts[rank]
        dq, dk, dv = attention.block_gradients(grad, q, *layout.part(block, rank), out, lse, *bounds)
        return dq, layout.block(torch.stack((dk, dv), 1))

    blocks = ring_blocks(layout.block(kv), layout)
    grads_q, grads_kv = gradients(*next(blocks))
    received = _SendReceive(grads_kv, layout.context)
    for rank, block in blocks:
        dq, grads_kv = gradients(rank, block)
        grads_q = grads_q + dq
        grads_kv += received.wait()
        received = _SendReceive(grads_kv, layout.context)
    return grads_q.to(q.dtype), received.wait()[: len(kv)].to(kv.dtype)


def _gathered_forward(q: Tensor, kv: Tensor, layout: CpLayout) -> tuple[Tensor, Tensor]:
    """As `_ring_forward`, from all keys and values at once."""
    out, lse = attention.attend_block(q, *_all_keys(kv, layout), layout.queries, layout.all_parts)
    return out.to(q.dtype), lse


def _gathered_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, layout: CpLayout
) -> tuple[Tensor, Tensor]:
    bounds = layout.queries, layout.all_parts
    dq, dk, dv = attention.block_gradients(grad, q, *_all_keys(kv, layout), out, lse, *bounds)
    grads = torch.stack((dk, dv), 1)
    by_rank = grads.new_zeros(layout.context.size * layout.rows, *kv.shape[1:])
    by_rank.index_copy_(0, layout.gathered_rows, grads)
    own = torch.empty_like(by_rank[: layout.rows])
    reduce_scatter(own, by_rank, group=layout.context.group)
    return dq.to(q.dtype), own[: len(kv)].to(kv.dtype)


@dataclass(frozen=True)
class _Way:
    forward: Callable[[Tensor, Tensor, CpLayout], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor]]


WAYS = {"p2p": _Way(_ring_forward, _ring_backward), "all_gather": _Way(_gathered_forward, _gathered_backward)}

# ---- in a compiled graph: one operator, which derives the layout from tensors -----


@torch.library.custom_op("esm2::context_attention", mutates_args=())
def _operator(
    qkv: Tensor, cos: Tensor, sin: Tensor, real: Tensor, bounds: Tensor, group: str, way: str
) -> tuple[Tensor, Tensor]:
    """As `context_attention`; also, for the backward pass, the lse [T, H] of the real tokens."""
    layout = layout_of(real, bounds, qkv.device, group, way)
    with torch.autocast(qkv.device.type, enabled=False):
        out, lse = WAYS[way].forward(*_rotated(qkv, cos, sin, layout), layout)
    return _scatter(out, layout, len(qkv)).flatten(1), _scatter(lse, layout, len(qkv))


@_operator.register_fake
def _(qkv, cos, sin, real, bounds, group, way) -> tuple[Tensor, Tensor]:
    tokens, heads, _, dim = qkv.shape
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
    out: Tensor,
    lse: Tensor,
    group: str,
    way: str,
) -> Tensor:
    layout = layout_of(real, bounds, qkv.device, group, way)
    own = layout.own
    with torch.autocast(qkv.device.type, enabled=False):
        grad, out = (x.view(len(qkv), qkv.shape[1], -1)[own] for x in (grad, out))
        dq, dkv = WAYS[way].backward(grad, *_rotated(qkv, cos, sin, layout), out, lse[own], layout)
        dk, dv = dkv.unbind(1)
        dq, dk = (rotate(x, cos[own], -sin[own]) for x in (dq, dk))
        return _scatter(torch.stack((dq, dk, dv), 2), layout, len(qkv))


@_backward_operator.register_fake
def _(grad, qkv, cos, sin, real, bounds, out, lse, group, way) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.group, ctx.way = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad: Tensor, *_):
    grads = _backward_operator(grad.contiguous(), *ctx.saved_tensors, ctx.group, ctx.way)
    return grads, None, None, None, None, None, None


_operator.register_autograd(_differentiate, setup_context=_save)

# ---- communication -------------------------------------------------------------------------------------------------


def _all_keys(kv: Tensor, layout: CpLayout) -> tuple[Tensor, Tensor]:
    """All-gather keys and values, sequence by sequence; [L, H, D] each."""
    block = layout.block(kv)
    gathered = block.new_empty(layout.context.size * layout.rows, *kv.shape[1:])
    all_gather(gathered, block, group=layout.context.group)
    keys, values = gathered[layout.gathered_rows].unbind(1)
    return keys, values


def ring_blocks(block: Tensor, layout: CpLayout) -> Iterator[tuple[int, Tensor]]:
    """(rank, its block) for every rank, this one's own first; the next block is received meanwhile."""
    context = layout.context
    for turn in range(context.size):
        received = _SendReceive(block, context) if turn < context.size - 1 else None
        yield (context.rank - turn) % context.size, block
        if received is not None:
            block = received.wait()


class _SendReceive:
    """Sends a tensor to the next rank of the ring and receives the previous rank's."""

    def __init__(self, tensor: Tensor, context: ContextGroup):
        self.sent, self.received = tensor, torch.empty_like(tensor)
        group, rank, size = context.group, context.rank, context.size
        to, source = (dist.get_global_rank(group, n % size) for n in (rank + 1, rank - 1))
        operations = [dist.P2POp(dist.isend, tensor, to, group), dist.P2POp(dist.irecv, self.received, source, group)]
        self.works = dist.batch_isend_irecv(operations)

    def wait(self) -> Tensor:
        """The previous rank's tensor."""
        for work in self.works:
            work.wait()
        return self.received
