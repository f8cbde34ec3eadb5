"""The processes of a run: who am I, which device is mine, how do we agree, how do we fail together."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.cli import BAD_INPUT, UserError
from common.distributed.stopping import StopRequest

# Values that ranks send each other, as JSON in tensors: torch's collectives of objects unpickle what they receive.
#
# A value is what JSON holds: dicts with strings as keys, lists, strings, numbers, booleans, None. A tuple arrives as a
# list. Everything else is a TypeError, on one rank as on many.


def copy(value):
    """The value as another rank would receive it."""
    return json.loads(_encoded(value))


def share(value):
    """Rank 0's value on every rank."""
    sends = dist.get_rank() == 0
    data = _to_tensor(value) if sends else torch.empty(0)
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    if not sends:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return _from_tensor(data)


def gather(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, in order, on every rank of the group."""
    lengths, padded = _padded(value, group)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [_from_tensor(data[:length]) for data, length in zip(everyone, lengths, strict=True)]


def gather_to_main(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, in order, on rank 0; [] on the others, who are sent lengths only."""
    lengths, padded = _padded(value, group)
    everyone = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone, dst=0, group=group)
    if everyone is None:
        return []
    return [_from_tensor(data[:length]) for data, length in zip(everyone, lengths, strict=True)]


def _padded(value, group: dist.ProcessGroup | None) -> tuple[list[int], Tensor]:
    """The lengths of every rank's data, and this rank's data, as long as the longest."""
    data = _to_tensor(value)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    lengths = [int(length) for length in lengths]
    return lengths, torch.nn.functional.pad(data, (0, max(lengths) - len(data)))


def _to_tensor(value) -> Tensor:
    """uint8 [bytes] on the CPU."""
    return torch.frombuffer(bytearray(_encoded(value)), dtype=torch.uint8)


def _from_tensor(data: Tensor):
    return json.loads(data.numpy().tobytes())


def _encoded(value) -> bytes:
    _check_keys(value)
    return json.dumps(value).encode()


def _check_keys(value) -> None:
    """json.dumps turns other keys into strings without a word."""
    if isinstance(value, dict):
        if others := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {others[0]!r} is no string")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        _check_keys(each)


BUG = 1  # exit status beside a traceback


class PeerFailed(Exception):
    """Another rank has failed and says why: this one leaves without a word, with the same exit status."""

    def __init__(self, status: int):
        super().__init__("another rank failed")
        self.status = status


@dataclass(frozen=True)
class Mesh:
    """A rank's place among those that share the data: (dp, cp), cp innermost. Ranks of one cp group share a pack.

    Whoever deals out data asks for `dp_rank` of `dp_size`; whoever averages over all ranks, for the World's size.
    """

    rank: int = 0
    size: int = 1
    cp_size: int = 1

    @property
    def dp_rank(self) -> int:
        return self.rank // self.cp_size

    @property
    def dp_size(self) -> int:
        return self.size // self.cp_size

    @property
    def cp_rank(self) -> int:
        return self.rank % self.cp_size


class NullWatch:
    """The interface of the hang watchdog, doing nothing: `distributed_run` puts the real one in its place."""

    def mark(self, phase: str, step: int) -> None:
        """The main thread enters a phase of a step. All ranks pass the same marks in the same order."""

    def rest(self) -> None:
        """Stop watching until the next mark: what follows may take any time."""

    def end(self, failed: bool = False) -> None:
        """The process is about to exit: tell the other ranks and stop watching."""

    def compilation_counts_as_progress(self) -> None:
        """Do not count the time torch.compile takes as a hang."""

    def missing(self) -> str:
        """Which rank is gone or stuck, after a collective failed; "" if unknown."""
        return ""


