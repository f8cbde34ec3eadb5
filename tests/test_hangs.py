"""A rank that stops answering ends the job in bounded time, and is named: rank, host, step, what it was doing."""

from __future__ import annotations

import os
import re
import signal
import socket
import time

import pytest
import torch

from common.esm2 import Esm2ForMaskedLM
from common.watchdog import Watch
from tests.live_runs import LiveRun, kill_all, ranks_of, torchrun, wait_until
from tests.training_fixtures import TIMEOUT_S, _main, flags_of, on_ranks, rows, train

TIMEOUT = 6  # --ddp_timeout, seconds
FLAGS = {"max_steps": 3000, "per_device_train_batch_size": 1, "save_steps": 1000, "ddp_timeout": TIMEOUT}
SLACK = 6  # seconds on a busy machine
HOST = socket.gethostname()


def errors_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_is_named_by_the_other_one(dataset, tmp_path, rank):
    """SIGSTOP: the process is there, its connections are open, and nothing answers. Rank 0 keeps the store, too."""
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", 2, **FLAGS) as run:
        run.until_step(5)
        run.signal(signal.SIGSTOP, rank)
        started, reached = time.monotonic(), rows(tmp_path / "out")[-1]["step"]
        run.processes[1 - rank].join(TIMEOUT + SLACK)
        took, said = time.monotonic() - started, run.said(1 - rank)
        assert run.processes[1 - rank].exitcode == 1, said
    assert took < TIMEOUT + SLACK
    (error,) = errors_of(said)
    found = re.match(r"error: (?:rank 1: )?no progress for \d s in step (\d+), [a-z /]+ \(--ddp_timeout 6\): ", error)
    assert found, error
    assert reached <= int(found[1]) <= reached + 3
    if rank == 1:
        assert f"no answer from rank 1 (host {HOST}), last heard of " in error
    else:
        assert error.endswith("no answer from rank 0 (which holds the store)")
    assert f"Stacks of rank {1 - rank}:" in said
    assert "in take_step" in said or "in _next" in said  # where it waits


def _main_that_sleeps(argv: list[str], step: int, rank: int, seconds: float) -> None:
    """train_ddp.py; one rank sleeps in the forward pass of a step."""
    passes = 0

    def sleep_here(module, inputs) -> None:
        nonlocal passes
        if isinstance(module, Esm2ForMaskedLM) and module.training:
            passes += 1
            if passes == step and int(os.environ.get("RANK", 0)) == rank:
                time.sleep(seconds)

    torch.nn.modules.module.register_module_forward_pre_hook(sleep_here)
    _main(argv)


@pytest.mark.parametrize(("nproc", "rank"), [(2, 1), (2, 0), (1, 0)])
def test_a_rank_that_sleeps_for_ever_is_named_with_its_stack(dataset, tmp_path, nproc, rank):
    argv = flags_of(dataset, tmp_path / "out", **FLAGS | {"ddp_timeout": 4})
    started = time.monotonic()
    codes, said = on_ranks(nproc, _main_that_sleeps, argv, 7, rank, 1000)
    assert time.monotonic() - started < 4 + 15  # the start included
    assert codes == [1] * nproc
    assert rows(tmp_path / "out")[-1]["step"] == 6
    (error,) = errors_of(said[rank])
    assert "in step 7, forward/backward (--ddp_timeout 4): " in error
    assert "in sleep_here" in said[rank], "its stack"
    if nproc > 1:
        for text in said:
            (error,) = errors_of(text)
            assert re.search(rf"rank {rank} \(host {HOST}\)(, last heard of)? in step 7, forward/backward", error)
            assert f"rank {1 - rank} (host" not in error
        assert f"waiting for rank {rank} " in errors_of(said[rank])[0]
        assert re.search(r"at test_hangs\.py:\d+ in sleep_here", errors_of(said[rank])[0])


