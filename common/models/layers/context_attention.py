"""Self-attention of sequences that several ranks share: each has the queries of its own tokens, and needs all keys.

Two ways for keys and values to come to the queries, with the same result:
- `p2p`, a ring: each rank's block goes round, from neighbour to neighbour; while a rank works on one block the next is
  on its way. Never more than two blocks are held. In the backward pass a block's gradients go round with it.
- `all_gather`: every rank gets all blocks at once. One exchange for each pass, and cp blocks are held while it lasts.

Neither keeps another rank's keys from the forward to the backward pass: they come again.

In a compiled layer all of it is one operator, which takes tensors in place of a `Sharing`: the layer is one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.compat import resolve_process_group
from common.distributed.context_parallel import CpPack
from common.models.layers import attention_blocks as blocks
from common.models.layers.attention import Kept, rotate

# By their newer names, where torch (2.13) has them: it warns of the older ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a pack: their process group, this rank's place in it, the way keys come."""

    group: dist.ProcessGroup
    way: str = "p2p"

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def share_context(model: nn.Module, group: dist.ProcessGroup, way: str) -> None:
    """Have a model (`Esm2ForMaskedLM`) take packs that the ranks of a group share. way: one of WAYS."""
    model.encoder.context = ContextGroup(group, way)
    for layer in model.layers:
        if hasattr(layer, "set_context_parallel_group"):  # Transformer Engine's own
            ranks = dist.get_process_group_ranks(group)
            layer.set_context_parallel_group(group, ranks, torch.cuda.Stream(), way)


