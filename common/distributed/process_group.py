"""A run of several processes from start to exit: logging, signals, rendezvous, process group, exit status.

If a rank dies or hangs, the thread of another rank that notices first ends its process (`exit_if_peer_lost`) without
joining other threads: those may be blocked in a collective until --ddp_timeout.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import ipaddress
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
from typing import Any

import torch
import torch.distributed as dist

from common.cli import UserError, one_line, setup_logging, user_errors
from common.distributed.stopping import PREEMPTED, Preempted
from common.distributed.watchdog import Watch
from common.distributed.world import BUG, PeerFailed, World
from common.flags import Flags, flag
from common.hooks import extra

logger = logging.getLogger(__name__)
AGENT_S = 60  # torchrun's store starts before the ranks: a rank that cannot reach it has outlived its launcher
GRACE_S = 120  # after --ddp_timeout, for the hang watchdog to name a rank before NCCL's own ends the process
LOOPBACK = "127.0.0.1"
# NCCL's errors when a peer is dead or silent. Messages are those of torch 2.11 to 2.13 (ProcessGroupNCCL).
_PEER_ERRORS = (
    "ncclRemoteError",
    "remote process",
    "Watchdog caught collective operation timeout",
    "onnection",
    "socketPoll",
)
_ADVICE = {
    "ncclInvalidUsage": "two ranks on one GPU, or ranks that call different collectives",
    "ncclUnhandledCudaError": "the driver and this CUDA may not match: python -m extras.preflight compares them",
    "ncclSystemError": "shared memory (/dev/shm), memlock or the network: NCCL_DEBUG=INFO says which",
    "ncclInternalError": "NCCL_DEBUG=INFO says more",
}


@dataclass(frozen=True)
class ProcessFlags(Flags):
    """Flags of a run's processes: device, determinism, timeout, context parallelism."""

    group = "processes"
    advanced = ("ddp_timeout",)
    unlisted = ("tf32", "use_cpu", "deterministic")

    tf32: bool | None = flag(None, "Allow TF32 in fp32 matmuls (NVIDIA Ampere and later).")
    use_cpu: bool = flag(False, "Train on the CPU even where there is a GPU.")
    deterministic: bool = flag(
        False, "Bit-identical results on GPUs too, with slower kernels; on CPUs they always are."
    )
    ddp_timeout: int = flag(1800, "Seconds after which a hanging rank ends the run. Raise it for slow disks.")
    cp_size: int = flag(
        1, "For sequences too long for one GPU: neighbouring ranks that share each pack (context parallelism)."
    )

    def check(self) -> None:
        self.require_at_least(1, "ddp_timeout", "cp_size")


@contextmanager
def distributed_run(flags: ProcessFlags) -> Iterator[World]:
    """Set up logging, device, signals and process group; tear them down in order on any exit.

    Bad input ends every rank with status 2, with one line from the first rank that found it. A stop by signal ends
    every rank with PREEMPTED.
    """
    world = World.from_environment(flags.use_cpu)
    world.start_up.done("imports")
    use_gpu = world.device.type == "cuda"
    setup_logging(logging.INFO if world.is_main else logging.ERROR)
    faulthandler.enable()
    world.stop.install_handlers()
    if flags.deterministic:
        _set_deterministic()
    try:
        with _exit_status(world):
            if use_gpu:
                if world.local_rank >= (count := torch.cuda.device_count()):
                    raise UserError(f"rank {world.rank} has no GPU: --nproc_per_node is above the {count} here")
                torch.cuda.set_device(world.device)
            if flags.tf32 is not None:
                torch.backends.cuda.matmul.allow_tf32 = flags.tf32
            world.timeout_s = flags.ddp_timeout
            _init_process_group(world)
            if flags.cp_size > 1:
                extra().create_cp_groups(world, flags.cp_size)
            keep_freed_memory()
            world.start_up.done("process group")
            yield world
    except BaseException as error:
        world.stop.ignore()  # keep the exit status: torchrun signals the remaining ranks once one has ended
        if world.size > 1:
            world.watch.end(failed=not (isinstance(error, SystemExit) and error.code == PREEMPTED))
            exit_now(error)
        raise
    finally:
        world.watch.end()
        if dist.is_initialized():
            # gloo's threads free the last collective's tensors, for which they need the GIL, under a lock that the
            # group's destructor takes while it holds the GIL. Let them finish first, or the process never ends.
            time.sleep(0.05)
            dist.destroy_process_group()
    world.stop.restore_handlers()


