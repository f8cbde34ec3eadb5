"""What NCCL does to a run, without NCCL: a main thread that runs no Python any more; failures by their messages."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from common.distributed import process_group, watchdog
from common.distributed.fsdp import init_mesh, set_group_timeouts
from common.distributed.process_group import ProcessFlags, distributed_run
from tests.training.checkpoint_fixtures import checkpointer_of_a_small_model
from tests.training_fixtures import on_ranks

LONG = 600  # --ddp_timeout: what ends a run sooner is not that


def _wait_for_the_device(seconds: int) -> None:
    """Outside Python, and no signal breaks it off: as a CUDA call that waits for a collective."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).sleep(seconds)


def _blocked(gone_s: float, told: bool, dies: bool, who: int = 1) -> None:
    """On two ranks: one is killed, or works on for some seconds; the other waits for it."""
    watchdog.GONE_S, watchdog.STOPPING_S = gone_s, 3.0
    with distributed_run(ProcessFlags(use_cpu=True, ddp_timeout=LONG)) as world:
        world.watch.mark("forward/backward", 3)
        world.stop.exit_at_once = False
        dist.barrier()
        if world.rank == who:
            time.sleep(1.5 if dies else 8)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            if told:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            _wait_for_the_device(60 if dies else 8)
            print("continues")


@pytest.mark.parametrize(("gone_s", "told"), [(4.0, False), (60.0, True)], ids=["alone", "signalled"])
def test_watch_ends_a_rank_blocked_on_the_device_when_a_peer_is_gone(gone_s, told):
    started = time.monotonic()
    codes, said = on_ranks(2, _blocked, gone_s, told, True)
    assert codes == [1, -signal.SIGKILL], said[0]
    (error,) = [line for line in said[0].splitlines() if line.startswith("error: ")]
    assert "in step 3, forward/backward (--ddp_timeout 600): no answer from rank 1 (host " in error
    assert time.monotonic() - started < LONG / 10


def test_watch_names_rank_0_though_it_held_the_store():
    codes, said = on_ranks(2, _blocked, 4.0, False, True, 0)
    assert codes == [-signal.SIGKILL, 1], said[1]
    (error,) = [line for line in said[1].splitlines() if line.startswith("error: ")]
    assert "no answer from rank 0" in error


def test_watch_lets_a_signalled_rank_wait_for_live_peers():
    """It may yet come to a place where it can save."""
    codes, said = on_ranks(2, _blocked, 60.0, True, False)
    assert codes == [0, 0], said[0]
    assert "continues" in said[0]
    assert "error" not in said[0]


OF_NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.29.7\n{}: {}\n"
    "Last error:\n{}"
)
INVALID = OF_NCCL.format(
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "ncclInvalidUsage",
    "This usually reflects invalid usage of NCCL library.",
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000",
)
REMOTE = OF_NCCL.format(
    "remote process exited or there was a network error",
    "ncclRemoteError",
    "A call failed possibly due to a network error or a remote process exiting prematurely.",
    "socketPollConnect: connect to 10.0.0.7<51213> returned Connection refused, exceeded error retry count",
)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"
NO_MEMORY = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def _fails(kind: type, text: str) -> None:
    with distributed_run(ProcessFlags(use_cpu=True, ddp_timeout=LONG)):
        raise kind(text)


@pytest.mark.parametrize(
    ("kind", "text", "status", "line"),
    [
        (dist.DistBackendError, INVALID, 1, r"NCCL failed on cpu of .*: two ranks on one GPU"),
        (dist.DistBackendError, REMOTE, 1, "another rank is gone: see its log"),
        (torch.AcceleratorError, ILLEGAL, 1, "CUDA failed on cpu of .*: an illegal memory access .*nvidia-smi"),
        (RuntimeError, ILLEGAL, 1, "CUDA failed on cpu of "),
        (RuntimeError, CUBLAS, 2, "out of memory on cpu: CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        (
            RuntimeError,
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            1,
            "CUDA failed on cpu of .*: cuDNN error: CUDNN",
        ),
        (torch.AcceleratorError, NO_MEMORY, 2, "out of memory on cpu: CUDA error: out of memory.*--tokens_per_pack"),
    ],
)
def test_distributed_run_reports_device_failures_in_one_line(kind, text, status, line):
    codes, said = on_ranks(1, _fails, kind, text)
    assert codes == [status], said[0]
    (error,) = said[0].splitlines()
    assert error.startswith("error: ")
    assert re.search(line, error), error


def test_distributed_run_keeps_the_traceback_of_a_bug():
    codes, said = on_ranks(1, _fails, RuntimeError, "shapes do not match")
    assert codes == [1]
    assert "Traceback" in said[0]


def test_set_nccl_defaults_keeps_the_users_settings(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RDMAV_FORK_SAFE": "0"})
    process_group.set_nccl_defaults(1800)
    assert int(os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 1800
    assert (os.environ["FI_EFA_FORK_SAFE"], os.environ["RDMAV_FORK_SAFE"]) == ("1", "0")


def _groups_of_a_mesh() -> None:
    with distributed_run(ProcessFlags(use_cpu=True, ddp_timeout=77, cp_size=2)) as world:
        mesh = init_mesh(world, (2, 1), ("replicate", "shard"))
        set_group_timeouts(world, flat := mesh._flatten("everyone"))
        for group in (*mesh.get_all_groups(), flat.get_group(), world.cp_group, dist.group.WORLD):
            print(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        dist.barrier()  # rank 0 holds the store, of which the other still asks for its groups
        world.watch.end()  # and may be gone before the other has looked for it


def test_process_groups_have_ddp_timeout():
    codes, said = on_ranks(2, _groups_of_a_mesh)
    assert codes == [0, 0], said
    assert said[0].split() == ["77.0"] * 5


def test_checkpoint_writer_sets_its_ranks_device(tmp_path, monkeypatch):
    """Devices are a thread's own: a thread that sets none opens a context on GPU 0."""
    seen = {}
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: seen.update({threading.current_thread().name: device})
    )
    checkpointer = checkpointer_of_a_small_model(tmp_path)
    try:
        checkpointer.world.device = torch.device("cuda", 3)
        checkpointer.save(1, {})
        checkpointer.wait()
    finally:
        dist.destroy_process_group()
    assert seen == {"checkpoint writer": torch.device("cuda", 3)}
    assert (tmp_path / "checkpoint-1").exists()