@dataclass
class World:
    """The process' place in the run. Without torchrun: a world of one.

    rehearsed: nothing is computed, so that no value is needed (extras.dry_run.memory_estimate).
    """

    is_dry_run: ClassVar[bool] = False

    rank: int
    local_rank: int
    size: int
    device: torch.device
    stop: StopRequest = field(default_factory=StopRequest)
    local_size: int = 1  # ranks of this node
    watch: NullWatch = field(default_factory=NullWatch)
    timeout_s: int = 1800  # of what the ranks exchange
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None  # those that share this rank's packs; None: nobody else

    @classmethod
    def from_environment(cls, use_cpu: bool) -> World:
        """The place that torchrun's variables tell."""
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        use_gpu = torch.cuda.is_available() and not use_cpu
        device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
        return cls(rank, local_rank, size, device, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)))

    def create_cp_groups(self, cp_size: int) -> None:
        """Neighbours in rank, so many, share their packs from now on. UserError where that does not divide the ranks.

        All ranks together.
        """
        with self.raise_together():
            if self.size % cp_size:
                fitting = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
                lower = self.size // cp_size * cp_size
                ranks = " or ".join(str(n) for n in (lower, lower + cp_size) if n)
                raise UserError(
                    f"--cp_size {cp_size} does not divide the number of ranks, {self.size}: choose --cp_size "
                    f"{fitting}, or start {ranks} ranks (torchrun --nproc_per_node)"
                )
        self.cp_size = cp_size
        if cp_size > 1:
            groups = [list(range(first, first + cp_size)) for first in range(0, self.size, cp_size)]
            self.cp_group, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=self.timeout_s))

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.rank, self.size, self.cp_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def stop_requested(self) -> bool:
        return self.stop.requested

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: Tensor) -> Tensor:
        """Maximum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank: every rank gets the same answer."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    def broadcast_object(self, value):
        """Rank 0's value (what JSON holds: common.distributed.world) on every rank."""
        return share(value) if self.size > 1 else copy(value)

    def gather(self, value, group: dist.ProcessGroup | None = None) -> list:
        """Every rank's value (what JSON holds), in order, on every rank."""
        return gather(value, group) if self.size > 1 else [copy(value)]

    def gather_to_main(self, value, group: dist.ProcessGroup | None = None) -> list:
        """Every rank's value (what JSON holds), in order, on rank 0; [] on the others, who are sent nothing of it."""
        return gather_to_main(value, group) if self.size > 1 else [copy(value)]

    def assert_same(self, facts: dict) -> None:
        """UserError, on all ranks together, unless these plain values are the same on every rank."""
        everyone = self.gather((socket.gethostname(), {name: repr(value) for name, value in facts.items()}))
        failure = None
        for rank, (host, theirs) in enumerate(everyone):
            main = everyone[0][1]
            names = [name for name in {**main, **theirs} if main.get(name) != theirs.get(name)]
            if names:
                others = [n for n, (_, more) in enumerate(everyone) if n > rank and more == theirs]
                also = f" (so do ranks {', '.join(map(str, others))})" if others else ""
                differing = "; ".join(f"{name} {theirs.get(name)}, not {main.get(name)}" for name in names[:5])
                failure = UserError(
                    f"rank {rank} (host {host}) differs from rank 0 (host {everyone[0][0]}) in {differing}{also}: "
                    "start all ranks with the same command, data and software"
                )
                break
        self.raise_on_all(failure)

    @contextmanager
    def raise_together(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Every rank does the body, which must hold no collective of its own. If it fails on some rank, all end.

        Without this the others would wait in their next collective for a rank that never comes.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.raise_on_all(failure, group)

    def raise_on_all(self, failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
        """Return if no rank has a failure. Else the first rank that has raises its own, the others PeerFailed."""
        if isinstance(failure, PeerFailed):
            failure = None  # its own rank tells
        if self.size > 1:
            # One number that tells the rank and the kind of failure.
            kind = BUG if not isinstance(failure, UserError | OSError) else BAD_INPUT
            value = torch.tensor(self.size * 8 if failure is None else self.rank * 8 + kind)
            dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group)
            first, status = divmod(int(value.item()), 8)
            if first < self.size and first != self.rank:
                raise PeerFailed(status) from failure
        if failure is not None:
            raise failure

    @contextmanager
    def on_main_rank(self) -> Iterator[bool]:
        """Only rank 0 does the body's work (`with ... as is_main: if is_main: ...`); if it fails, every rank ends."""
        with self.raise_together():
            yield self.is_main
