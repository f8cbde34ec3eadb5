"""train_fsdp2.py, killed again and again at random moments: the run that results is the one that was never killed.

The long form: pytest tests/training/test_soak.py -s --soak-rounds 30 [--soak-seed N]
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.checkpoint.files import PARTIAL
from tests.live_runs import (
    PREEMPTED,
    SAVE_POLL_S,
    LiveRun,
    assert_same_run,
    is_running,
    kill_all,
    newest_step,
    outcome,
    ranks_of,
    torchrun,
    trajectory,
    wait_until,
)
from tests.patience import communicate
from tests.training_fixtures import relative_difference, rows, train

pytestmark = pytest.mark.soak
FSDP = "train_fsdp2.py"
MOMENTS = ("a step", "a save", "any", "a save")
STEPS_A_ROUND = 12  # well above what a round takes before it is struck: there is always something to kill
START_S = 6.0  # a torchrun and its ranks are at work after this, on a busy machine
FLAGS = {"script": FSDP, "save_steps": 2, "save_total_limit": 3, "packs_per_step": 4, "save_final_model": False}
FLAGS |= {"per_device_train_batch_size": 1}
# Layouts of the second test: (ranks, flags).
HYBRID = {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}
ROUNDING = 1e-5  # fp32; 30 rounds on six layouts came to 8e-7 at most
LAYOUTS = ((2, {}), (4, HYBRID), (2, {"script": "train_ddp.py"}), (1, {}), (4, {}), (1, {"script": "train_ddp.py"}))


def in_turn(kinds: tuple, rounds: int, generator: random.Random) -> list:
    """`rounds` of `kinds` in a random order that leaves none out."""
    return [kind for _ in range(0, rounds, len(kinds)) for kind in generator.sample(kinds, len(kinds))][:rounds]


def saving(out: Path) -> bool:
    return out.exists() and any(name.startswith(PARTIAL) for name in os.listdir(out))


def wait_for(moment: str, out: Path, alive: Callable[[], bool], generator: random.Random) -> str:
    """Wait for a random moment of that kind; returns it in words."""
    steps, fraction = generator.randint(1, 6), generator.random()
    goal = newest_step(out) + steps
    if moment == "any":  # while starting, or soon after
        at = time.monotonic() + START_S * fraction
        wait_until(lambda: time.monotonic() > at or newest_step(out) >= goal, alive)
        return f"at most {START_S * fraction:.3f} s after the start"
    wait_until(lambda: newest_step(out) >= goal, alive)
    if moment == "a save":
        while alive() and not saving(out):
            time.sleep(SAVE_POLL_S)
    seconds = fraction * (0.005 if moment == "a save" else 0.1)
    time.sleep(seconds)
    return f"{seconds:.3f} s into {moment} after step {goal}"


def strike(job: subprocess.Popen, kind: str, generator: random.Random) -> list[int]:
    """What befalls a torchrun and its ranks; returns the ranks' process ids."""
    ranks = [pid for _, pid in sorted(ranks_of(job.pid).items())]
    one = [generator.choice(ranks)] if ranks else [job.pid]
    victims = {"one rank": one, "all": [*ranks, job.pid], "launcher": [job.pid], "SIGTERM": [job.pid]}[kind]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    return ranks


def assert_each_step_once(out: Path, steps: int) -> None:
    assert [row["step"] for row in rows(out)] == list(range(1, steps + 1))
    assert not saving(out)


def test_soak_killed_torchrun_is_bit_identical(dataset, tmp_path, rounds, generator):
    """Ranks, launcher or all killed, or asked to stop; each time the same command is given at once.

    The short form leaves out what tests/training/test_resume.py and tests/distributed/test_signals.py do with a
    torchrun.
    """
    all_kinds = ("one rank", "launcher", "all", "SIGTERM")
    kinds = in_turn(all_kinds, rounds, generator) if rounds else ["launcher", "all"]
    rounds = len(kinds)
    flags = FLAGS | {"max_steps": rounds * STEPS_A_ROUND}
    train(dataset, tmp_path / "whole", 2, **flags)
    out, torn, left = tmp_path / "killed", 0, []
    try:
        for number, kind in enumerate(kinds):
            reached = newest_step(out)
            job = torchrun(dataset, out, 2, **flags)
            try:
                alive = lambda job=job: job.poll() is None  # noqa: E731
                moment = wait_for(MOMENTS[number % 4], out, alive, generator)
                assert alive(), f"ended by itself, {moment}:\n{job.communicate()[0]}"
                left = strike(job, kind, generator)
                said, _ = communicate(job)  # its ranks hold the pipe: until they have ended, too
            finally:
                kill_all(job)
            assert wait_until(lambda left=left: not any(map(is_running, left)))
            torn += saving(out)
            print(f"round {number}: {kind}, {moment}; torn save: {saving(out)}; step {reached} -> {newest_step(out)}")
            assert newest_step(out) >= reached
    finally:
        for pid in filter(is_running, left):
            os.kill(pid, signal.SIGKILL)
    train(dataset, out, 2, **flags)
    assert_each_step_once(out, flags["max_steps"])
    assert_same_run(out, tmp_path / "whole", flags["max_steps"], tmp_path)
    # Only a kill of all ranks leaves one: others are cleared away, or finished, by the rank that writes it.
    assert torn >= rounds // 15, "too few kills tore a save"


