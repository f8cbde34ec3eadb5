"""Being told to stop by SIGTERM (Kubernetes, torchrun, scancel), SIGUSR1 (sbatch --signal) or Ctrl-C: save, and end.

What the signal does depends on the moment:
- before the first step (`StopRequest.at_once`) there is nothing to save: the process ends there and then;
- while the run waits for data (`wait_for`) the wait is broken off: a loader that hangs cannot cost the save;
- at any other moment it is remembered, and the ranks agree on it with a step's loss or before an evaluation batch.
A second Ctrl-C does not wait for that: the process is interrupted where it is.
When torchrun itself is killed the kernel sends SIGTERM in its name.
The exit status is PREEMPTED each time. During the first seconds, while Python imports torch, the default holds: the
process dies of the signal, with nothing lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

# Exit status of a run that was told to stop and has saved: sysexits.h's "temporary failure, try again". A batch
# system requeues on it; 0 means finished, 2 bad input, 1 a bug.
PREEMPTED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def stop_with_the_launcher() -> None:
    """Have the kernel send this rank SIGTERM when torchrun dies (Linux; elsewhere nothing happens).

    Ranks have sessions of their own: orphaned, they would train on, and hold output directory and devices against the
    very job that is started in their place. To be called early: an orphan of before cannot be told from others.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _when_parent_dies(signal.SIGTERM)


def end_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent has died, or now if it has (Linux only).

    A loader's worker holds the connections of the rank it was forked from: until it ends, the other ranks wait for
    the dead one. By itself it looks for its parent once in five seconds.
    """
    _when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _when_parent_dies(number: int) -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


class Preempted(Exception):
    """All ranks have agreed to stop, and the state is saved."""


class _BreakOff(BaseException):
    """Raised by the signal handler out of a wait; no library's `except Exception` must swallow it."""


class StopRequest:
    """Whether this process was told to stop."""

    def __init__(self) -> None:
        self.requested = False
        self.told = False  # the same, known also while the main thread runs no Python
        self.at_once = True  # until the run has something to save
        self.where = "before the first step: the same command starts again"  # what is said of a stop at once
        self._waiting = False

    def listen(self) -> None:
        # A Python handler runs between two lines of Python, so not while the process waits in a collective for ranks
        # that are gone. The interpreter also writes each signal's number to this pipe, at once. It comes first: a
        # signal between the two would be remembered and never looked at.
        self._pipe, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals before the first step", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def save_first(self) -> None:
        """From now on a signal no longer ends the process at once: the ranks agree on it and save."""
        self.at_once = False

    @staticmethod
    def ignore() -> None:
        """For the way out: a signal now must not change the exit status. Ctrl-C is meant, and may."""
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_IGN)

    @staticmethod
    def default() -> None:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def wait_for(self, items: Iterator):
        """The next item, or None as soon as the signal has come, however long the item takes."""
        if self.requested:
            return None
        self._waiting = True
        try:
            return next(items)
        except _BreakOff:
            return None
        finally:
            self._waiting = False

    def _handle(self, number, frame) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._waiting:
            self._waiting = False  # once: a second signal finds the process on its way out
            raise _BreakOff

    def _watch(self) -> None:
        says = int(os.environ.get("RANK", 0)) == 0
        while number := os.read(self._pipe, 1):
            if number[0] not in SIGNALS:
                continue
            interrupted = number[0] == signal.SIGINT
            if self.at_once:
                told = b"interrupted" if interrupted else b"Stopped as asked"
                if says:
                    os.write(2, told + f", {self.where}\n".encode())
                os._exit(128 + signal.SIGINT if interrupted else PREEMPTED)
            if interrupted and says and not self.told:
                os.write(2, b"interrupted: saving after this step; once more to leave without\n")
            self.told = True
