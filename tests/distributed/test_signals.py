"""A run stopped by a signal: all ranks agree, save and exit with status 75; the same command resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live_runs import (
    PREEMPTED,
    SAVE_POLL_S,
    LiveRun,
    assert_same_run,
    kill_all,
    newest_step,
    ranks_of,
    torchrun,
    wait_until,
)
from tests.patience import communicate
from tests.training_fixtures import ROOT, environment, rows, train, training_command

STEPS = 100
FLAGS = {"max_steps": STEPS, "save_steps": 1000, "per_device_train_batch_size": 1, "save_final_model": False}
LEG = 20  # steps between the checkpoints of an uninterrupted run


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The same run without interruption, by number of ranks."""
    directory, made = tmp_path_factory.mktemp("whole"), {}

    def run(nproc: int = 1, **flags):
        key = (nproc, *sorted(flags.items()))
        if key not in made:
            made[key] = directory / str(len(made))
            train(dataset, made[key], nproc, **FLAGS | flags | {"save_steps": LEG})
        return made[key]

    return run


def assert_goes_on(dataset: Path, out: Path, whole: Path, scratch: Path, nproc: int = 1, **flags) -> None:
    """The same command does what the uninterrupted run did, bit for bit: up to its next checkpoint, to be sooner done.

    One test runs to the end.
    """
    stop = (newest_step(out) // LEG + 1) * LEG
    train(dataset, out, nproc, **FLAGS | flags, stop_at_step=stop)
    assert_same_run(out, whole, stop, scratch, stopped=True)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGUSR1])
def test_stop_during_a_step_saves_after_it(dataset, whole, tmp_path, number):
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", **FLAGS, dataloader_num_workers=1) as run:
        run.until_step(5)
        run.signal(number)
        assert run.end() == [PREEMPTED]
    assert "Stopped by a signal, checkpoint saved" in run.said()
    assert "Traceback" not in run.said()
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    assert_goes_on(dataset, out, whole(), tmp_path)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_stop_of_one_rank_stops_all_at_the_same_step(dataset, whole, tmp_path, rank):
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", 2, **FLAGS) as run:
        run.until_step(5)
        run.signal(signal.SIGTERM, rank)
        assert run.end() == [PREEMPTED] * 2
    assert "Traceback" not in run.said(0) + run.said(1)
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    assert_goes_on(dataset, out, whole(2), tmp_path, 2)


def test_stop_during_evaluation_defers_it_to_the_next_start(dataset, whole, tmp_path):
    """Each evaluation is in metrics.jsonl once, also the ones that were broken off: at the start, and one twice."""
    flags = FLAGS | {"max_steps": 60, "do_eval": True, "eval_steps": 20, "eval_on_start": True}
    flags["per_device_eval_batch_size"] = 1
    out = tmp_path / "out"
    for evaluation, step in ((1, 0), (2, 20), (1, 20), (2, 40)):
        with LiveRun(dataset, out, tmp_path / "logs", **flags) as run:
            run.until(lambda n=evaluation: run.said().count("Running Evaluation") == n)
            run.signal(signal.SIGTERM)
            assert run.end() == [PREEMPTED], run.said()
        assert newest_step(out) == step
        if step:
            assert json.loads((out / f"checkpoint-{step}/trainer_state.json").read_text())["unfinished_row"]
    train(dataset, out, **flags)
    assert_same_run(out, whole(**flags), 60, tmp_path)
    assert [row["step"] for row in rows(out) if "eval_loss" in row] == [0, 20, 40, 60]


def test_stop_while_a_loader_hangs_still_saves(dataset, whole, tmp_path):
    """The worker is stopped (SIGSTOP), so the next batch never comes."""
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", 2, **FLAGS, dataloader_num_workers=1) as run:
        run.until_step(5)
        for worker in run.children(rank=1):
            os.kill(worker, signal.SIGSTOP)
        last = None

        def stands_still() -> bool:
            nonlocal last
            before, last = last, rows(out)[-1]["step"]
            return before == last

        assert wait_until(stands_still, run.alive, poll=1.0)
        workers = run.children(rank=0) + run.children(rank=1)
        run.signal(signal.SIGTERM)
        assert run.end() == [PREEMPTED] * 2
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    assert not [worker for worker in workers if os.path.exists(f"/proc/{worker}")]
    assert_goes_on(dataset, out, whole(2), tmp_path, 2)


