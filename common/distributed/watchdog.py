"""Hang watchdog: names the rank that the others wait for, its host, step and phase, and ends the run.

Each rank marks its progress (`Watch.mark`: a few assignments). One thread sends the marks to the store about once
a second, which is also the heartbeat; another checks them. A rank whose main thread has made no mark for nearly
--ddp_timeout reads from the store how far the others are, prints one line that names the missing ranks, dumps its
stacks and ends with status 1; torchrun then ends the others. "Nearly", because collectives time out by themselves at
--ddp_timeout and do not know whom they waited for.

All ranks make the same marks in the same order, so the rank with fewer marks is the one that is behind.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.cli import one_line
from common.compat import dump_flight_recorder, frame_of_thread
from common.distributed.world import NullWatch

SAVE = "save"  # a phase in which disk traffic counts as progress: a large checkpoint takes time
SHARE_OF_TIMEOUT = 0.9
# A rank without progress ends after this many seconds if a peer has been silent as long, or has failed: with NCCL its
# main thread may be blocked in a wait for the device, which neither an exception nor a signal handler interrupts.
GONE_S = 60.0
STOPPING_S = 10.0  # the same once the process has been signalled to stop: it cannot reach a place to save at
LOST = "watch/lost"  # key in the store: a rank that misses its neighbour sets it for all
STATUS = 1
RECORDER_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # torch's variables: new, old


def main_thread_location() -> tuple[bool, str]:
    """(whether the main thread seems to wait for other ranks, where it is)."""
    frame = frame_of_thread(threading.main_thread().ident)
    if frame is None:
        return True, ""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    waits = os.sep + os.path.join("torch", "distributed") + os.sep in file or function == "_engine_run_backward"
    return waits, f"{Path(file).name}:{frame.f_lineno} in {function}"


def disk_traffic() -> int:
    """Bytes that this process has read and written by system calls; 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def write_flight_recorder(rank: int) -> str:
    """Write torch's record of this rank's latest collectives to `<prefix><rank>`; returns a line for the log.

    "" if no prefix is set. Torch writes it itself when a collective times out on NCCL with TORCH_NCCL_DUMP_ON_TIMEOUT.
    The watchdog ends the process earlier, so it writes the same file, with gloo too.
    """
    prefix = next((os.environ[name] for name in RECORDER_PREFIXES if os.environ.get(name)), None)
    if prefix is None:
        return ""
    path = Path(f"{prefix}{rank}")
    try:
        path.write_bytes(dump_flight_recorder())
    except Exception as error:  # must not hide the error that ends the run
        return f"Flight recorder: not written to {path}: {one_line(error)[:160]}"
    return f"Flight recorder: {path}"


