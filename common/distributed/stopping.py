"""Stop on SIGTERM (Kubernetes, torchrun, scancel), SIGUSR1 (sbatch --signal) or Ctrl-C: save a checkpoint and exit.

What a signal does depends on the moment:
- before the first step (`StopRequest.exit_at_once`) there is nothing to save: the process exits immediately;
- while the run waits for data (`next_unless_stopped`) the wait ends, so that a hanging loader does not cost the save;
- at any other moment it is remembered: the ranks agree with a step's loss all-reduce or before an evaluation batch.
A second Ctrl-C raises KeyboardInterrupt where the process is. If torchrun itself is killed, the kernel sends its ranks
SIGTERM. The exit status is PREEMPTED. Python's defaults hold in the first seconds, while torch is imported: the signal
kills the process, and nothing is lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator

# Exit status of a run that was stopped by a signal and has saved: sysexits.h's "temporary failure, try again". Batch
# systems requeue on it; 0 means finished, 2 bad input, 1 a bug.
PREEMPTED = 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


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
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


class Preempted(Exception):
    """All ranks have agreed to stop, and the checkpoint is saved."""


class _WaitInterrupted(BaseException):
    """Raised by the signal handler inside a wait; a BaseException, so that no `except Exception` swallows it."""


class StopRequest:
    """Whether a signal has asked this process to stop.

    requested: set by the Python signal handler. signalled: the same, set by a thread, so also while the main thread
    is blocked outside Python. exit_at_once: there is nothing to save yet; exit_note: what the exit message says then.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signalled = False
        self.exit_at_once = True
        self.exit_note = "before the first step: the same command starts again"
        self._waiting = False

    def install_handlers(self) -> None:
        # A Python handler runs between bytecodes, so not while the process is blocked in a collective whose peers are
        # gone. The interpreter also writes each signal's number to this pipe at once. Set it up before the handlers:
        # a signal in between would be recorded and never read.
        signals, end = os.pipe()
        os.set_blocking(end, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        threading.Thread(target=self._read_signals, args=(signals,), name="signal reader", daemon=True).start()
        for number in SIGNALS:
            signal.signal(number, self._handle)

    def save_first(self) -> None:
        """From now on a signal no longer ends the process at once: the ranks agree on it and save."""
        self.exit_at_once = False

    @staticmethod
    def ignore() -> None:
        """During exit: later signals must not change the exit status. Ctrl-C still interrupts."""
        StopRequest._reset(signal.SIG_IGN)

    @staticmethod
    def restore_handlers() -> None:
        StopRequest._reset(signal.SIG_DFL)

    @staticmethod
    def _reset(handler: signal.Handlers) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else handler)

    def next_unless_stopped(self, items: Iterator):
        """The next item, or None once a signal has arrived, even if the item never comes."""
        if self.requested:
            return None
        self._waiting = True
        try:
            return next(items)
        except _WaitInterrupted:
            return None
        finally:
            self._waiting = False

    def _handle(self, number, frame) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._waiting:
            self._waiting = False  # raise once: at a second signal the process is leaving the wait already
            raise _WaitInterrupted

    def _read_signals(self, pipe: int) -> None:
        is_main = int(os.environ.get("RANK", 0)) == 0
        while number := os.read(pipe, 1):
            if number[0] not in SIGNALS:
                continue
            interrupted = number[0] == signal.SIGINT
            if self.exit_at_once:
                if is_main:
                    reason = "interrupted" if interrupted else "Stopped by a signal"
                    os.write(2, f"{reason}, {self.exit_note}\n".encode())
                os._exit(128 + signal.SIGINT if interrupted else PREEMPTED)
            if interrupted and is_main and not self.signalled:
                os.write(2, b"interrupted: saving after this step; press Ctrl-C again to quit without saving\n")
            self.signalled = True
