"""A process of a run: its rank, device and mesh, and the collectives by which ranks agree and fail together.

Ranks send each other values as JSON in tensors, because torch's object collectives unpickle what they receive. A value
is a dict with string keys, a list, string, number, boolean or None; a tuple arrives as a list. Anything else is a
TypeError, with one rank too.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.cli import BAD_INPUT, UserError
from common.distributed.start_up import StartUp
from common.distributed.stopping import StopRequest


def _broadcast(value):
    is_source = dist.get_rank() == 0
    data = _to_tensor(value) if is_source else torch.empty(0)
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    if not is_source:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return _from_tensor(data)


def _gather(value, group: dist.ProcessGroup | None, to_main: bool) -> list:
    """to_main: all values on rank 0, [] on the others, which receive lengths only."""
    data = _to_tensor(value)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(data, (0, longest - len(data)))
    if not to_main:
        buffers = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(buffers, padded, group=group)
    elif dist.get_rank() == 0:
        buffers = [torch.empty_like(padded) for _ in lengths]
        dist.gather(padded, buffers, dst=0, group=group)
    else:
        dist.gather(padded, None, dst=0, group=group)
        return []
    return [_from_tensor(data[: int(length)]) for data, length in zip(buffers, lengths, strict=True)]


def _to_tensor(value) -> Tensor:
    """uint8 [bytes] on the CPU."""
    return torch.frombuffer(bytearray(_encoded(value)), dtype=torch.uint8)


def _from_tensor(data: Tensor):
    return json.loads(data.numpy().tobytes())


def _encoded(value) -> bytes:
    _check_keys(value)
    return json.dumps(value).encode()


def _check_keys(value) -> None:
    """json.dumps silently turns other keys into strings."""
    if isinstance(value, dict):
        if others := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {others[0]!r} is not a string")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        _check_keys(item)


BUG = 1  # exit status of an unexpected exception


class PeerFailed(Exception):
    """Another rank has failed and reports why: this rank exits silently with the same status."""

    def __init__(self, status: int):
        super().__init__("another rank failed")
        self.status = status


@dataclass(frozen=True)
class Mesh:
    """A rank's coordinates in the mesh (dp, cp), cp innermost; the ranks of a cp group share a pack.

    Data is sharded by `dp_rank` of `dp_size`; averages over all ranks use the World's size.
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
    """This process in the run; without torchrun a world of one.

    is_dry_run: tensors have no values (extras.plan.dry_run.memory_estimate). local_size: ranks of this node;
    timeout_s: of collectives; cp_group: the ranks that share this rank's packs, None if it has packs of its own.
    """

    is_dry_run: ClassVar[bool] = False

    rank: int
    local_rank: int
    size: int
    device: torch.device
    stop: StopRequest = field(default_factory=StopRequest)
    local_size: int = 1
    watch: NullWatch = field(default_factory=NullWatch)
    start_up: StartUp = field(default_factory=StartUp)
    timeout_s: int = 1800
    cp_size: int = 1
    cp_group: dist.ProcessGroup | None = None

    @classmethod
    def from_environment(cls, use_cpu: bool) -> World:
        """From torchrun's environment variables."""
        rank = int(os.environ.get("RANK", 0))
        size = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1  # a single process, not a rank
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        use_gpu = torch.cuda.is_available() and not use_cpu
        device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
        return cls(rank, local_rank, size, device, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)))

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.rank, self.size, self.cp_size)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

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
        """Whether the flag is set on any rank; every rank gets the same answer."""
        return bool(self.max(torch.tensor(int(flag))).item())

    def broadcast_object(self, value):
        """Rank 0's value on every rank."""
        return _broadcast(value) if self.size > 1 else json.loads(_encoded(value))

    def gather(self, value, group: dist.ProcessGroup | None = None) -> list:
        """Every rank's value, in order, on every rank of the group."""
        return _gather(value, group, to_main=False) if self.size > 1 else [json.loads(_encoded(value))]

    def gather_to_main(self, value, group: dist.ProcessGroup | None = None) -> list:
        """Every rank's value, in order, on rank 0; [] on the others, which receive no values."""
        return _gather(value, group, to_main=True) if self.size > 1 else [json.loads(_encoded(value))]

    def assert_same(self, facts: dict) -> None:
        """Raise UserError on all ranks unless these plain values are the same on every rank."""
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
        """Run the body, which must not contain a collective, on every rank; if it raises on one, raise on all.

        Otherwise the other ranks would wait in their next collective for a rank that never arrives.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.raise_on_all(failure, group)

    def raise_on_all(self, failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
        """Return if no rank has a failure. Else the first rank with one raises it, the others PeerFailed."""
        if isinstance(failure, PeerFailed):
            failure = None  # reported by its own rank
        if self.size > 1:
            # Rank and exit status in one number, so that one all-reduce does.
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
        """`with ... as is_main: if is_main: ...` for work that rank 0 alone does; if it raises, all ranks raise."""
        with self.raise_together():
            yield self.is_main