@pytest.mark.parametrize("async_save", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stop_of_the_process_tree_during_a_save(dataset, whole, tmp_path, async_save):
    """As schedulers do: loader workers get the signal too, and outlive it until the run has saved."""
    flags = FLAGS | {"save_steps": 2, "async_save": async_save}
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", **flags, dataloader_num_workers=2) as run:
        run.until(lambda: newest_step(out) >= 4 and any(out.glob("tmp-checkpoint-*")), SAVE_POLL_S)
        for worker in run.children():
            os.kill(worker, signal.SIGTERM)
        run.signal(signal.SIGTERM)
        run.signal(signal.SIGTERM)
        assert run.end() == [PREEMPTED]
    assert "Traceback" not in run.said()
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    assert not list(out.glob("tmp-*"))
    assert_goes_on(dataset, out, whole(), tmp_path, **flags)


def test_stop_before_the_first_step_exits_immediately(dataset, tmp_path):
    """Rank 0 waits, in a collective, for a rank that never comes: no Python runs there that could notice a flag."""
    out = tmp_path / "out"
    run = LiveRun(dataset, out, tmp_path / "logs", 2, **FLAGS)
    run.processes.pop()
    with run:

        def listens() -> bool:
            status = Path(f"/proc/{run.processes[0].pid}/status").read_text()
            return bool(int(status.split("SigCgt:")[1].split()[0], 16) & 1 << signal.SIGTERM - 1)

        run.until(listens)
        run.signal(signal.SIGTERM)
        assert run.end() == [PREEMPTED]
    assert run.said().splitlines() == ["Stopped by a signal, before the first step: the same command starts again"]
    assert not out.exists()


def test_stop_during_the_last_evaluation_keeps_the_training(dataset, whole, tmp_path):
    flags = FLAGS | {"max_steps": LEG, "do_eval": True, "per_device_eval_batch_size": 1}
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", 2, **flags) as run:
        run.until_said("*** Evaluate ***")
        run.signal(signal.SIGUSR1)
        assert run.end() in ([PREEMPTED] * 2, [0, 0])
    assert newest_step(out) == LEG
    train(dataset, out, 2, **flags)
    assert (out / "test_results.json").exists()
    assert_same_run(out, whole(2, max_steps=LEG), LEG, tmp_path)


def test_stop_of_torchrun_saves_and_the_run_resumes(dataset, whole, tmp_path):
    out = tmp_path / "out"
    flags = FLAGS | {"dataloader_num_workers": 1}
    job = torchrun(dataset, out, 2, **flags)
    try:
        assert wait_until(lambda: bool(rows(out)) and rows(out)[-1]["step"] >= 5, lambda: job.poll() is None)
        ranks = ranks_of(job.pid)
        job.terminate()
        said, _ = communicate(job)
    finally:
        kill_all(job)
    assert "Stopped by a signal, checkpoint saved" in said
    assert len(ranks) == 2
    assert not [pid for pid in ranks.values() if os.path.exists(f"/proc/{pid}")]
    assert newest_step(out) == rows(out)[-1]["step"] < STEPS
    train(dataset, out, 2, **FLAGS)
    assert_same_run(out, whole(2), STEPS, tmp_path)


def test_ctrl_c_saves(dataset, whole, tmp_path):
    out = tmp_path / "out"
    command = training_command(dataset, out, **FLAGS, dataloader_num_workers=2)
    job = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(), cwd=ROOT, start_new_session=True
    )
    try:
        assert wait_until(lambda: len(rows(out)) > 5, lambda: job.poll() is None)
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: loader workers get it too
        _, said = communicate(job)
    finally:
        kill_all(job)
    assert job.returncode == PREEMPTED, said
    assert said.splitlines()[0].endswith(" - INFO - train_ddp.py: loading PyTorch")
    last = [line for line in said.splitlines() if " - INFO - " not in line]
    assert last == [CTRL_C]
    assert not list(out.glob("tmp-*"))
    assert newest_step(out) == rows(out)[-1]["step"]
    assert_goes_on(dataset, out, whole(), tmp_path, dataloader_num_workers=2)


CTRL_C = "interrupted: saving after this step; press Ctrl-C again to quit without saving"
LISTENS = """
import time
from common.cli import run
from common.distributed.stopping import StopRequest
def main():
    stop = StopRequest()
    stop.exit_at_once = {at_once}
    stop.install_handlers()
    print("listens", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("has heard", flush=True)
    time.sleep(60)
run(main)
"""


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        (LISTENS.format(at_once=False), 130, [CTRL_C]),
        (LISTENS.format(at_once=True), 130, ["interrupted, before the first step: the same command starts again"]),
        ("import common, time; print('imports', flush=True); time.sleep(60)", -2, []),
    ],
    ids=["in a step", "before the first", "during imports"],
)
def test_second_ctrl_c_quits_without_traceback(program, status, said):
    job = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    with job:
        job.stdout.readline()
        job.send_signal(signal.SIGINT)
        if "press Ctrl-C again" in "".join(said):
            assert job.stderr.readline() == f"{said[0]}\n"
            assert job.poll() is None
            job.stdout.readline()  # two signals before Python's handler has run would be one
            job.send_signal(signal.SIGINT)
            said = []
        last = communicate(job)[1]
        assert last.splitlines() == (said or ["interrupted"])
    assert job.returncode == status


@pytest.mark.parametrize("rank", [0, 1])
def test_dead_rank_ends_the_others_without_traceback(dataset, tmp_path, rank):
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", 2, **FLAGS) as run:
        run.until_step(5)
        run.signal(signal.SIGKILL, rank)
        codes = run.end()  # its time limit is a tenth of --ddp_timeout
    assert codes == ([-9, 1] if rank == 0 else [1, -9])
    errors = [line for line in run.said(1 - rank).splitlines() if " - INFO - " not in line]
    assert len(errors) == 1
    assert errors[0].startswith("error: " + ("" if rank else "rank 1: ") + "another rank is gone")
