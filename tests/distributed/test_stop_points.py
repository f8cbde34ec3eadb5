"""SIGTERM at many points of a run: it ends in time, saved or untouched, and the next start goes on from there.

A profile hook counts the main thread's calls and returns in each phase of a run, and sends the signal at one of them.
The long form has 240 points: pytest tests/distributed/test_stop_points.py --slow
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.popen_fork import Popen
from pathlib import Path
from types import FrameType

import pytest

from common.checkpoint.checkpointer import Checkpointer
from common.distributed import process_group
from common.distributed.stopping import StopRequest
from common.training import loop
from common.training.step import Stepper
from tests.live_runs import PREEMPTED, assert_same_run, newest_step
from tests.marks import cases
from tests.training_fixtures import _main, flags_of, on_ranks, train

STEPS = 100  # of a whole run
STEPS_A_ROUND = 2  # of a run that no signal stops
FLAGS = {"max_steps": STEPS, "save_steps": 1, "save_total_limit": 2, "dataloader_num_workers": 2}
FLAGS |= {"per_device_train_batch_size": 1, "save_final_model": False}
MARKERS = {  # the function whose call begins a phase, which lasts until the next one
    process_group._exit_status.__wrapped__: "setup",  # the handlers are there
    StopRequest.save_first: "first batch",
    Popen._launch: "fork",
    Stepper.step: "step",
    Checkpointer.save: "save",
    loop.end: "end",
    StopRequest.restore_handlers: "",
    StopRequest.ignore: "",
}
BEGINS = {function.__code__: phase for function, phase in MARKERS.items()}
PHASES = [phase for phase in MARKERS.values() if phase]


class SignalAt:
    """A profile hook that sends this process SIGTERM at event `number` of a phase; 0: it only counts.

    only: the function whose calls count as events.
    """

    def __init__(self, phase: str, number: int, only: Callable | None = None):
        self.point, self.phase, self.only = (phase, number), "", only
        self.process, self.events = os.getpid(), dict.fromkeys(["", *PHASES], 0)

    def __call__(self, frame: FrameType, event: str, _) -> None:
        if event == "call" and frame.f_code in BEGINS:
            self.phase = BEGINS[frame.f_code]
        if self.only is None or (event == "call" and frame.f_code is self.only.__code__):
            self.events[self.phase] += 1
            if (self.phase, self.events[self.phase]) == self.point and os.getpid() == self.process:
                os.write(2, b"SIGTERM\n")
                os.kill(self.process, signal.SIGTERM)
        if event == "return" and frame.f_code is Popen._launch.__code__:
            self.phase = "first batch"


def _train_with_signal(argv: list[str], *where) -> None:
    hook = SignalAt(*where)
    os.register_at_fork(after_in_child=lambda: sys.setprofile(None))
    sys.setprofile(hook)
    try:
        _main(argv)
    finally:
        sys.setprofile(None)
        print(json.dumps(hook.events))


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    train(dataset, out, **FLAGS | {"save_steps": STEPS})
    return out


def assert_stops(dataset: Path, out: Path, phase: str, points: int, only: Callable | None = None) -> None:
    """Runs that each go on where the one before ended, stopped at points spread evenly over a phase."""

    def start(number: int) -> tuple[int, str]:
        argv = flags_of(dataset, out, **FLAGS, stop_at_step=newest_step(out) + STEPS_A_ROUND)
        (code,), (said,) = on_ranks(1, _train_with_signal, argv, phase, number, only)
        return code, said

    code, said = start(0)
    assert code == 0, said
    events, stopped = json.loads(said.splitlines()[-1])[phase], 0
    assert events >= points
    for point in range(points):
        reached = newest_step(out)
        code, said = start(1 + events * point // points)
        done = newest_step(out) == reached + STEPS_A_ROUND
        assert code == PREEMPTED or (done and code == 0), said
        assert "Traceback" not in said
        assert ": skipped: " not in said
        if phase != "setup":
            assert f"Resuming after step {reached}" in said
        stopped += "SIGTERM" in said
    assert stopped > points // 2, "a run has fewer events than the one in which they were counted"


@pytest.mark.parametrize("points", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", cases(PHASES, slow={"setup", "step", "end"}))
def test_stop_at_any_point_ends_and_the_next_start_resumes(dataset, whole, tmp_path, phase, points):
    out = tmp_path / "out"
    assert_stops(dataset, out, phase, points)
    train(dataset, out, **FLAGS)
    assert_same_run(out, whole, STEPS, tmp_path)


@pytest.mark.skipif(not hasattr(logging, "_releaseLock"), reason="from Python 3.13 on the hook is no Python function")
def test_stop_in_the_at_fork_hook_of_logging_leaves_no_lock_held(dataset, tmp_path):
    """Of both workers. An exception that a signal handler raised there was dropped, and with it the release."""
    assert_stops(dataset, tmp_path / "out", "fork", 2, only=logging._releaseLock)
