"""Self-attention of sequences that several ranks share: each has the queries of its own tokens, and needs all keys.

Two ways for keys and values to come to the queries, with the same result:
- `p2p`, a ring: each rank's block goes round, from neighbour to neighbour; while a rank works on one block the next is
  on its way. Never more than two blocks are held. In the backward pass a block's gradients go round with it.
- `all_gather`: every rank gets all blocks at once. One exchange for each pass, and cp blocks are held while it lasts.

Neither keeps another rank's keys from the forward to the backward pass: they come again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.model import attention_blocks as blocks
from common.model.attention import rotate
from common.ranks.slices import SharedPack

WAYS = ("p2p", "all_gather")
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

    own [R]: the places of this rank's real tokens; bounds: for each rank, where its part of each sequence begins in
    its block, end to end; rows: how many rows a block is sent with, the same on all ranks.
    """

    def __init__(self, shared: SharedPack, context: ContextGroup):
        self.context = context
        real, begins = shared.real.long().cpu(), shared.bounds[context.rank].long().cpu()[:-1]
        ends = torch.nn.functional.pad(real.cumsum(1), (1, 0))
        self.bounds: list[list[int]] = ends.tolist()
        counts = real[context.rank]
        shift = torch.repeat_interleave(begins - ends[context.rank][:-1], counts)
        self.own = (torch.arange(len(shift)) + shift).to(shared.positions.device, non_blocking=True)
        self.rows = max(1, *(bounds[-1] for bounds in self.bounds))

    @property
    def queries(self) -> list[int]:
        return self.bounds[self.context.rank]

    def block(self, kv: Tensor) -> Tensor:
        """[R, ...] with fillers up to `rows`."""
        if len(kv) == self.rows:
            return kv
        return torch.cat((kv, kv.new_zeros(self.rows - len(kv), *kv.shape[1:])))

    def part(self, block: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a rank's block [rows, 2, H, D], without the fillers."""
        return block[: self.bounds[rank][-1]].unbind(1)


def whole_sequences(shared: SharedPack, tokens: int) -> Tensor:
    """Boundaries of the sequences that ranks share, as Transformer Engine takes them: int64 [2, B + 2] on the host,
    without padding and with it. tokens: of each rank, with fillers, which are one more sequence."""
    fillers = (tokens - shared.bounds[:, -1]).sum()
    real, padded = (torch.cat((x.sum(0), fillers[None])) for x in (shared.real, shared.bounds.diff()))
    return torch.nn.functional.pad(torch.stack((real, padded)).cumsum(1), (1, 0))


@torch.compiler.disable  # exchanges with other ranks: compiled layers are cut in two here
def context_attention(qkv: Tensor, cos: Tensor, sin: Tensor, sharing: Sharing) -> Tensor:
    """Rotary self-attention of this rank's tokens to all of their sequences.

    qkv [T, H, 3, D] (query, key, value of each head, not yet rotated), cos and sin [T, D/2] by position in the whole
    sequence. Returns [T, H * D]; 0 where a token is padding, which nobody attends to and which has no gradient.
    """
    own, way = sharing.own, _Ring if sharing.context.way == "p2p" else _Gathered
    with torch.autocast(qkv.device.type, enabled=False):
        q, k, v = qkv[own].unbind(2)
        q, k = (rotate(x, cos[own], sin[own]) for x in (q, k))
        out = way.apply(q, torch.stack((k, v), 1), sharing)
    return out.new_zeros(len(qkv), *out.shape[1:]).index_copy(0, own, out).flatten(1)


class _Ring(torch.autograd.Function):
    """q [R, H, D], kv [R, 2, H, D] (rotated) -> [R, H, D]."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, sharing: Sharing) -> Tensor:
        out = lse = None
        for rank, block in _rounds(sharing.block(kv), sharing):
            part = blocks.attend(q, *sharing.part(block, rank), sharing.queries, sharing.bounds[rank])
            out, lse = part if out is None else blocks.merge(out, lse, *part)
        ctx.sharing = sharing
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        sharing, grads_q = ctx.sharing, 0
        coming = None  # the gradients of the block at hand, as far as others have worked on it
        for rank, block in _rounds(sharing.block(kv), sharing):
            dq, *more = blocks.gradients(
                grad, q, *sharing.part(block, rank), out, lse, sharing.queries, sharing.bounds[rank]
            )
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
        everyone, bounds = _all_sequences(kv, sharing)
        out, lse = blocks.attend(q, *everyone.unbind(1), sharing.queries, bounds)
        ctx.sharing = sharing
        ctx.save_for_backward(q, kv, out.to(q.dtype), lse)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, kv, out, lse = ctx.saved_tensors
        sharing, group = ctx.sharing, ctx.sharing.context.group
        everyone, bounds = _all_sequences(kv, sharing)
        dq, *more = blocks.gradients(grad, q, *everyone.unbind(1), out, lse, sharing.queries, bounds)
        grads = torch.stack(more, 1)
        apart = grads.new_zeros(sharing.context.size * sharing.rows, *kv.shape[1:])
        apart.index_copy_(0, _places(sharing).to(kv.device), grads)
        own = torch.empty_like(apart[: sharing.rows])
        reduce_scatter(own, apart, group=group)
        return dq.to(q.dtype), own[: len(kv)].to(kv.dtype), None


def _all_sequences(kv: Tensor, sharing: Sharing) -> tuple[Tensor, list[int]]:
    """Keys and values of all ranks, sequence by sequence [L, 2, H, D], and where each begins."""
    block = sharing.block(kv)
    gathered = block.new_empty(sharing.context.size * sharing.rows, *kv.shape[1:])
    all_gather(gathered, block, group=sharing.context.group)
    bounds = torch.tensor(sharing.bounds).sum(0)
    return gathered[_places(sharing).to(kv.device)], bounds.tolist()


def _places(sharing: Sharing) -> Tensor:
    """The rows of the gathered blocks, sequence by sequence and in a sequence rank by rank; int64 [L]."""
    bounds = torch.tensor(sharing.bounds)  # [cp, B + 1]
    begins = bounds[:, :-1] + sharing.rows * torch.arange(len(bounds))[:, None]
    counts = bounds.diff().t().flatten()
    shift = begins.t().flatten() - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(shift, counts)


def _rounds(block: Tensor, sharing: Sharing):
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
