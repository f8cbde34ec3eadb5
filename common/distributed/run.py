"""A run of several processes from its first line to its last: logging, signals, process group, how each rank ends.

When a rank is dead or silent the others end at once, whichever of their threads finds it (`leave_if_rank_lost`): a
thread that waited for another one first, or for a rank that does the same, would wait until --ddp_timeout.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from common.cli import UserError, one_line, setup_logging, user_errors
from common.distributed.nccl import device_failure, lost_by_nccl, out_of_memory, tell_nccl
from common.distributed.stopping import PREEMPTED, Preempted
from common.distributed.store import join_store, keep_to_this_node, serve_store, store_host
from common.distributed.world import OUR_BUG, FailedElsewhere, World
from common.flags import Flags, flag

logger = logging.getLogger(__name__)
# torchrun's store is there before the ranks are: one that cannot reach it has outlived its launcher.
AGENT_S = 60


@dataclass(frozen=True)
class ProcessFlags(Flags):
    """Of a run's processes: device, determinism, timeout, context parallelism."""

    group = "processes"
    advanced = ("tf32",)
    unlisted = ("use_cpu",)

    tf32: bool | None = flag(None, "Allow TF32 in fp32 matmuls (NVIDIA Ampere and later).")
    use_cpu: bool = flag(False, "Train on the CPU even where there is a GPU.")
    deterministic: bool = flag(
        False, "Bit-identical results on GPUs too, with slower kernels; on CPUs they always are."
    )
    ddp_timeout: int = flag(1800, "Seconds after which a hanging rank ends the run; the error names it.")
    cp_size: int = flag(1, "Context parallelism: neighbouring ranks that share each pack, for long sequences.")

    def check(self) -> None:
        self.require_at_least(1, "ddp_timeout", "cp_size")


@contextmanager
def distributed_run(flags: ProcessFlags) -> Iterator[World]:
    """Set up logging, device, process group and signals; take them down in order, whatever happens.

    Bad input ends every rank with status 2, and the first rank that found it says so in one line; a stop by signal
    ends every rank with PREEMPTED.
    """
    world = World.from_environment(flags.use_cpu)
    rank, size, local_rank, device = world.rank, world.size, world.local_rank, world.device
    use_gpu = device.type == "cuda"
    setup_logging(logging.INFO if rank == 0 else logging.ERROR)
    faulthandler.enable()
    world.stop.listen()
    if flags.deterministic:
        _make_deterministic()
    try:
        with _exit_status(world):
            if use_gpu and local_rank >= torch.cuda.device_count():
                count = torch.cuda.device_count()
                raise UserError(f"rank {rank} has no GPU of its own: --nproc_per_node is above the {count} here")
            if use_gpu:
                torch.cuda.set_device(device)
            if flags.tf32 is not None:
                torch.backends.cuda.matmul.allow_tf32 = flags.tf32
            world.timeout_s = flags.ddp_timeout
            _init_process_group(world)
            world.share_packs(flags.cp_size)
            keep_freed_memory()
            yield world
    except BaseException as error:
        world.stop.ignore()  # the exit status stands: torchrun signals the ranks that are left when one has ended
        if size > 1:
            world.watch.end(failed=not (isinstance(error, SystemExit) and error.code == PREEMPTED))
            leave(error)
        raise
    finally:
        world.watch.end()
        if dist.is_initialized():
            dist.destroy_process_group()
    world.stop.default()