def test_a_rank_that_is_slow_within_the_time_changes_nothing(dataset, tmp_path):
    argv = flags_of(dataset, tmp_path / "out", **FLAGS | {"max_steps": 8})
    codes, said = on_ranks(2, _main_that_sleeps, argv, 4, 1, TIMEOUT / 2)
    assert codes == [0, 0], said
    assert rows(tmp_path / "out")[-1]["step"] == 8


def _main_evaluating_slowly(argv: list[str], seconds: float) -> None:
    """train_ddp.py; each batch of an evaluation takes so long."""

    def slow(module, inputs) -> None:
        if isinstance(module, Esm2ForMaskedLM) and not module.training:
            time.sleep(seconds)

    torch.nn.modules.module.register_module_forward_pre_hook(slow)
    _main(argv)


def test_an_evaluation_longer_than_the_time_is_no_hang(dataset, tmp_path):
    """Twenty proteins on each rank, a tenth of a second each."""
    flags = {"max_steps": 2, "do_eval": True, "eval_steps": 1, "per_device_eval_batch_size": 1, "ddp_timeout": 1}
    argv = flags_of(dataset, tmp_path, **flags, max_eval_samples=40)
    codes, said = on_ranks(2, _main_evaluating_slowly, argv, 0.1)
    assert codes == [0, 0], said
    assert max(row.get("eval_runtime", 0) for row in rows(tmp_path)) > 1


def test_compiling_is_no_hang():
    """A compiler that takes longer than the time: the watch, at a mark all the while, lets it."""
    watch, seen = Watch(), []

    def slow_backend(graph, inputs):
        time.sleep(1.0)
        seen.append(watch._compiling)
        return graph.forward

    watch.begin(0, 1, None, timeout_s=0.5)
    watch.compilation_counts_as_progress()
    watch.mark("forward/backward", 1)
    torch.compile(lambda x: x.sin() + 1, backend=slow_backend)(torch.ones(3))
    watch.end()
    assert seen == [True]


def test_a_pause_longer_than_the_time_is_no_hang(dataset, tmp_path):
    """Ctrl-Z, and on again after three seconds."""
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", max_steps=60, save_steps=1, async_save=False, ddp_timeout=1) as run:
        run.until_step(5)
        run.signal(signal.SIGSTOP)
        time.sleep(3)
        run.signal(signal.SIGCONT)
        assert run.end() == [0], run.said()
    assert rows(out)[-1]["step"] == 60


def test_a_rank_that_dies_is_named_at_once(dataset, tmp_path):
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", 2, **FLAGS | {"ddp_timeout": 60}) as run:
        run.until_step(5)
        run.signal(signal.SIGKILL, 1)
        started = time.monotonic()
        assert run.end() == [1, -9]
        assert time.monotonic() - started < 20
    (error,) = errors_of(run.said(0))
    assert error.startswith(f"error: another rank is gone: no answer from rank 1 (host {HOST}), last heard of ")


def test_torchrun_ends_a_job_with_a_stopped_rank(dataset, tmp_path):
    job = torchrun(dataset, tmp_path / "out", 2, **FLAGS)
    try:
        assert wait_until(lambda: len(rows(tmp_path / "out")) > 5, lambda: job.poll() is None)
        os.kill(ranks_of(job.pid)[1], signal.SIGSTOP)
        started = time.monotonic()
        said, _ = job.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - started < TIMEOUT + 30 + 2 * SLACK, "torchrun kills what is stopped after 30 s"
    finally:
        kill_all(job)
    assert job.returncode == 1
    assert f"no answer from rank 1 (host {HOST}), last heard of " in said


def test_a_run_with_a_short_time_is_the_run_with_a_long_one(dataset, tmp_path):
    for seconds in (2, 1800):
        train(dataset, tmp_path / str(seconds), 2, max_steps=6, save_final_model=False, ddp_timeout=seconds)
    assert [row["loss"] for row in rows(tmp_path / "2")] == [row["loss"] for row in rows(tmp_path / "1800")]
