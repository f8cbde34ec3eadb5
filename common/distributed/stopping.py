"""Stop on SIGTERM (Kubernetes, torchrun, scancel), SIGUSR1 (sbatch --signal) or Ctrl-C: save a checkpoint and exit.

What a signal does depends on the moment:
- before the first step (`StopRequest.exit_at_once`) there is nothing to save: the process exits immediately;
- while the run waits for a loader worker (`next_unless_stopped`) the wait ends, so that a hanging one costs no save;
- at any other moment it is remembered: the ranks agree with a step's loss all-reduce or before an evaluation batch.
A second Ctrl-C ends the process at once, without a save. The exit status is PREEMPTED. Python's defaults hold in the
first seconds, while torch is imported: the signal kills the process, and nothing is lost.

The handler sets a flag and raises nothing: an exception could start in any frame. In an at-fork hook Python drops it,
and the lock that the hook was to release stays held. Waits look at the flag (`StopRequest.check`), a thread does what
cannot wait for the main thread.

If torchrun itself is killed, the kernel sends its ranks SIGTERM. A rank that does not act on it within ORPHAN_S, since
its main thread is stuck, is ended by the same thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Exit status of a run that was stopped by a signal and has saved: sysexits.h's "temporary failure, try again". Batch
# systems requeue on it; 0 means finished, 2 bad input, 1 a bug.
PREEMPTED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INTERRUPTED = 128 + signal.SIGINT
ORPHAN_S = 45.0  # that a rank without a launcher has to act on a stop signal, and again to exit; a save is not limited


def stop_with_launcher() -> None:
    """Have the kernel send this rank SIGTERM when torchrun dies (Linux only).

    Ranks have sessions of their own: orphans would train on and hold the output directory and devices against a
    restarted job. Call it early: a rank orphaned before the call is not detected.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _set_parent_death_signal(signal.SIGTERM)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, or exit now if it has (Linux only).

    A loader worker inherits its rank's connections: until it ends, the other ranks wait for the dead one. By itself a
    worker checks for its parent every five seconds.
    """
    _set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


class Preempted(Exception):
    """All ranks have agreed to stop, and the checkpoint is saved."""


class _WaitEnded(Exception):
    """A wait found that a signal had asked this process to stop."""


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Start child processes with the stop signals blocked, until they have handlers of their own (`ignore_signals`).

    A child inherits the pipe of `StopRequest`: a signal that it receives before would be read as one for its parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """In a child process: ignore the stop signals, those that came while they were blocked included."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


class StopRequest:
    """Whether a signal has asked this process to stop.

    requested: set by a handler, and by a thread if the main thread is blocked outside Python. exit_at_once: there is
    nothing to save yet; exit_note: what the exit message says then.
    """

    def __init__(self) -> None:
        self.requested = False
        self.exit_at_once = True
        self.exit_note = "before the first step: the same command starts again"
        self._saving = self._exiting = False
        self._launcher: int | None = None
        self._orphaned_at: float | None = None

    def install_handlers(self) -> None:
        # A Python handler runs between bytecodes, so not while the process is blocked in a collective whose peers are
        # gone. The interpreter also writes each signal's number to this pipe at once. Set it up before the handlers:
        # a signal in between would be recorded and never read.
        signals, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._launcher = os.getppid()
        threading.Thread(target=self._watch, args=(signals,), name="signal reader", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def save_first(self) -> None:
        """From now on a signal no longer ends the process at once: the ranks agree on it and save."""
        self.exit_at_once = False

    def agreed(self) -> None:
        """All ranks act on the request: a save may take longer than ORPHAN_S."""
        self._saving = True

    def ignore(self) -> None:
        """During exit: later signals must not change the exit status. Ctrl-C ends the process."""
        self._saving, self._exiting, self._orphaned_at = False, True, None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    @staticmethod
    def restore_handlers() -> None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def check(self) -> None:
        """To be called again and again in a wait inside `next_unless_stopped`, which it ends after a signal."""
        if self.requested:
            raise _WaitEnded

    def next_unless_stopped(self, items: Iterator, *default):
        """`next(items, *default)`, or None once a signal has arrived, even if the next item never comes."""
        try:
            self.check()
            return next(items, *default)
        except _WaitEnded:
            return None

    def _handle(self, number, frame) -> None:
        self.requested = True

    def _watch(self, pipe: int) -> None:
        """Read signals from the pipe for as long as the process lives."""
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        heard = False
        while True:
            if poll.poll(None if self._launcher is None else 1000):
                for number in os.read(pipe, 16):
                    if number in SIGNALS:
                        self._act_on(number, heard)
                        heard = True
            self._end_if_orphaned()

    def _act_on(self, number: int, again: bool) -> None:
        is_main = int(os.environ.get("RANK", 0)) == 0
        interrupted = number == signal.SIGINT
        if self.exit_at_once:
            if is_main:
                reason = "interrupted" if interrupted else "Stopped by a signal"
                os.write(2, f"{reason}, {self.exit_note}\n".encode())
            os._exit(INTERRUPTED if interrupted else PREEMPTED)
        if interrupted and (again or self._exiting):
            if is_main:
                os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        if interrupted and is_main:
            os.write(2, b"interrupted: saving after this step; press Ctrl-C again to quit without saving\n")
        self.requested = True

    def _end_if_orphaned(self) -> None:
        """End this process if its launcher is gone and its main thread does not stop."""
        if self._launcher is None or os.getppid() == self._launcher or self._saving:
            return
        now = time.monotonic()
        self._orphaned_at = self._orphaned_at or now
        if now - self._orphaned_at > ORPHAN_S:
            os.write(2, b"error: the launcher is gone, and this rank did not stop by itself. Its stacks:\n")
            faulthandler.dump_traceback(file=2, all_threads=True)
            os._exit(1)