def _set_deterministic() -> None:
    """Call before CUDA starts: cuBLAS reads its workspace size then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention
    torch.use_deterministic_algorithms(True)
    # A debugging aid: no kernel of ours reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyrefly: ignore[missing-attribute]  # a property


def keep_freed_memory() -> None:
    """Have glibc keep freed blocks for the next step instead of returning them to the kernel.

    Activations are large blocks, freed and allocated again every step; by default the kernel maps and zeroes each
    anew. benchmarks/results/train_throughput_cpu.md has transformers' model with and without it. If the user sets
    glibc's own variables (MALLOC_MMAP_THRESHOLD_=65536 returns every large block at once), nothing is changed.
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


# ---- errors -------------------------------------------------------------------------------------------------


@contextmanager
def _exit_status(world: World) -> Iterator[None]:
    """Turn an exception into an exit status and at most one line; a bug keeps its traceback."""
    with user_errors(_rank_prefix(world)):
        try:
            yield
        except Preempted:
            logger.info("Stopped by a signal, checkpoint saved: run the same command to resume")
            raise SystemExit(PREEMPTED) from None
        except PeerFailed as failure:
            raise SystemExit(failure.status) from None
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise UserError(
                    f"out of memory on {world.device}: {one_line(error).partition('. ')[0]}: lower --tokens_per_pack "
                    "(or --per_device_train_batch_size), recompute with --activation_checkpointing, or shard over "
                    "more ranks"
                ) from error
            host = socket.gethostname()
            if isinstance(error, dist.DistNetworkError) and "EADDRINUSE" in str(error):
                message = (
                    f"port {os.environ.get('MASTER_PORT')} (MASTER_PORT) is taken on {host}: another job uses it, or "
                    "one that has not ended yet: choose another --master_port, or start again"
                )
                exit_with_error(world, message, error)
            exit_if_peer_lost(world, error)
            if message := device_failure(error, world.device, host):
                exit_with_error(world, message, error)
            raise


def _rank_prefix(world: World) -> str:
    return f"rank {world.rank}: " if world.rank else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device is out of memory: torch's own exception, or an error of CUDA or NCCL that says so."""
    text = str(error)
    of_device = isinstance(error, torch.AcceleratorError | dist.DistBackendError) or "CUDA error" in text
    of_device = of_device and any(word in text for word in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "calloc"))
    return isinstance(error, torch.OutOfMemoryError) or of_device


def device_failure(error: RuntimeError, device: torch.device, host: str) -> str | None:
    """A CUDA or NCCL error and what to do about it, in one line; None for another error."""
    text = str(error)
    if isinstance(error, dist.DistBackendError):
        advice = next((advice for name, advice in _ADVICE.items() if name in text), "NCCL_DEBUG=INFO says more")
        return f"NCCL failed on {device} of {host}: {one_line(error)[:200]}: {advice}"
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "cuDNN error" in text:
        first_line = text.partition("\n")[0].removeprefix("CUDA error: ")
        return (
            f"CUDA failed on {device} of {host}: {first_line[:160]}: if it happens again on this host alone, check "
            "its GPU (nvidia-smi -q, dmesg); else CUDA_LAUNCH_BLOCKING=1 and TRACEBACK=1 show where"
        )
    return None


def is_peer_lost(error: BaseException | None) -> bool:
    """Whether a collective failed because a peer is dead or silent. gloo has no exception of its own for it."""
    text = str(error)
    of_gloo = "gloo" in text and any(word in text for word in ("onnection", "peer", "Timed out"))
    of_nccl = isinstance(error, dist.DistBackendError) and any(word in text for word in _PEER_ERRORS)
    return isinstance(error, dist.DistNetworkError) or of_nccl or (isinstance(error, RuntimeError) and of_gloo)


def exit_if_peer_lost(world: World, error: BaseException) -> None:
    """If a lost peer caused the error, name it and end this process, from any thread. Else return."""
    if is_peer_lost(error):
        who = world.watch.missing()
        cause = f"{who}: see its log" if who else "see its log"
        exit_with_error(world, f"another rank is gone: {cause} ({one_line(error)[:160]})")


