"""How long tests wait: seconds of an idle machine, which pass more slowly the busier this one is.

A limit only ends a test that hangs. Seconds of a clock would also end one that shares its cores with forty processes.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

TIMEOUT_S = 180  # of a run that takes seconds
POLL_S = 0.01


def slowdown() -> float:
    """How many processes want each core, at least 1: of the last minute, or right now, whichever is more."""
    try:
        last_minute, _, _, now, *_ = Path("/proc/loadavg").read_text().split()
    except OSError:
        last_minute, now = str(os.getloadavg()[0]), "0/0"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, float(last_minute) / cores, int(now.partition("/")[0]) / cores)


class Limit:
    """seconds: from its making on. To be asked every second or more often."""

    def __init__(self, seconds: float = TIMEOUT_S):
        self.seconds, self._left, self._asked = seconds, seconds, time.monotonic()

    def passed(self) -> bool:
        now = time.monotonic()
        self._left -= (now - self._asked) / slowdown()
        self._asked = now
        return self._left < 0


def wait_until(
    happened: Callable[[], bool],
    alive: Callable[[], bool] = lambda: True,
    poll: float = POLL_S,
    said: Callable[[], str] = str,
    seconds: float = TIMEOUT_S,
) -> bool:
    """Poll until it happened (True) or nothing is alive that could make it happen (False).

    said: what an observer wants to read where neither comes.
    """
    limit = Limit(seconds)
    while not happened():
        if not alive():
            return happened()
        assert not limit.passed(), f"nothing happened:\n{said()}"
        time.sleep(poll)
    return True


def join(processes: Iterable[BaseProcess], seconds: float = TIMEOUT_S) -> None:
    """Wait for processes of multiprocessing. Those that have not ended by then have no exit code."""
    limit = Limit(seconds)
    for process in processes:
        while process.exitcode is None and not limit.passed():
            process.join(1.0)


def receive(queue: Queue, seconds: float = TIMEOUT_S) -> object:
    """The next item of a queue of multiprocessing; queue.Empty where none comes."""
    limit = Limit(seconds)
    while True:
        try:
            return queue.get(timeout=1.0)
        except Empty:
            if limit.passed():
                raise


def communicate(job: subprocess.Popen, seconds: float = TIMEOUT_S, text: str | None = None) -> tuple[str, str]:
    """Its `communicate`; subprocess.TimeoutExpired where it does not end. text: for its standard input."""
    limit = Limit(seconds)
    while True:
        try:
            return job.communicate(text, timeout=1.0)
        except subprocess.TimeoutExpired:
            if limit.passed():
                raise
            text = None  # is being sent


def run(
    command: list, seconds: float = TIMEOUT_S, text: str | None = None, **options
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command, what it prints captured as text; killed where it does not end."""
    pipes = {"stdin": None if text is None else subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes | {"text": True} | options) as job:
        try:
            stdout, stderr = communicate(job, seconds, text)
        except BaseException:
            job.kill()
            raise
    return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)
