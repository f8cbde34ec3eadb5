"""The processes of a run: who am I, which device is mine, how do we agree, how do we end together."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.cli import UserError, setup_logging, user_errors

logger = logging.getLogger(__name__)

# Exit status of a run that was told to stop and has saved: sysexits.h's "temporary failure, try again". A batch
# system requeues on it; 0 means finished, 2 bad input, 1 a bug.
PREEMPTED = 75


class Preempted(Exception):
    """All ranks have agreed to stop, and the state is saved."""


@dataclass
class World:
    """The process' place in the run. Without torchrun: a world of one."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    stop_requested: bool = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
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
        if self.size > 1:
            self.any(False)

    @contextmanager
    def main_does(self) -> Iterator[bool]:
        """Only rank 0 does the body's work (`with ... as mine: if mine: ...`); its UserError reaches every rank."""
        failure: Exception | None = None
        try:
            yield self.is_main
        except (UserError, OSError) as error:
            failure = error
        failure = self.share(failure)
        if failure is not None:
            raise failure


@contextmanager
def distributed_run(args) -> Iterator[World]:
    """Set up logging, device, process group and signals; take them down in order, whatever happens.

    Bad input ends every rank with status 2 and rank 0 alone with a line; a stop by signal ends with PREEMPTED.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    setup_logging(logging.INFO if rank == 0 else logging.ERROR)
    faulthandler.enable()
    use_gpu = torch.cuda.is_available() and not args.use_cpu
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    world = World(rank, local_rank, size, device)
    with user_errors(f"rank {rank}: " if rank else ""):
        if use_gpu and local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {rank} has no GPU of its own: --nproc_per_node is above the {torch.cuda.device_count()} here"
            )
        if use_gpu:
            torch.cuda.set_device(device)
        if args.tf32 is not None:
            torch.backends.cuda.matmul.allow_tf32 = args.tf32
        _init_process_group(world, args.ddp_timeout)
        keep_freed_memory()
        handlers = {s: signal.signal(s, _request_stop(world)) for s in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield world
        except Preempted:
            logger.info("Stopped as asked, the state is saved: the same command goes on from there")
            raise SystemExit(PREEMPTED) from None
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            dist.destroy_process_group()


def _request_stop(world: World):
    def handler(signum, frame):
        world.stop_requested = True

    return handler


def _init_process_group(world: World, timeout_s: int) -> None:
    timeout = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step instead of returning them to the kernel.

    Activations are large blocks, freed and asked for again every step; by default each is mapped and zeroed by the
    kernel anew. Measured on the 8M model on 2 cores: see benchmarks/results.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)
