"""When a rank has died no other one stays behind, whatever its threads were waiting for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from common.data.workers import deliver
from common.distributed import stopping
from common.distributed.process_group import ProcessFlags, distributed_run
from common.distributed.stopping import StopRequest, die_with_parent, stop_with_launcher
from tests.live_runs import is_running, wait_until
from tests.training.checkpoint_fixtures import checkpointer_of_a_small_model
from tests.training_fixtures import on_ranks

FLAGS = ProcessFlags(use_cpu=True, ddp_timeout=3600)  # a rank that stays behind does so for this long


def _lose_rank_2(out: Path, finder: str) -> None:
    """Rank 2 dies. One thread of rank 0 finds it; the other waits for rank 1, which waits for rank 0 in another group.

    The groups are what sharding and replication make of larger runs: not every rank talks to every other.
    """
    with distributed_run(FLAGS) as world:
        with_the_dead, first, second = (dist.new_group(ranks) for ranks in ([0, 2], [0, 1], [0, 1]))
        checkpointer = checkpointer_of_a_small_model(out, world)
        of_main, of_writer = (with_the_dead, first) if finder != "checkpoint writer" else (first, with_the_dead)
        if world.rank == 0:
            checkpointer.group = of_writer
            with checkpointer:
                checkpointer.save(1, {"step": 1})
                if finder == "NCCL":
                    raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
                dist.all_reduce(torch.ones(1), group=of_main)
        for _ in range(2):
            world.raise_on_all(None)  # rank 0 does so in `save`, before it copies and after
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1), group=second)


@pytest.mark.parametrize("finder", ["main", "checkpoint writer"])
def test_exit_if_peer_lost_joins_no_other_thread(tmp_path, finder):
    codes, said = on_ranks(3, _lose_rank_2, tmp_path, finder)
    assert codes == [1, 1, -signal.SIGKILL], "\n".join(said)
    assert said[0].startswith("error: another rank is gone: no answer from rank 2 (host "), said[0]
    assert said[0].count("\n") == 1
    assert said[1].startswith("error: rank 1: another rank is gone: no answer from rank "), said[1]


class _Hangs(IterableDataset):
    """Says who its worker is, then never has a second item: as a read from a server that is gone."""

    def __iter__(self):
        yield torch.tensor(os.getpid())
        time.sleep(3600)


def _wait_with_a_worker(told) -> None:
    items = deliver(_Hangs(), num_workers=1, prefetch_factor=2, pin_memory=False)
    told.send(int(next(items)))
    next(items)


def _die_before_the_child_looks(told) -> None:
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    wait_until(lambda: os.getppid() != parent)
    told.send(os.getpid())
    die_with_parent(parent)
    time.sleep(3600)


def _launch_rank_that_is_stuck(told, acts: bool) -> None:
    """acts: on the signal that its launcher's death sends; it is stuck only when it exits, after a long save."""
    if os.fork():
        time.sleep(3600)  # the launcher, until it is killed
    launcher, os.environ["TORCHELASTIC_RUN_ID"], stopping.ORPHAN_S = os.getppid(), "job", 0.5
    stop_with_launcher()
    stop = StopRequest()
    stop.save_first()
    stop.install_handlers()
    told.send(os.getpid())
    if acts:
        wait_until(lambda: stop.requested)
        stop.agreed()
        time.sleep(3 * stopping.ORPHAN_S)
        told.send(os.getppid() != launcher)
        stop.ignore()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize("acts", [False, True])
def test_rank_without_launcher_ends_though_its_main_thread_is_stuck(acts):
    listener, told = multiprocessing.get_context("fork").Pipe(duplex=False)
    launcher = multiprocessing.get_context("fork").Process(target=_launch_rank_that_is_stuck, args=(told, acts))
    launcher.start()
    rank = listener.recv()
    try:
        launcher.kill()
        launcher.join()
        if acts:
            assert listener.recv(), "it saved without its launcher"
        assert wait_until(lambda: not is_running(rank), poll=0.05)
    finally:
        if is_running(rank):
            os.kill(rank, signal.SIGKILL)


def test_exit_with_error_after_nccl_error_joins_no_other_thread(tmp_path):
    codes, said = on_ranks(3, _lose_rank_2, tmp_path, "NCCL")
    assert codes == [1, 1, -signal.SIGKILL], "\n".join(said)
    assert "error: another rank is gone: no answer from rank 2 " in said[0]
    assert "Traceback" not in said[0]


@pytest.mark.parametrize("body", [_wait_with_a_worker, _die_before_the_child_looks])
def test_loader_workers_die_with_their_rank(body):
    """A worker holds its rank's connections: while it is there, the others wait for a rank that is dead."""
    listener, told = multiprocessing.get_context("fork").Pipe(duplex=False)
    rank = multiprocessing.get_context("fork").Process(target=body, args=(told,))
    rank.start()
    worker = listener.recv()
    try:
        rank.kill()
        rank.join()
        assert wait_until(lambda: not is_running(worker), poll=0.05)
    finally:
        if is_running(worker):
            os.kill(worker, signal.SIGKILL)


def _meet_at(port: int) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    with distributed_run(FLAGS):
        pass


def test_distributed_run_reports_a_taken_port():
    """And no other rank is said to be gone."""
    with closing(socket.socket()) as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        codes, (said,) = on_ranks(1, _meet_at, port)
    assert codes == [1]
    (line,) = said.splitlines()
    assert line.startswith(f"error: port {port} (MASTER_PORT) is taken on {socket.gethostname()}: ")
