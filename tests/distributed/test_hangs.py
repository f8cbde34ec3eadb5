"""A rank that stops answering ends the job in bounded time, and is named: rank, host, step, what it was doing."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import time

import pytest
import torch

from common.distributed.watchdog import Watch
from common.models.esm2.model import Esm2ForMaskedLM
from tests.live_runs import LiveRun, kill_all, ranks_of, torchrun, wait_until
from tests.patience import communicate, join
from tests.training_fixtures import _main, flags_of, on_ranks, rows, train

TIMEOUT = 8  # --ddp_timeout, seconds
FLAGS = {"max_steps": 3000, "per_device_train_batch_size": 1, "save_steps": 1000, "ddp_timeout": TIMEOUT}
SLACK = 20  # seconds
HOST = socket.gethostname()
DDP, FSDP2, CP = "train_ddp.py", "train_fsdp2.py", "train_ddp_cp.py"
HYBRID = {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}


def errors_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(
    ("script", "nproc", "rank", "flags"),
    [
        pytest.param(DDP, 2, 0, {}, id="ddp-main", marks=pytest.mark.slow),
        pytest.param(DDP, 3, 1, {}, id="ddp-3"),
        pytest.param(CP, 3, 1, {"cp_size": 3}, id="cp-3", marks=pytest.mark.slow),
        pytest.param(FSDP2, 2, 1, {}, id="fsdp2", marks=pytest.mark.slow),
        pytest.param(FSDP2, 4, 2, HYBRID, id="hsdp", marks=pytest.mark.slow),
        pytest.param("train_mfsdp.py", 2, 1, {}, id="mfsdp", marks=pytest.mark.slow),
    ],
)
def test_watch_names_a_stopped_rank(dataset, tmp_path, script, nproc, rank, flags):
    """SIGSTOP: the process is there, its connections are open, and nothing answers. Rank 0 keeps the store, too."""
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", nproc, script=script, **FLAGS | flags) as run:
        run.until_step(5)
        run.signal(signal.SIGSTOP, rank)
        reached = rows(tmp_path / "out")[-1]["step"]
        others = [other for other in range(nproc) if other != rank]
        join([run.processes[other] for other in others], TIMEOUT + SLACK)
        assert [run.processes[other].exitcode for other in others] == [1] * len(others), run.said(others[0])
    first = True
    for other in others:
        said = run.said(other)
        (error,) = errors_of(said)
        name = f"rank {other}: " if other else ""
        found = re.match(rf"error: {name}no progress for \d+ s in step (\d+), [a-z /]+ \(--ddp_timeout 8\): ", error)
        if found:
            assert reached <= int(found[1]) <= reached + 3
            assert f"Stacks of rank {other}:" in said
            # Where it waits: after_step exchanges the estimate of the run's time, once, after the fifth step.
            assert re.search(r" in (step|pop|after_step)$", said, re.MULTILINE)
            first = False
        else:  # its collective failed when the first of the others had ended
            assert error.startswith(f"error: {name}another rank is gone: no answer from rank {rank} ")
        if rank:
            # Steps take milliseconds here: the last word may be from before the first one.
            assert re.search(rf"no answer from rank {rank} \(host {HOST}\), last heard of (in|after) step \d", error)
        else:
            assert "no answer from rank 0 (which holds the store)" in error
        assert not [r for r in others if f"answer from rank {r} " in error or f"; rank {r} " in error]
    assert not first


SAID = {"collateral": False, "ended": False, "marks": 9, "host": HOST, "step": 6, "phase": "data"}
WAITS, BUSY = SAID | {"waits": True}, SAID | {"waits": False}
LEFT = WAITS | {"collateral": True, "ended": True}


@pytest.mark.parametrize(
    ("rank", "store_lost", "peers", "suspects"),
    [
        (3, True, [(SAID, 0.5), (SAID, 0.4), (SAID, 5.0)], (True, [2])),  # silent while the store still answered
        (3, True, [(SAID, 0.5), (SAID, 0.4), (SAID, 0.5)], (True, [0])),
        # Both time out in the same moment; rank 0's last message may come too late to be read.
        (1, True, [(WAITS, 0.1), (BUSY, 0.1)], (False, [1])),
        (1, True, [(WAITS, 0.1), (WAITS | {"marks": 8}, 0.1)], (False, [1])),
        (1, True, [(WAITS, 0.1), (WAITS, 0.1)], (True, [0])),
        (1, True, [], (True, [0])),
        # The other rank has waited for this one, and ended: this one must not take it for the cause.
        (0, False, [(BUSY, 0.0), (LEFT, 0.0)], (False, [0])),
        (0, False, [(WAITS, 0.0), (LEFT, 0.0)], (True, [1])),
        (0, False, [(WAITS, 0.0), (LEFT | {"collateral": False}, 0.0)], (True, [1])),
    ],
)
def test_watch_suspects_the_rank_that_others_wait_for(rank, store_lost, peers, suspects):
    watch = Watch(rank, 4, None, TIMEOUT)
    watch.silence_s, watch._store_lost, now = 2.0, store_lost, watch._store_answered
    watch._peers = {peer: (message, now - silent) for peer, (message, silent) in enumerate(peers)}
    assert watch._suspects() == suspects


def test_watch_suspects_a_neighbour_as_soon_as_it_is_silent():
    """Not once it has been silent for as long again: the seconds until a lost node is noticed."""
    store = torch.distributed.HashStore()
    watch, other = Watch(0, 2, store, 1800), Watch(1, 2, store, 1800)
    other._send_heartbeat()
    assert not watch._a_peer_is_lost()
    watch.silence_s = 0.0
    assert watch._a_peer_is_lost()
    assert watch._suspects() == (True, [1])


def _main_that_sleeps(argv: list[str], step: int, rank: int, seconds: float, script: str, env: dict) -> None:
    """A train script; one rank sleeps in the forward pass of a step."""
    os.environ |= env
    passes = 0

    def sleep_here(module, inputs) -> None:
        nonlocal passes
        if isinstance(module, Esm2ForMaskedLM) and module.training:
            passes += 1
            if passes == step and int(os.environ.get("RANK", 0)) == rank:
                time.sleep(seconds)

    torch.nn.modules.module.register_module_forward_pre_hook(sleep_here)
    _main(argv, script)


@pytest.mark.parametrize(
    ("script", "nproc", "rank"),
    [(DDP, 2, 1), pytest.param(FSDP2, 2, 0, marks=pytest.mark.slow), pytest.param(DDP, 1, 0, marks=pytest.mark.slow)],
)
def test_watch_names_a_sleeping_rank_with_its_stack(dataset, tmp_path, script, nproc, rank):
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "collectives_")}
    argv = flags_of(dataset, tmp_path / "out", **FLAGS)
    codes, said = on_ranks(nproc, _main_that_sleeps, argv, 7, rank, 1000, script, env)
    assert codes == [1] * nproc
    assert rows(tmp_path / "out")[-1]["step"] == 6
    (error,) = errors_of(said[rank])
    assert "in step 7, forward/backward (--ddp_timeout 8): " in error
    assert "in sleep_here" in said[rank], "its stack"
    if nproc > 1:
        for text in said:
            (error,) = errors_of(text)
            assert re.search(rf"rank {rank} \(host {HOST}\)(, last heard of)? in step 7, forward/backward", error)
            assert f"rank {1 - rank} (host" not in error
        assert f"waiting for rank {rank} " in errors_of(said[rank])[0]
        assert re.search(r"at test_hangs\.py:\d+ in sleep_here", errors_of(said[rank])[0])
        records = [pickle.loads((tmp_path / f"collectives_{r}").read_bytes()) for r in range(nproc)]
        done = [max(entry["collective_seq_id"] for entry in record["entries"]) for record in records]
        assert done[rank] < done[1 - rank], "the flight recorder shows who has not come to the collective"
        for r, text in enumerate(said):
            assert f"Flight recorder: {tmp_path}/collectives_{r}\n" in text


def test_watch_ignores_a_slow_rank_within_the_timeout(dataset, tmp_path):
    argv = flags_of(dataset, tmp_path / "out", **FLAGS | {"max_steps": 8})
    codes, said = on_ranks(2, _main_that_sleeps, argv, 4, 1, TIMEOUT / 3, DDP, {})
    assert codes == [0, 0], said
    assert rows(tmp_path / "out")[-1]["step"] == 8


def _main_evaluating_slowly(argv: list[str], seconds: float) -> None:
    """train_ddp.py; each batch of an evaluation takes so long."""

    def slow(module, inputs) -> None:
        if isinstance(module, Esm2ForMaskedLM) and not module.training:
            time.sleep(seconds)

    torch.nn.modules.module.register_module_forward_pre_hook(slow)
    _main(argv)


def test_watch_ignores_a_long_evaluation(dataset, tmp_path):
    """Ten proteins on each rank, 0.7 seconds each."""
    flags = {"max_steps": 1, "do_eval": True, "per_device_eval_batch_size": 1, "ddp_timeout": 6}
    argv = flags_of(dataset, tmp_path, **flags, max_eval_samples=20, save_final_model=False)
    codes, said = on_ranks(2, _main_evaluating_slowly, argv, 0.7)
    assert codes == [0, 0], said
    assert json.loads((tmp_path / "eval_results.json").read_text())["eval_runtime"] > 6.5


def _compile_slowly(timeout_s: float, seconds: float) -> None:
    """A compiler that takes so long, under a watch that is at one mark all the while."""

    def slow_backend(graph, inputs):
        time.sleep(seconds)
        return graph.forward

    torch.compile(lambda x: x.cos() + 1, backend="eager")(torch.ones(3))  # what it imports takes its time, too
    watch = Watch(0, 1, None, timeout_s).start()
    watch.compilation_counts_as_progress()
    watch.mark("forward/backward", 1)
    result = torch.compile(lambda x: x.sin() + 1, backend=slow_backend)(torch.zeros(3))
    watch.end()
    print("compiled:", result.tolist())


def test_watch_ignores_compilation():
    """In a process of its own, which the watch would end."""
    codes, said = on_ranks(1, _compile_slowly, 3, 4)
    assert codes == [0], said
    assert said == ["compiled: [1.0, 1.0, 1.0]\n"]


def test_watch_ignores_a_suspended_process(dataset, tmp_path):
    """Ctrl-Z, and on again after seven seconds."""
    flags = {"max_steps": 200, "ddp_timeout": 5, "save_final_model": False}
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", **flags) as run:
        run.until_step(5)
        run.signal(signal.SIGSTOP)
        assert rows(tmp_path / "out")[-1]["step"] < 200
        time.sleep(7)
        run.signal(signal.SIGCONT)
        assert run.end() == [0], run.said()
    assert rows(tmp_path / "out")[-1]["step"] == 200


def test_watch_names_a_dead_rank_immediately(dataset, tmp_path):
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", 2, **FLAGS | {"ddp_timeout": 100}) as run:
        run.until_step(5)
        run.signal(signal.SIGKILL, 1)
        assert run.end(40) == [1, -9], "well before --ddp_timeout"
    (error,) = errors_of(run.said(0))
    assert error.startswith(f"error: another rank is gone: no answer from rank 1 (host {HOST}), last heard of ")


def test_torchrun_ends_a_job_with_a_stopped_rank(dataset, tmp_path):
    """It kills what has not gone by itself 30 s after the first rank has failed; no flag changes that (torch 2.13)."""
    job = torchrun(dataset, tmp_path / "out", 2, **FLAGS)
    try:
        assert wait_until(lambda: len(rows(tmp_path / "out")) > 5, lambda: job.poll() is None)
        os.kill(ranks_of(job.pid)[1], signal.SIGSTOP)
        said, _ = communicate(job, TIMEOUT + 30 + SLACK)
    finally:
        kill_all(job)
    assert job.returncode == 1
    assert f"no answer from rank 1 (host {HOST}), last heard of " in said


def test_watch_does_not_change_the_run(dataset, tmp_path):
    for seconds in (10, 1800):
        train(dataset, tmp_path / str(seconds), 2, max_steps=6, save_final_model=False, ddp_timeout=seconds)
    assert [row["loss"] for row in rows(tmp_path / "10")] == [row["loss"] for row in rows(tmp_path / "1800")]
