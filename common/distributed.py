"""The processes of a run: who am I, which device is mine, how do we agree, how do we end together."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.cli import BAD_INPUT, UserError, setup_logging, user_errors
from common.stopping import PREEMPTED, Preempted, StopRequest
from common.watchdog import Watch

logger = logging.getLogger(__name__)

OUR_BUG = 1  # exit status beside a traceback


class FailedElsewhere(Exception):
    """Another rank has failed and says why: this one leaves without a word, with the same exit status."""

    def __init__(self, status: int):
        super().__init__("another rank failed")
        self.status = status


@dataclass
class World:
    """The process' place in the run. Without torchrun: a world of one."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    stop: StopRequest = field(default_factory=StopRequest)
    local_size: int = 1  # ranks of this node
    watch: Watch = field(default_factory=Watch)

    @classmethod
    def from_environment(cls, use_cpu: bool) -> World:
        """The place that torchrun's variables tell."""
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        use_gpu = torch.cuda.is_available() and not use_cpu
        device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
        return cls(rank, local_rank, size, device, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)))

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

    def share(self, value):
        """Rank 0's value (anything that pickles) on every rank."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        self.any(False)

    @contextmanager
    def together(self, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Every rank does the body, which must hold no collective of its own. If it fails on some rank, all end.

        Without this the others would wait in their next collective for a rank that never comes.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.end_together(failure, group)

    def end_together(self, failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
        """Return if no rank has a failure. Else the first rank that has raises its own, the others FailedElsewhere."""
        if isinstance(failure, FailedElsewhere):
            failure = None  # its own rank tells
        if self.size > 1:
            # One number that tells the rank and the kind of failure.
            kind = OUR_BUG if not isinstance(failure, UserError | OSError) else BAD_INPUT
            value = torch.tensor(self.size * 8 if failure is None else self.rank * 8 + kind)
            dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group)
            first, status = divmod(int(value.item()), 8)
            if first < self.size and first != self.rank:
                raise FailedElsewhere(status) from failure
        if failure is not None:
            raise failure

    @contextmanager
    def main_does(self) -> Iterator[bool]:
        """Only rank 0 does the body's work (`with ... as mine: if mine: ...`); if it fails, every rank ends."""
        with self.together():
            yield self.is_main


@contextmanager
def distributed_run(args) -> Iterator[World]:
    """Set up logging, device, process group and signals; take them down in order, whatever happens.

    Bad input ends every rank with status 2, and the first rank that found it says so in one line; a stop by signal
    ends every rank with PREEMPTED.
    """
    world = World.from_environment(args.use_cpu)
    rank, size, local_rank, device = world.rank, world.size, world.local_rank, world.device
    use_gpu = device.type == "cuda"
    setup_logging(logging.INFO if rank == 0 else logging.ERROR)
    faulthandler.enable()
    world.stop.listen()
    try:
        with _exit_status(world):
            if use_gpu and local_rank >= torch.cuda.device_count():
                count = torch.cuda.device_count()
                raise UserError(f"rank {rank} has no GPU of its own: --nproc_per_node is above the {count} here")
            if use_gpu:
                torch.cuda.set_device(device)
            if args.tf32 is not None:
                torch.backends.cuda.matmul.allow_tf32 = args.tf32
            _init_process_group(world, args.ddp_timeout)
            keep_freed_memory()
            yield world
    except BaseException as error:
        world.stop.ignore()  # the exit status stands: torchrun signals the ranks that are left when one has ended
        if size > 1:
            world.watch.end()
            leave(error)
        raise
    finally:
        world.watch.end()
        if dist.is_initialized():
            dist.destroy_process_group()
    world.stop.default()


@contextmanager
def _exit_status(world: World) -> Iterator[None]:
    """Turn what ended the run into an exit status and at most one line, but for our own bugs."""
    where = f"rank {world.rank}: " if world.rank else ""
    with user_errors(where):
        try:
            yield
        except Preempted:
            logger.info("Stopped as asked, the state is saved: the same command goes on from there")
            raise SystemExit(PREEMPTED) from None
        except FailedElsewhere as failure:
            raise SystemExit(failure.status) from None
        except RuntimeError as error:
            if not _lost_a_rank(error):
                raise
            who = world.watch.missing()
            told = f"{who}: see what it said" if who else "see what it said"
            sys.stderr.write(f"error: {where}another rank is gone: {told} ({_one_line(error)})\n")
            raise SystemExit(OUR_BUG) from None


def leave(error: BaseException) -> None:
    """End this rank of several now, without taking the process group down.

    Taking it down can hang: NCCL waits for ranks that are gone, and with gloo (torch 2.13) half of such exits hung in
    a destructor, after the last line of Python, for the exception's frames had kept model and groups alive until
    then. A rank that hangs keeps its connections open, and the others waiting.
    """
    status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else OUR_BUG
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _lost_a_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because the process at the other end is dead or silent. gloo has no exception."""
    text = str(error)
    of_gloo = "gloo" in text and any(word in text for word in ("onnection", "peer", "Timed out"))
    return isinstance(error, dist.DistNetworkError) or of_gloo


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _init_process_group(world: World, timeout_s: int) -> None:
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    if "RANK" not in os.environ:
        world.watch.begin(0, 1, None, timeout_s)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_this_attempt(world, timeout_s)
        else:
            store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
        world.watch.begin(world.rank, world.size, store, timeout_s)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _store_of_this_attempt(world: World, timeout_s: int) -> dist.Store:
    """A store that holds nothing of an earlier attempt of the same torchrun.

    torchrun's own store outlives its restarts, with the addresses of the dead ranks in it: whoever reads one before
    the new rank has written its own fails to connect, and the restart with it (pytorch issue 135712, still so in torch
    2.13). So rank 0 serves a new store and says in the old one where; a stale answer is a dead port.
    """
    key = "common.distributed/store"
    agents, _, _ = next(dist.rendezvous("env://", world.rank, world.size))
    timeout = timedelta(seconds=timeout_s)
    if world.is_main:
        host = os.environ["MASTER_ADDR"]  # as torchrun tells rank 0: its own node
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        agents.set(key, f"{host} {store.port}")
        return store
    deadline = time.monotonic() + timeout_s
    while True:
        host, port = agents.get(key).decode().split()
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
            store.set_timeout(timeout)
            return store
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step instead of returning them to the kernel.

    Activations are large blocks, freed and asked for again every step; by default each is mapped and zeroed by the
    kernel anew. benchmarks/results/train_throughput_cpu.md has transformers' model with and without it. Whoever sets
    glibc's own variables (MALLOC_MMAP_THRESHOLD_=65536 gives every large block back at once) is left alone.
    """
    import ctypes

    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
