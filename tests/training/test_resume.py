"""A run that is killed and started again is the run that was never killed: the same losses, weights, optimiser."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.live_runs import (
    SAVE_POLL_S,
    LiveRun,
    assert_same_run,
    kill_all,
    newest_step,
    ranks_of,
    torchrun,
    trajectory,
    wait_until,
)
from tests.training_fixtures import final_weights, relative_difference, rows, same_bits, train

KILLS = 6
STEPS = 24


def killed_again_and_again(data, output_dir, logs, nproc: int, kills: int, generator: random.Random, **flags) -> int:
    """Start the same command, kill -9 all its processes; `kills` times. Returns how often a save was under way."""
    torn = 0

    def writing() -> list[str]:
        return [name for name in os.listdir(output_dir) if name.startswith("tmp-checkpoint-")]

    for number in range(kills):
        reached = newest_step(output_dir)
        with LiveRun(data, output_dir, logs, nproc, **flags) as run:
            match number % 4:
                case 0:  # any moment, starting up included
                    at = time.monotonic() + generator.uniform(0, 1.5)
                    run.until(lambda at=at, n=reached + 2: time.monotonic() > at or newest_step(output_dir) >= n)
                case 1:  # between steps or in one
                    run.until(lambda at=reached + 1: newest_step(output_dir) >= at)
                    time.sleep(generator.uniform(0, 0.03))
                case _:  # while a checkpoint is being written
                    run.until(lambda: writing(), SAVE_POLL_S)
                    time.sleep(generator.uniform(0, 0.006))
            run.signal(signal.SIGKILL)
            assert run.end() == [-signal.SIGKILL] * nproc, f"ended by itself:\n{run.said()}"
        torn += bool(output_dir.exists() and writing())
    return torn


def test_resume_after_kill_9_is_bit_identical(dataset, tmp_path):
    flags = {"max_steps": STEPS, "save_steps": 1, "save_total_limit": 2, "dataloader_num_workers": 1}
    flags |= {"do_eval": True, "eval_steps": 7}
    train(dataset, tmp_path / "whole", **flags)
    killed = tmp_path / "killed"
    torn = killed_again_and_again(dataset, killed, tmp_path / "logs", 1, KILLS, random.Random(1), **flags)
    assert torn >= 1, "too few kills hit a save"
    assert 0 < newest_step(killed) < STEPS
    train(dataset, killed, **flags)
    assert_same_run(killed, tmp_path / "whole", STEPS, tmp_path)
    assert [row["step"] for row in rows(killed)] == list(range(1, STEPS + 1))
    assert same_bits(final_weights(killed), final_weights(tmp_path / "whole"))
    assert not list(killed.glob("tmp-*"))


@pytest.mark.slow
def test_resume_of_two_ranks_after_kill_9_is_bit_identical(dataset, tmp_path):
    flags = {"max_steps": 400, "save_steps": 1, "per_device_train_batch_size": 2, "save_final_model": False}
    flags |= {"warmup_steps": 10}
    killed = tmp_path / "killed"
    killed_again_and_again(dataset, killed, tmp_path / "logs", 2, 5, random.Random(2), **flags)
    end = newest_step(killed) + 3
    for out in (killed, tmp_path / "whole"):
        train(dataset, out, nproc=2, **flags, stop_at_step=end)
    assert_same_run(killed, tmp_path / "whole", end, tmp_path)


@pytest.mark.slow
def test_resume_when_torchrun_restarts_lost_ranks(dataset, tmp_path):
    """With --overwrite_output_dir on the command line, as in the guides: a restart must not wipe out the run."""
    flags = {
        "max_steps": 700,
        "warmup_steps": 10,
        "save_steps": 2,
        "save_total_limit": 3,
        "per_device_train_batch_size": 1,
    }
    flags |= {"per_device_train_batch_size": 1, "max_seq_length": 256}
    flags |= {"save_final_model": False, "script": "train_fsdp2.py"}
    out = tmp_path / "killed"
    job = torchrun(dataset, out, 2, "--max_restarts=2", **flags, overwrite_output_dir=True)
    try:
        assert wait_until(lambda: newest_step(out) >= 4, lambda: job.poll() is None)
        before = ranks_of(job.pid)
        os.kill(before[1], signal.SIGKILL)
        assert wait_until(lambda: ranks_of(job.pid).get(1, before[1]) != before[1], lambda: job.poll() is None)
        reached = newest_step(out)
        assert wait_until(lambda: newest_step(out) >= reached + 4, lambda: job.poll() is None)
    finally:
        kill_all(job)
    end = newest_step(out) + 2
    for directory in (out, tmp_path / "whole"):
        train(dataset, directory, nproc=2, **flags, stop_at_step=end)
    assert_same_run(out, tmp_path / "whole", end, tmp_path)


def test_resume_with_other_number_of_loader_workers(dataset, tmp_path):
    flags = {"max_steps": 12, "save_final_model": False}
    train(dataset, tmp_path / "whole", **flags)
    for stop, workers in ((4, 0), (8, 3), (None, 1)):
        train(dataset, tmp_path / "changed", **flags, stop_at_step=stop, dataloader_num_workers=workers)
    assert_same_run(tmp_path / "changed", tmp_path / "whole", 12, tmp_path)


def test_resume_with_other_world_size_keeps_global_batch(dataset, tmp_path):
    """4 packs a step throughout: 1 rank x 4, then 2 ranks x 2, then 4 ranks x 1; losses agree to fp32 rounding."""
    flags = {"max_steps": 12, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
    train(dataset, tmp_path / "whole", **flags)
    said = [
        train(dataset, tmp_path / "changed", nproc, **flags, stop_at_step=stop)
        for nproc, stop in ((1, 4), (2, 8), (4, None))
    ]
    assert "Accumulation is 2, to keep 4 packs a step" in said[1]
    assert "Accumulation is 1, to keep 4 packs a step" in said[2]
    whole, changed = trajectory(tmp_path / "whole"), trajectory(tmp_path / "changed")
    assert [row["step"] for row in changed] == list(range(1, 13))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in changed] == pytest.approx([row[key] for row in whole], rel=1e-5)
    assert [row["tokens"] for row in changed] == [row["tokens"] for row in whole]
    assert relative_difference(final_weights(tmp_path / "changed"), final_weights(tmp_path / "whole")) < 1e-5
