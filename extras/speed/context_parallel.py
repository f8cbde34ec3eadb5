"""Context parallelism: the ranks that share a pack, and which tokens of each of its sequences a rank has.

Two layouts:
- `dual_chunk` (Transformer Engine's): a sequence is padded to a multiple of 2 * cp and split into 2 * cp chunks;
  rank r has chunks r and 2 * cp - 1 - r. All ranks have as many tokens and, with a causal mask, as much work.
- `contiguous`: rank r has tokens length * r // cp to length * (r + 1) // cp. No padding; the ranks' shares of a
  sequence differ by at most one token. With bidirectional attention the work is balanced too.

A rank's sequences are in the order of the pack, its tokens in the order of the sequence, real ones before padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError
from common.distributed.world import World


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share a pack. comm_type: `p2p`, `all_gather`, or Transformer Engine's `a2a`."""

    group: dist.ProcessGroup
    comm_type: str = "p2p"

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()


def create_cp_groups(world: World, cp_size: int) -> None:
    """Split the ranks into context-parallel groups of `cp_size` consecutive ranks. A collective.

    UserError if that does not divide the number of ranks.
    """
    with world.raise_together():
        if world.size % cp_size:
            fitting = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
            lower = world.size // cp_size * cp_size
            ranks = " or ".join(str(n) for n in (lower, lower + cp_size) if n)
            raise UserError(
                f"--cp_size {cp_size} does not divide the number of ranks, {world.size}: choose --cp_size "
                f"{fitting}, or start {ranks} ranks (torchrun --nproc_per_node)"
            )
    world.cp_size = cp_size
    groups = [list(range(first, first + cp_size)) for first in range(0, world.size, cp_size)]
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=world.timeout_s))
    world.cp_group = own if isinstance(own, dist.ProcessGroup) else None


@dataclass(frozen=True)
class CpPack:
    """A rank's part of a pack of B sequences that cp ranks share. T: its own tokens.

    The host reads bounds and real. No tuple: DDP and FSDP2 copy all tensors in a model's tuples to the GPU.

    positions int64 [T]: of its tokens in their sequences; bounds int64 [cp, B + 1]: where each sequence's tokens begin
    and end on each rank, padding included; real int64 [cp, B]: how many of those are not padding; lengths int64 [B]:
    of the full sequences; masks int64 [B]: number of <mask> tokens in the full sequences.
    """

    positions: Tensor
    bounds: Tensor
    real: Tensor
    lengths: Tensor
    masks: Tensor

    def masked_fractions(self, sequences: int) -> Tensor:
        """Fraction of <mask> in each full sequence, [sequences]; 0 for those behind the pack's own, of fillers."""
        fractions = self.masks / self.lengths.clamp(min=1)
        return F.pad(fractions, (0, sequences - len(fractions)))


@dataclass(frozen=True)
class CpSplit:
    """How `size` ranks split a pack of sequences with these lengths (int64 [B]).

    multiple: sequences are padded to a multiple of it: a multiple of 2 * size with dual_chunk, 1 with contiguous.
    """

    lengths: np.ndarray
    size: int
    layout: str = "dual_chunk"
    multiple: int = 1

    def __post_init__(self) -> None:
        assert self.multiple == 1 if self.layout == "contiguous" else self.multiple % (2 * self.size) == 0

    @property
    def chunks(self) -> np.ndarray:
        """Length of each sequence's chunks; dual_chunk only."""
        return -(-self.lengths // self.multiple) * (self.multiple // (2 * self.size))

    def counts(self) -> np.ndarray:
        """Number of each sequence's tokens on each rank, padding included; int64 [size, B]."""
        if self.layout == "contiguous":
            return np.diff(self._cuts(), axis=0)
        return np.repeat(2 * self.chunks[None], self.size, axis=0)

    def real(self) -> np.ndarray:
        """`counts` without padding."""
        if self.layout == "contiguous":
            return self.counts()
        numbers = np.arange(2 * self.size)[:, None]
        of_chunks = np.clip(self.lengths - numbers * self.chunks, 0, self.chunks)  # [2 * size, B]
        return of_chunks[: self.size] + of_chunks[: self.size - 1 : -1]

    def bounds(self) -> np.ndarray:
        """Offsets of the sequences among each rank's tokens, and the end of the last; int64 [size, B + 1]."""
        return np.pad(self.counts().cumsum(axis=1), ((0, 0), (1, 0)))

    def positions(self, rank: int) -> np.ndarray:
        """Positions of a rank's tokens in their sequences, padding included; int64 [T]."""
        counts = self.counts()[rank]
        ends = counts.cumsum()
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        if self.layout == "contiguous":
            return within + np.repeat(self._cuts()[rank], counts)
        chunk = np.repeat(self.chunks, counts)
        second = within >= chunk
        return within + chunk * np.where(second, 2 * self.size - 2 - rank, rank)

    def sequences(self, rank: int) -> np.ndarray:
        """The sequence that each of a rank's tokens belongs to; int64 [T]."""
        return np.repeat(np.arange(len(self.lengths)), self.counts()[rank])

    def _cuts(self) -> np.ndarray:
        return self.lengths * np.arange(self.size + 1)[:, None] // self.size  # [size + 1, B]


class SendReceive:
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