def exit_with_error(world: World, message: str, error: BaseException | None = None) -> None:
    """End this process with one line, and with the error's stack if TRACEBACK is set.

    For errors after which the device or a peer cannot be used any more.
    """
    if error is not None and os.environ.get("TRACEBACK"):
        traceback.print_exception(error)
    sys.stderr.write(f"error: {_rank_prefix(world)}{message}\n")
    world.watch.end(failed=True)
    exit_now(SystemExit(BUG))


def exit_now(error: BaseException) -> None:
    """End this process without destroying the process group, which can hang.

    NCCL waits for ranks that are gone. With gloo (torch 2.13) half of such exits hung in a destructor after the last
    line of Python, because the exception's frames had kept model and groups alive. A rank that hangs keeps its
    connections open, and the other ranks waiting.
    """
    status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else BUG
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- rendezvous and process group ---------------------------------------------------------------------------
#
# torch's TCPStore answers anyone who reaches its port, and listens on all interfaces whatever address it is given. A
# store at a loopback address gets a socket that listens there only; a run on one node has all its stores there.


def _init_process_group(world: World) -> None:
    timeout_s, timeout = world.timeout_s, timedelta(seconds=world.timeout_s)
    use_loopback_interface()
    backend = "gloo"
    if world.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        set_nccl_defaults(timeout_s)
    if "RANK" not in os.environ:
        store: dist.Store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store_of_this_attempt(world, timeout_s)
    else:
        host, port = store_host(), int(os.environ["MASTER_PORT"])
        options = {"world_size": world.size, "wait_for_workers": True, "timeout": timeout}
        store = serve_store(host, port, **options) if world.is_main else join_store(host, port, **options)
    world.watch = Watch(world.rank, world.size, store, timeout_s, lambda: world.stop.requested).start()
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def set_nccl_defaults(timeout_s: int) -> None:
    """Variables for NCCL and its network libraries, unless the user sets them."""
    for name, value in {
        # NCCL's watchdog ends a process whose thread does not answer, without naming a rank: ours comes first.
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": timeout_s + GRACE_S,
        # Loader workers fork: libfabric and the RDMA libraries must not lose their registered memory then.
        "FI_EFA_FORK_SAFE": 1,
        "RDMAV_FORK_SAFE": 1,
    }.items():
        os.environ.setdefault(name, str(value))


def _store_of_this_attempt(world: World, timeout_s: int) -> dist.Store:
    """A store without the keys of an earlier attempt of the same torchrun.

    torchrun's own store outlives its restarts and holds the addresses of dead ranks: a rank that reads one before the
    new rank has written its own fails to connect, and the restart fails with it (pytorch issue 135712, still so in
    torch 2.13). So rank 0 serves a new store and puts its address into the old one; a stale address is a dead port.
    """
    key = "common.distributed.world/store"
    agents, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=AGENT_S)))
    timeout = timedelta(seconds=timeout_s)
    agents.set_timeout(timeout)
    if world.is_main:
        host = store_host()  # torchrun sets MASTER_ADDR to rank 0's node
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


def is_loopback(host: str) -> bool:
    """Whether the address itself is loopback. Host names are not resolved: a host's own name may be loopback on that
    host and another address on the other nodes."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def on_one_node() -> bool:
    """Whether all ranks are on this machine, by torchrun's variables or the store's address."""
    size, local_size = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    return size == local_size or is_loopback(os.environ.get("MASTER_ADDR", ""))


def store_host() -> str:
    """Where rank 0 serves a store."""
    return LOOPBACK if on_one_node() else os.environ["MASTER_ADDR"]


def serve_store(host: str, port: int, **options: Any) -> dist.TCPStore:
    """Serve a TCPStore at a port (0: a free one); at a loopback address it listens there only.

    options: TCPStore's. Raises DistNetworkError if the port is taken.
    """
    options.setdefault("wait_for_workers", False)
    if not is_loopback(host):
        return dist.TCPStore(host, port, is_master=True, **options)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise dist.DistNetworkError(f"EADDRINUSE: {host}:{port}: {error.strerror}") from None
        raise
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, master_listen_fd=listener.fileno(), **options)
    listener.detach()  # the store owns the socket now
    return store


def join_store(host: str, port: int, **options: Any) -> dist.TCPStore:
    """A client of the store there. options: TCPStore's."""
    options.setdefault("wait_for_workers", False)
    return dist.TCPStore(host, port, is_master=False, **options)


def use_loopback_interface() -> None:
    """On one node have gloo and NCCL use loopback, unless the user names an interface. Call before making a group."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback and on_one_node():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