def test_soak_killed_and_resharded_is_same_run(dataset, tmp_path, rounds, generator):
    """FSDP2, hybrid and DDP on 1, 2 and 4 ranks, killed (all ranks or one) or asked to stop; sums in another order."""
    rounds = rounds or 2
    flags = FLAGS | {"max_steps": rounds * STEPS_A_ROUND}
    steps = flags["max_steps"]
    train(dataset, tmp_path / "whole", 2, **flags)
    out = tmp_path / "killed"
    layouts = in_turn(LAYOUTS, rounds, generator)
    kinds = in_turn(("one rank", "all", "SIGTERM"), rounds, generator)
    for number, ((nproc, layout), kind) in enumerate(zip(layouts, kinds, strict=True)):
        reached = newest_step(out)
        with LiveRun(dataset, out, tmp_path / "logs", nproc, **flags | layout) as run:
            moment = wait_for(MOMENTS[number % 2], out, run.alive, generator)
            victim = None if kind == "all" else generator.randrange(nproc)
            run.signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL, victim)
            codes = run.end()
        expected = {"SIGTERM": {PREEMPTED}, "all": {-signal.SIGKILL}, "one rank": {-signal.SIGKILL, 1}}[kind]
        assert set(codes) <= expected, f"{codes}, {moment}:\n{run.said()}"
        print(f"round {number}: {kind} of {nproc} {layout}, {moment}; step {reached} -> {newest_step(out)}")
        assert newest_step(out) >= reached
    train(dataset, out, 2, **flags)
    assert_each_step_once(out, steps)
    found, expected = trajectory(out), trajectory(tmp_path / "whole")
    apart = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(found, expected, strict=True))
    tensors = {
        name: outcome(where, step, tmp_path)
        for name, where, step in (("it", out, steps), ("whole", tmp_path / "whole", steps), ("before", out, steps - 2))
    }
    for part in ("model/", "exp_avg"):  # weights; both moments of the optimiser
        it, whole, before = ({k: v for k, v in t.items() if part in k} for t in tensors.values())
        rounding, steps_apart = relative_difference(it, whole), relative_difference(it, before)
        print(f"{part}: {rounding:.1e} from the whole run, {steps_apart:.1e} in two steps; losses {apart:.1e}")
        assert rounding < ROUNDING
        assert steps_apart > 30 * ROUNDING, "the bound would not tell that a step is missing"
    assert apart < ROUNDING


def test_soak_stopped_after_resume_ends_and_saves(dataset, tmp_path, rounds, generator):
    """SIGTERM within two seconds of "Resuming after": workers are forked, the first batches and steps are made.

    The long form: --soak-rounds 100.
    """
    out = tmp_path / "out"
    flags = {"max_steps": 100_000, "save_steps": 100_000, "save_total_limit": 1, "dataloader_num_workers": 2}
    flags |= {"per_device_train_batch_size": 1, "save_final_model": False}
    train(dataset, out, **flags, stop_at_step=1)
    for number in range(rounds or 3):
        reached, delay = newest_step(out), generator.choice((0.12, 2.0)) * generator.random()
        with LiveRun(dataset, out, tmp_path / "logs", **flags) as run:
            run.until_said("Resuming after")
            time.sleep(delay)
            run.signal(signal.SIGTERM)
            assert run.end() == [PREEMPTED], run.said()
        assert "Traceback" not in run.said()
        print(f"round {number}: {delay:.3f} s after it resumed; step {reached} -> {newest_step(out)}", flush=True)
    assert_each_step_once(out, newest_step(out))