class Sharing:
    """Where what is of a shared pack, for all layers: this rank's tokens, every rank's block of keys; real ones only.

    own [R]: the places of this rank's real tokens; parts: for each rank, where its part of each sequence begins in its
    block, end to end; rows: how many rows a block is sent with, the same on all ranks. Made once for all layers: what
    the host counts, and sends to a device, it does not do again in each.
    """

    def __init__(self, real: Tensor, bounds: Tensor, device: torch.device, context: ContextGroup):
        """real, bounds: of the `CpPack`."""
        self.real, self.bounds, self.context = real, bounds, context
        self.names = context.group.group_name, context.way
        self._device = device
        self._ends = F.pad(real.cumsum(1), (1, 0))  # [cp, B + 1]
        self.parts = blocks.Bounds.make(self._ends, self._device)
        begins = bounds[context.rank, :-1] - self._ends[context.rank, :-1]
        self.own = self._places(begins, real[context.rank])
        self.rows = max(1, int(self._ends[:, -1].max()))

    def is_of(self, real: Tensor, bounds: Tensor, device: torch.device) -> bool:
        return self._device == device and torch.equal(self.real, real) and torch.equal(self.bounds, bounds)

    def _places(self, shifts: Tensor, counts: Tensor) -> Tensor:
        """Runs of neighbours, end to end: the n-th has counts[n] places, shifts[n] beyond where it is here."""
        shift = torch.repeat_interleave(shifts, counts)
        return (torch.arange(len(shift)) + shift).to(self._device, non_blocking=True)

    @property
    def queries(self) -> blocks.Bounds:
        return self.parts[self.context.rank]

    @cached_property
    def everyone(self) -> blocks.Bounds:
        """Of the parts of all ranks together."""
        return blocks.Bounds.make(self._ends.sum(0)[None], self._device)[0]

    @cached_property
    def places(self) -> Tensor:
        """The rows of all blocks end to end, sequence by sequence and in a sequence rank by rank; int64 [L]."""
        begins = self._ends[:, :-1] + self.rows * torch.arange(len(self._ends))[:, None]
        counts = self._ends.diff().t().flatten()
        return self._places(begins.t().flatten() - (counts.cumsum(0) - counts), counts)

    def block(self, kv: Tensor) -> Tensor:
        """[R, ...] with fillers up to `rows`."""
        if len(kv) == self.rows:
            return kv
        return torch.cat((kv, kv.new_zeros(self.rows - len(kv), *kv.shape[1:])))

    def part(self, block: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a rank's block [rows, 2, H, D], without the fillers."""
        return block[: self.parts[rank].host[-1]].unbind(1)


_latest: list[Sharing] = []  # at most one: it is the same for all layers


def sharing_of(real: Tensor, bounds: Tensor, device: torch.device, group: str, way: str) -> Sharing:
    """The `Sharing` of a pack, made anew unless it is the one of the last call. group: a process group's name."""
    if not _latest or _latest[0].names != (group, way) or not _latest[0].is_of(real, bounds, device):
        _latest[:] = [Sharing(real, bounds, device, ContextGroup(resolve_process_group(group), way))]
    return _latest[0]


def whole_sequences(shared: CpPack, tokens: int) -> Tensor:
    """Boundaries of the sequences that ranks share, as Transformer Engine takes them: int64 [2, B + 2] on the host,
    without padding and with it. tokens: of each rank, with fillers, which are one more sequence."""
    fillers = (tokens - shared.bounds[:, -1]).sum()
    real, padded = (torch.cat((x.sum(0), fillers[None])) for x in (shared.real, shared.bounds.diff()))
    return F.pad(torch.stack((real, padded)).cumsum(1), (1, 0))


def context_attention(qkv: Tensor, cos: Tensor, sin: Tensor, sharing: Sharing) -> Tensor:
    """Rotary self-attention of this rank's tokens to all of their sequences.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2] by position in the whole
    sequence. Returns [T, H * D]; 0 where a token is padding, which nobody attends to and which has no gradient.
    """
    if torch.compiler.is_compiling():
        return _in_a_graph(qkv, cos, sin, sharing.real, sharing.bounds, *sharing.names)[0]
    with torch.autocast(qkv.device.type, enabled=False):
        out = WAYS[sharing.context.way].apply(*_rotated(qkv, cos, sin, sharing), sharing)
    return _spread(out, sharing, len(qkv)).flatten(1)


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """Of this rank's real tokens: q [R, H, D], kv [R, 2, H, D]."""
    own = sharing.own
    q, k, v = qkv[own].unbind(2)
    q, k = (rotate(x, cos[own], sin[own]) for x in (q, k))
    return q, torch.stack((k, v), 1)


def _spread(x: Tensor, sharing: Sharing, tokens: int) -> Tensor:
    """[R, ...] of the real tokens -> [T, ...], 0 where a token is padding."""
    return x.new_zeros(tokens, *x.shape[1:]).index_copy(0, sharing.own, x)


class _Ring(torch.autograd.Function):
    """q [R, H, D], kv [R, 2, H, D] (rotated) -> [R, H, D]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, sharing: Sharing) -> Tensor:
        out = lse = None
        for rank, block in rounds(sharing.block(kv), sharing):
            part = blocks.attend(q, *sharing.part(block, rank), sharing.queries, sharing.parts[rank])
            out, lse = part if out is None else blocks.merge(out, lse, *part)
        ctx.sharing = sharing
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        sharing, grads_q = ctx.sharing, 0
        coming = None  # the gradients of the block at hand, as far as others have worked on it
        for rank, block in rounds(sharing.block(kv), sharing):
            keys = sharing.part(block, rank)
            dq, *more = blocks.gradients(grad, q, *keys, out, lse, sharing.queries, sharing.parts[rank])
            grads_q = grads_q + dq
            added = sharing.block(torch.stack(more, 1))
            if coming is not None:
                added += coming.wait()
            coming = _Passing(added, sharing.context)
        return grads_q.to(q.dtype), coming.wait()[: len(kv)].to(kv.dtype), None


class _Gathered(torch.autograd.Function):
    """As `_Ring`, from all keys and values at once."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, sharing: Sharing) -> Tensor:
        out, lse = blocks.attend(q, *_all_keys(kv, sharing), sharing.queries, sharing.everyone)
        ctx.sharing = sharing
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        sharing, group = ctx.sharing, ctx.sharing.context.group
        keys = _all_keys(kv, sharing)
        dq, *more = blocks.gradients(grad, q, *keys, out, lse, sharing.queries, sharing.everyone)
        grads = torch.stack(more, 1)
        apart = grads.new_zeros(sharing.context.size * sharing.rows, *kv.shape[1:])
        apart.index_copy_(0, sharing.places, grads)
        own = torch.empty_like(apart[: sharing.rows])
        reduce_scatter(own, apart, group=group)
        return dq.to(q.dtype), own[: len(kv)].to(kv.dtype), None


WAYS: dict[str, type[torch.autograd.Function]] = {"p2p": _Ring, "all_gather": _Gathered}

# ---- in a graph: one operator, which finds out from tensors how the pack is shared ---------------------------------


@torch.library.custom_op("esm2::context_attention", mutates_args=())
def _in_a_graph(
    qkv: Tensor, cos: Tensor, sin: Tensor, real: Tensor, bounds: Tensor, group: str, way: str
) -> tuple[Tensor, Tensor]:
    """As `context_attention`; also, for the backward pass, the lse [T, H] of the real tokens."""
    sharing, kept = sharing_of(real, bounds, qkv.device, group, way), Kept()
    with torch.autocast(qkv.device.type, enabled=False):
        out = WAYS[way].forward(kept, *_rotated(qkv, cos, sin, sharing), sharing)
    lse = kept.saved_tensors[-1]
    return _spread(out, sharing, len(qkv)).flatten(1), _spread(lse, sharing, len(qkv))


@_in_a_graph.register_fake
def _(qkv, cos, sin, real, bounds, group, way) -> tuple[Tensor, Tensor]:
    tokens, heads, _, dim = qkv.shape
    lse = qkv.new_empty(tokens, heads, dtype=torch.promote_types(qkv.dtype, torch.float32))
    return qkv.new_empty(tokens, heads * dim), lse


@torch.library.custom_op("esm2::context_attention_backward", mutates_args=())
def _backward_in_a_graph(
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
    sharing = sharing_of(real, bounds, qkv.device, group, way)
    own = sharing.own
    with torch.autocast(qkv.device.type, enabled=False):
        grad, out = (x.view(len(qkv), qkv.shape[1], -1)[own] for x in (grad, out))
        kept = Kept((*_rotated(qkv, cos, sin, sharing), out, lse[own]))
        kept.sharing = sharing
        dq, dkv, _ = WAYS[way].backward(kept, grad)
        dk, dv = dkv.unbind(1)
        dq, dk = (rotate(x, cos[own], -sin[own]) for x in (dq, dk))
        return _spread(torch.stack((dq, dk, dv), 2), sharing, len(qkv))


@_backward_in_a_graph.register_fake
def _(grad, qkv, cos, sin, real, bounds, out, lse, group, way) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.group, ctx.way = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad: Tensor, *_):
    grads = _backward_in_a_graph(grad.contiguous(), *ctx.saved_tensors, ctx.group, ctx.way)
    return grads, None, None, None, None, None, None


_in_a_graph.register_autograd(_backward, setup_context=_keep)


def _all_keys(kv: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
    """Keys and values of all ranks, sequence by sequence; [L, H, D] each."""
    block = sharing.block(kv)
    gathered = block.new_empty(sharing.context.size * sharing.rows, *kv.shape[1:])
    all_gather(gathered, block, group=sharing.context.group)
    return gathered[sharing.places].unbind(1)


def rounds(block: Tensor, sharing: Sharing):
    """(rank, its block) for every rank, this one's own first; the next one is on its way meanwhile."""
    context = sharing.context
    for turn in range(context.size):
        coming = _Passing(block, context) if turn < context.size - 1 else None
        yield (context.rank - turn) % context.size, block
        if coming is not None:
            block = coming.wait()


class _Passing:
    """A tensor on its way to the next rank of the ring, and the previous one's to this one."""

    def __init__(self, tensor: Tensor, context: ContextGroup):
        self.sent, self.came = tensor, torch.empty_like(tensor)
        group, rank, size = context.group, context.rank, context.size
        to, source = (dist.get_global_rank(group, n % size) for n in (rank + 1, rank - 1))
        ways = [dist.P2POp(dist.isend, tensor, to, group), dist.P2POp(dist.irecv, self.came, source, group)]
        self.works = dist.batch_isend_irecv(ways)

    def wait(self) -> Tensor:
        """What came from the previous rank."""
        for work in self.works:
            work.wait()
        return self.came