class Watch(NullWatch):
    """This rank's progress, watched between `mark` and `rest`."""

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float, signalled: Callable[[], bool] = bool):
        """store: of all ranks, or None; signalled: whether a signal has asked this process to stop."""
        self.rank, self.size, self.timeout_s, self.host = rank, size, timeout_s, socket.gethostname()
        self.limit_s = SHARE_OF_TIMEOUT * timeout_s
        self.poll_s = min(1.0, timeout_s / 20)
        # How long a peer may be silent: a busy machine delays heartbeats.
        self.silence_s = max(2.5 * self.poll_s, min(GONE_S, self.limit_s / 3))
        self.phase: str | None = None
        self.step = self.marks = self._beats = 0
        self.since = time.monotonic()  # of the last progress
        self._signalled = signalled
        self._compiling = self._ended = self._failed = False
        self._collateral = False  # this rank ends because of another one
        self._asking = False  # read the other ranks' messages
        self._lost = self._reported = False  # the store says that a peer is lost; this rank has reported one
        self._neighbour = (0, time.monotonic())  # the next rank's latest heartbeat, and when it was new
        self._reporting = threading.Lock()  # one line: the watchdog's, or the main thread's
        self._peers: dict[int, tuple[dict, float]] = {}  # rank: its latest message, and when it was new
        self._store: Any = store and store.clone()  # the other connection may be blocked in a wait
        self._store_answered = time.monotonic()
        self._store_lost = False
        self._stop, self._wake = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> Watch:
        """Start the threads, before the process group is made, so that the store has heard of every rank by then."""
        targets = [self._check_progress]
        if self.size > 1:
            self._store.set_timeout(timedelta(seconds=self.timeout_s))
            self._send_heartbeat()
            targets.append(self._exchange_heartbeats)
        for target in targets:
            self._threads.append(threading.Thread(target=target, name="hang watch", daemon=True))
            self._threads[-1].start()
        return self

    # ---- called by the main thread --------------------------------------------------------------------------

    def mark(self, phase: str, step: int) -> None:
        self.phase, self.step = phase, step
        self.marks += 1
        self.since = time.monotonic()

    def rest(self) -> None:
        self.phase = None

    def end(self, failed: bool = False) -> None:
        self._ended, self._failed = True, failed
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def compilation_counts_as_progress(self) -> None:
        from common.compat import compile_callbacks

        def started(_) -> None:
            self._compiling = True

        def ended(_) -> None:
            self._compiling, self.since = False, time.monotonic()

        compile_callbacks.register_start_callback(started)
        compile_callbacks.register_end_callback(ended)

    def missing(self) -> str:
        if self.size == 1 or not self._threads:
            return ""
        if not self._reporting.acquire(blocking=False):
            time.sleep(self.timeout_s)  # the watchdog is reporting, and ends the process
        self._stop.set()
        self._collateral = self._asking = True
        self._wake.set()
        self.silence_s = 2.5 * self.poll_s  # a peer is certainly gone: no need to wait long
        deadline = time.monotonic() + 2 * self.silence_s + 0.5
        # A launcher that has noticed signals this rank, and says itself which one is gone.
        while time.monotonic() < deadline and not self._store_is_gone() and not self._signalled():
            silent, suspects = self._suspects()
            if silent and any(rank in self._peers and not self._peers[rank][0]["collateral"] for rank in suspects):
                break  # not one of those that, like this rank, ended because of it
            time.sleep(0.02)
        self._report_flight_recorder()
        silent, suspects = self._suspects()
        return self._describe(silent, suspects) if silent or len(suspects) < self.size else ""

    # ---- threads --------------------------------------------------------------------------------------------

    def _send_heartbeat(self) -> None:
        self._beats += 1
        message = {"beat": self._beats, "host": self.host, "step": self.step, "phase": self.phase, "marks": self.marks}
        message |= {"ended": self._ended, "failed": self._failed, "collateral": self._collateral}
        if self._asking:
            message["waits"], message["where"] = main_thread_location()
        self._store.set(f"watch/{self.rank}", json.dumps(message))

    def _exchange_heartbeats(self) -> None:
        """Write to the store, and read from it when needed. May block for ever: rank 0 holds the store."""
        keys = [f"watch/{rank}" for rank in range(self.size)]
        while True:
            ended = self._ended
            try:
                self._send_heartbeat()
                self._lost = self._a_peer_is_lost()
                if self._asking:
                    now = time.monotonic()
                    for rank, text in enumerate(self._store.multi_get(keys)):
                        message = json.loads(text)
                        known = self._peers.get(rank)
                        if known is None or known[0]["beat"] != message["beat"]:
                            self._peers[rank] = (message, now)
            except RuntimeError:  # DistError: the store went with rank 0
                self._store_lost = self._lost = True
                return
            self._store_answered = time.monotonic()
            if ended:
                return
            self._wake.wait(self.poll_s)
            self._wake.clear()

    def _a_peer_is_lost(self) -> bool:
        """Each rank checks the next one and reports to all: a few requests a second with any number of ranks."""
        if self.limit_s < 3 * GONE_S:
            return False  # the limit itself comes soon
        key = f"watch/{(self.rank + 1) % self.size}"
        if self._store.check([key]):
            message, now = json.loads(self._store.get(key)), time.monotonic()
            if message["beat"] != self._neighbour[0]:
                self._neighbour = (message["beat"], now)
            silent = not message["ended"] and now - self._neighbour[1] > self._patience()
            if silent or message["failed"]:
                self._peers[(self.rank + 1) % self.size] = (message, self._neighbour[1])
                self._store.set(LOST, str(self.rank))
                self._reported = True
            elif self._reported:  # it is back
                self._store.delete_key(LOST)
                self._reported = False
        return self._store.check([LOST])

    def _patience(self) -> float:
        return max(2.5 * self.poll_s, min(STOPPING_S, self.silence_s)) if self._signalled() else self.silence_s

    def _check_progress(self) -> None:
        last = time.monotonic()
        traffic = disk_traffic()
        while not self._stop.wait(self.poll_s):
            now = time.monotonic()
            if now - last > 3 * self.poll_s + 1:
                self.since = now  # this process itself was suspended (Ctrl-Z, a debugger): count from now
            last = now
            if self.phase is None or self._compiling:
                continue
            if self.phase == SAVE:
                traffic, before = disk_traffic(), traffic
                if traffic - before > 1 << 20:
                    self.since = now
            stalled = now - self.since
            self._asking = stalled > self.limit_s / 3 or self._lost
            orphaned = self._lost and stalled > self._patience() and self._peer_is_gone()
            if (stalled > self.limit_s or orphaned) and self._reporting.acquire(blocking=False):
                self._abort(stalled)

    def _abort(self, stalled: float) -> None:
        cause = "a single process"
        if self.size > 1:
            silent, suspects = self._suspects()
            cause, self._collateral = self._describe(silent, suspects), self.rank not in suspects
        name = f"rank {self.rank}: " if self.rank else ""
        line = f"error: {name}no progress for {stalled:.0f} s in step {self.step}, {self.phase} (--ddp_timeout "
        os.write(2, f"{line}{self.timeout_s:g}): {cause}\nStacks of rank {self.rank}:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        self._ended = True
        self._wake.set()
        if self.size > 1:
            self._threads[-1].join(timeout=1.0)
            self._report_flight_recorder()
        os._exit(STATUS)

    def _report_flight_recorder(self) -> None:
        # Querying a device that hangs may hang too, with Python's lock: then a thread outside Python ends the process.
        faulthandler.dump_traceback_later(max(1.0, self.timeout_s - self.limit_s), exit=True)
        os.write(2, f"{write_flight_recorder(self.rank)}\n".lstrip().encode())
        faulthandler.cancel_dump_traceback_later()

    # ---- which rank is it? ----------------------------------------------------------------------------------

    def _store_is_gone(self) -> bool:
        return self._store_lost or time.monotonic() - self._store_answered > self.silence_s + 0.5

    def _peer_is_gone(self) -> bool:
        """Whether a peer is gone, so that no collective can complete."""
        self.silence_s = self._patience()
        silent, suspects = self._suspects()
        return silent and bool(suspects)

    def _suspects(self) -> tuple[bool, list[int]]:
        """(whether they are silent, the ranks); all ranks if nothing sets one apart."""
        peers, gone = dict(self._peers), self._store_is_gone() and self.rank != 0
        now = self._store_answered if gone else time.monotonic()  # who was silent while the store still answered?
        silent = [r for r, (message, received) in peers.items() if message["ended"] or now - received > self.silence_s]
        silent = [r for r in silent if r != self.rank]
        if causes := [r for r in silent if not peers[r][0]["collateral"]]:
            return True, causes
        if gone and not all("waits" in message for message, _ in peers.values()):
            return True, [0]  # rank 0 ended while the others still took steps
        # Collateral ranks ended because of a rank that is still there, possibly this one.
        there = {r: message for r, (message, _) in peers.items() if r not in silent}
        most = max((message["marks"] for message, _ in peers.values()), default=0)
        behind = [r for r, message in there.items() if message["marks"] < most]
        busy = [r for r, message in there.items() if not message.get("waits", True)]
        if behind or busy:
            return False, behind or busy
        if gone:
            return True, [0]
        return (True, silent) if silent else (False, sorted(peers))

    def _describe(self, silent: bool, ranks: list[int]) -> str:
        if not ranks:
            return ""
        parts = []
        for rank in ranks[:8]:
            message, _ = self._peers.get(rank, (None, 0.0))
            if message is None:
                parts.append(f"rank {rank}" + (" (which holds the store)" if rank == 0 else ""))
                continue
            step = message["step"]
            place = f"in step {step}, {message['phase']}" if message["phase"] else f"after step {step}"
            place = f", last heard of {place}" if silent else f" {place}"  # up to a second ago
            place += f", at {message['where']}" if message.get("where") and not silent else ""
            parts.append(f"rank {rank} (host {message['host']}){place}")
        listed = "; ".join(parts) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        return f"no answer from {listed}" if silent else f"waiting for {listed}"
