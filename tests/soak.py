"""Something that is killed again and again at random moments: in the end it has done what it does when left alone.

A subject is a command and how its results are compared. A kill is SIGKILL, of all of its processes or of a random one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.forked import ROOT
from tests.live_runs import is_running
from tests.patience import communicate, wait_until
from tests.training_fixtures import environment
from tests.warm_python import at_work, python

POLL_S = 0.0005  # a checkpoint is written in some 10 ms


@dataclass(frozen=True)
class Subject:
    """command: the words after `python` that do the work into a directory, and resume from an unfinished one.

    assert_same: (directory, one that was made without a kill). critical: of a directory, whether something is being
    written that is worth a kill right now; a random part of the kills waits for that. real: whether it needs a real
    interpreter, which what starts processes with multiprocessing's `spawn` does.
    """

    command: Callable[[Path], list]
    assert_same: Callable[[Path, Path], None]
    critical: Callable[[Path], bool] | None = None
    real: bool = False

    def start(self, out: Path) -> subprocess.Popen:
        words = [sys.executable if self.real else python(), *map(str, self.command(out))]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(words, **pipe, env=environment(), cwd=ROOT, start_new_session=True)

    def finish(self, out: Path) -> None:
        """Let it work until it is done."""
        job = self.start(out)
        try:
            said, _ = communicate(job)
        finally:
            kill(family(job.pid))
        assert job.returncode == 0, said


def soak(subject: Subject, scratch: Path, kills: int, generator: random.Random) -> None:
    """Kill it so many times. Each time that it gets to its end the results are compared, and it begins anew."""
    whole, started, run = scratch / "whole", time.monotonic(), 0
    subject.finish(whole)
    duration = time.monotonic() - started  # too long: the first run of a session waits for imports
    for number in range(kills):
        while True:
            out, started = scratch / f"killed-{run}", time.monotonic()
            is_new = not out.exists()
            if strike(subject, out, duration, generator, f"kill {number}"):
                break
            if is_new:
                duration = min(duration, time.monotonic() - started)
            subject.assert_same(out, whole)
            run += 1
    subject.finish(scratch / f"killed-{run}")
    subject.assert_same(scratch / f"killed-{run}", whole)


def strike(subject: Subject, out: Path, duration: float, generator: random.Random, title: str) -> bool:
    """Start it and kill it at a random moment within `duration` seconds; False if it got to its end before."""
    delay, waits, alone = generator.uniform(0, duration), generator.random() < 0.5, generator.random() < 0.5
    job = subject.start(out)
    victims: list[int] = []
    try:
        with suppress(subprocess.TimeoutExpired):
            job.wait(delay)
        if subject.critical and waits:
            wait_until(lambda: subject.critical(out), lambda: job.poll() is None, POLL_S)
        everyone = list(family(job.pid)) if job.poll() is None else []
        victims = [generator.choice(everyone)] if alone and everyone else everyone
        kill(victims)
        said, _ = communicate(job)  # whoever is left holds the pipe: until all have ended
    finally:
        kill(family(job.pid))
    assert wait_until(lambda: not any(map(is_running, victims)))
    if job.returncode == 0:
        return False
    assert victims, f"ended by itself with {job.returncode}:\n{said}"
    while_writing = bool(subject.critical and subject.critical(out))
    print(f"{title}: {'one' if alone else 'all'} of {len(everyone)}, {delay:.1f} s; torn: {while_writing}", flush=True)
    return True


def kill(processes: Iterable[int]) -> None:
    for pid in list(processes):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def family(pid: int) -> Iterator[int]:
    """The ids of a process, of its children and of theirs, as far as they are there."""
    with suppress(OSError):
        pid = at_work(pid)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from family(int(child))
        yield pid