def _make_deterministic() -> None:
    """Before anything of CUDA starts: cuBLAS reads then how much memory it works in."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # for finding bugs: no kernel of ours reads it


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
            if out_of_memory(error):
                raise UserError(
                    f"out of memory on {world.device}: {one_line(error).partition('. ')[0]}: lower --tokens_per_pack "
                    "(or --per_device_train_batch_size), recompute with --activation_checkpointing, or shard over "
                    "more ranks"
                ) from error
            if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
                port = os.environ.get("MASTER_PORT")
                taken = f"port {port} (MASTER_PORT) is taken on {socket.gethostname()}: by another job, or one that"
                leave_with(world, f"{taken} has not ended yet: choose another --master_port, or start again", error)
            leave_if_rank_lost(world, error)
            if told := device_failure(error, world.device, socket.gethostname()):
                leave_with(world, told, error)
            raise


def rank_lost(error: BaseException | None) -> bool:
    """Whether a collective failed because the process at the other end is dead or silent. gloo has no exception."""
    text = str(error)
    of_gloo = "gloo" in text and any(word in text for word in ("onnection", "peer", "Timed out"))
    of_nccl = isinstance(error, dist.DistBackendError) and lost_by_nccl(text)
    return isinstance(error, dist.DistNetworkError) or of_nccl or (isinstance(error, RuntimeError) and of_gloo)


def leave_if_rank_lost(world: World, error: BaseException) -> None:
    """If the error says that another rank is gone: say who, and end this rank, from any thread. Else return."""
    if not rank_lost(error):
        return
    where = f"rank {world.rank}: " if world.rank else ""
    who = world.watch.missing()
    told = f"{who}: see what it said" if who else "see what it said"
    sys.stderr.write(f"error: {where}another rank is gone: {told} ({one_line(error)[:160]})\n")
    world.watch.end(failed=True)
    leave(SystemExit(OUR_BUG))


def leave_with(world: World, told: str, error: BaseException) -> None:
    """End this rank with one line, and the full stack where TRACEBACK is set: its device is in no state to go on."""
    if os.environ.get("TRACEBACK"):
        traceback.print_exception(error)
    where = f"rank {world.rank}: " if world.rank else ""
    sys.stderr.write(f"error: {where}{told}\n")
    world.watch.end(failed=True)
    leave(SystemExit(OUR_BUG))


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


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks for the next step instead of returning them to the kernel.

    Activations are large blocks, freed and asked for again every step; by default each is mapped and zeroed by the
    kernel anew. benchmarks/results/train_throughput_cpu.md has transformers' model with and without it. Whoever sets
    glibc's own variables (MALLOC_MMAP_THRESHOLD_=65536 gives every large block back at once) is left alone.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # not glibc
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)


def _init_process_group(world: World) -> None:
    timeout_s, timeout = world.timeout_s, timedelta(seconds=world.timeout_s)
    keep_to_this_node()
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    if world.device.type == "cuda":
        tell_nccl(timeout_s)
    if "RANK" not in os.environ:
        world.watch.begin(0, 1, None, timeout_s)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_this_attempt(world, timeout_s)
        else:
            host, port = store_host(), int(os.environ["MASTER_PORT"])
            everyone = {"world_size": world.size, "wait_for_workers": True, "timeout": timeout}
            store = serve_store(host, port, **everyone) if world.is_main else join_store(host, port, **everyone)
        world.watch.begin(world.rank, world.size, store, timeout_s, lambda: world.stop.told)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _store_of_this_attempt(world: World, timeout_s: int) -> dist.Store:
    """A store that holds nothing of an earlier attempt of the same torchrun.

    torchrun's own store outlives its restarts, with the addresses of the dead ranks in it: whoever reads one before
    the new rank has written its own fails to connect, and the restart with it (pytorch issue 135712, still so in torch
    2.13). So rank 0 serves a new store and says in the old one where; a stale answer is a dead port.
    """
    key = "common.distributed.world/store"
    agents, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=AGENT_S)))
    timeout = timedelta(seconds=timeout_s)
    agents.set_timeout(timeout)
    if world.is_main:
        host = store_host()  # as torchrun tells rank 0: its own node
        store = serve_store(host, 0, timeout=timeout)
        agents.set(key, f"{host} {store.port}")
        return store
    deadline = time.monotonic() + timeout_s
    while True:
        host, port = agents.get(key).decode().split()
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            store = join_store(host, int(port), timeout=timedelta(seconds=30))
            store.set_timeout(timeout)
            return store
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
