"""Hangs end with a name: which rank is it that the others wait for, on which host, in which step, doing what?

Each rank marks where it is (`Watch.mark`: a few assignments). One thread tells the run's store so about once a second,
which also says that the process is alive; another looks at the marks. A rank whose main thread has passed no mark for
nearly --ddp_timeout reads from the store how far the others are, says in one line who is missing, dumps its stacks and
ends with status 1; torchrun then ends the others. Nearly: collectives time out by themselves at --ddp_timeout, and do
not know whom they waited for.

All ranks pass the same marks in the same order, so the one with fewer of them is the one that is behind.
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

import torch.distributed as dist

from common.cli import one_line
from common.compat import dump_flight_recorder, frame_of_thread
from common.distributed.world import NullWatch

# What a process can tell of itself when a run hangs: where its main thread is, what it reads and writes, its
# collectives.

RECORDER_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # torch's names: the new, the old


def main_thread_is_at() -> tuple[bool, str]:
    """Whether the main thread waits for other ranks as far as Python can tell, and its place."""
    frame = frame_of_thread(threading.main_thread().ident)
    if frame is None:
        return True, ""
    file, function = frame.f_code.co_filename, frame.f_code.co_name
    waits = os.sep + os.path.join("torch", "distributed") + os.sep in file or function == "_engine_run_backward"
    return waits, f"{Path(file).name}:{frame.f_lineno} in {function}"


def disk_traffic() -> int:
    """Bytes this process has read and written by system calls; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def write_flight_recorder(rank: int) -> str:
    """Torch's latest collectives of this rank to `<prefix><rank>`; a line that says so, "" where no prefix is set.

    Torch itself writes them when a collective times out on NCCL, with TORCH_NCCL_DUMP_ON_TIMEOUT. The watch ends the
    process before that, so it has them written, by gloo too, to the same place and in the same format.
    """
    prefix = next((os.environ[name] for name in RECORDER_PREFIXES if os.environ.get(name)), None)
    if prefix is None:
        return ""
    path = Path(f"{prefix}{rank}")
    try:
        path.write_bytes(dump_flight_recorder())
    except Exception as error:  # the run ends for another reason, which must be told whatever comes of this
        return f"Flight recorder: not written to {path}: {one_line(error)[:160]}"
    return f"Flight recorder: {path}"


SAVE = "save"  # a phase in which disk traffic counts as progress: a large checkpoint takes its time
SHARE_OF_TIMEOUT = 0.9
# Where a peer has been silent for so many seconds, or has failed, a rank ends that makes no progress for as long: with
# NCCL it may sit in a wait for the device, which neither an exception nor a signal's handler ends.
GONE_S = 60.0
TOLD_S = 10.0  # the same once the process has been told to stop: it cannot reach a place to save at
LOST = "watch/lost"  # in the store: whoever misses its neighbour says so to all
STATUS = 1


class Watch(NullWatch):
    """Where this rank is, and a watch on it while it is somewhere (`mark`) and not at rest (`rest`)."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self.step = self.marks = 0
        self.since = time.monotonic()
        self.size = 1
        self._compiling = self._ended = self._failed = self._victim = self._asking = False
        self._lost = self._reported = False  # a peer, as the store says; this rank says so there
        self._neighbour = (0, time.monotonic())  # its latest beat, when that was new
        self._told: Callable[[], bool] = bool
        self._speaks = threading.Lock()  # one line: the watch's, or the main thread's
        self._beats = 0
        self._heard: dict[int, tuple[dict, float]] = {}  # rank: its latest message, when it was new
        self._store_answered = time.monotonic()
        self._store_lost = False
        self._stop, self._wake = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    # ---- the main thread's side -----------------------------------------------------------------------------

    def mark(self, phase: str, step: int) -> None:
        """The main thread goes on to this. On every rank, in the same order."""
        self.phase, self.step = phase, step
        self.marks += 1
        self.since = time.monotonic()

    def rest(self) -> None:
        """What comes now may take as long as it likes."""
        self.phase = None

    def begin(
        self,
        rank: int,
        size: int,
        store: dist.Store | None,
        timeout_s: float,
        told: Callable[[], bool] = bool,
    ) -> None:
        """Start to watch; before the process group is made, so that every rank is in the store once it is there.

        told: whether a signal has told this process to stop.
        """
        self._told = told
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.limit_s = SHARE_OF_TIMEOUT * timeout_s
        self.poll_s = min(1.0, timeout_s / 20)
        # Without a message: a busy machine delays some.
        self.silence_s = max(2.5 * self.poll_s, min(GONE_S, self.limit_s / 3))
        self.host = socket.gethostname()
        targets = [self._look]
        if size > 1:
            self._store = store.clone()  # a connection of its own: the other one may be busy waiting
            self._store.set_timeout(timedelta(seconds=timeout_s))
            self._tell()
            targets.append(self._talk)
        for target in targets:
            self._threads.append(threading.Thread(target=target, name="hang watch", daemon=True))
            self._threads[-1].start()

    def end(self, failed: bool = False) -> None:
        """The process is about to leave, by itself: tell the others, and watch no more."""
        self._ended, self._failed = True, failed
        self._stop.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def compilation_counts_as_progress(self) -> None:
        """For torch.compile: the first step may take minutes, and recompilation comes when it likes."""
        from common.compat import compile_callbacks

        def started(_) -> None:
            self._compiling = True

        def ended(_) -> None:
            self._compiling, self.since = False, time.monotonic()

        compile_callbacks.register_start_callback(started)
        compile_callbacks.register_end_callback(ended)

    def missing(self) -> str:
        """Who is gone or stuck, for a rank whose collective has just failed; "" where the store does not tell."""
        if self.size == 1 or not self._threads:
            return ""
        if not self._speaks.acquire(blocking=False):
            time.sleep(self.timeout_s)  # the watch is just saying it, and ends the process
        self._stop.set()
        self._victim = True
        self._asking = True
        self._wake.set()
        self.silence_s = 2.5 * self.poll_s  # somebody is gone for certain: no need to wait long
        deadline = time.monotonic() + 2 * self.silence_s + 0.5
        while time.monotonic() < deadline and not self._store_is_gone():
            silent, named = self._suspects()
            if silent and any(rank in self._heard and not self._heard[rank][0]["victim"] for rank in named):
                break  # those who were left alone, as this one, have ended too, perhaps before it
            time.sleep(0.02)
        self._write_flight_record()
        silent, named = self._suspects()
        return self._describe(silent, named) if silent or len(named) < self.size else ""

    # ---- the threads ----------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._beats += 1
        message = {"beat": self._beats, "host": self.host, "step": self.step, "phase": self.phase, "marks": self.marks}
        message |= {"ended": self._ended, "failed": self._failed, "victim": self._victim}
        if self._asking:
            message["waits"], message["where"] = main_thread_is_at()
        self._store.set(f"watch/{self.rank}", json.dumps(message))

    def _talk(self) -> None:
        """Tell the store, ask it when there is something to ask. It may block for ever: rank 0 holds the store."""
        keys = [f"watch/{rank}" for rank in range(self.size)]
        while True:
            ended = self._ended
            try:
                self._tell()
                self._lost = self._a_peer_is_lost()
                if self._asking:
                    now = time.monotonic()
                    for rank, text in enumerate(self._store.multi_get(keys)):
                        message = json.loads(text)
                        known = self._heard.get(rank)
                        if known is None or known[0]["beat"] != message["beat"]:
                            self._heard[rank] = (message, now)
            except RuntimeError:  # DistError: the store went with rank 0
                self._store_lost = self._lost = True
                return
            self._store_answered = time.monotonic()
            if ended:
                return
            self._wake.wait(self.poll_s)
            self._wake.clear()

    def _a_peer_is_lost(self) -> bool:
        """Each rank looks after the next one and tells all: a few questions a second, however many ranks there are."""
        if self.limit_s < 3 * GONE_S:
            return False  # the limit itself comes soon
        key = f"watch/{(self.rank + 1) % self.size}"
        if self._store.check([key]):
            message, now = json.loads(self._store.get(key)), time.monotonic()
            if message["beat"] != self._neighbour[0]:
                self._neighbour = (message["beat"], now)
            silent = not message["ended"] and now - self._neighbour[1] > self._patience()
            if silent or message["failed"]:
                self._store.set(LOST, str(self.rank))
                self._reported = True
            elif self._reported:  # it is back
                self._store.delete_key(LOST)
                self._reported = False
        return self._store.check([LOST])

    def _patience(self) -> float:
        return max(2.5 * self.poll_s, min(TOLD_S, self.silence_s)) if self._told() else self.silence_s

    def _look(self) -> None:
        last = time.monotonic()
        traffic = disk_traffic()
        while not self._stop.wait(self.poll_s):
            now = time.monotonic()
            if now - last > 3 * self.poll_s + 1:
                self.since = now  # this process itself was stopped (Ctrl-Z, a debugger): start to count anew
            last = now
            if self.phase is None or self._compiling:
                continue
            if self.phase == SAVE:
                traffic, before = disk_traffic(), traffic
                if traffic - before > 1 << 20:
                    self.since = now
            stalled = now - self.since
            self._asking = stalled > self.limit_s / 3 or self._lost
            alone = self._lost and stalled > self._patience() and self._is_left()
            if (stalled > self.limit_s or alone) and self._speaks.acquire(blocking=False):
                self._abort(stalled)

    def _abort(self, stalled: float) -> None:
        place = f"step {self.step}, {self.phase}"
        told = "a single process"
        if self.size > 1:
            silent, ranks = self._suspects()
            told, self._victim = self._describe(silent, ranks), self.rank not in ranks
        name = f"rank {self.rank}: " if self.rank else ""
        line = f"error: {name}no progress for {stalled:.0f} s in {place} (--ddp_timeout {self.timeout_s:g}): {told}"
        os.write(2, f"{line}\nStacks of rank {self.rank}:\n".encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        self._ended = True
        self._wake.set()
        if self.size > 1:
            self._threads[-1].join(timeout=1.0)
            self._write_flight_record()
        os._exit(STATUS)

    def _write_flight_record(self) -> None:
        # Asking a device that hangs may hang too, with Python's lock: then a thread outside Python ends the process.
        faulthandler.dump_traceback_later(max(1.0, self.timeout_s - self.limit_s), exit=True)
        os.write(2, f"{write_flight_recorder(self.rank)}\n".lstrip().encode())
        faulthandler.cancel_dump_traceback_later()

    # ---- who is it? -----------------------------------------------------------------------------------------

    def _store_is_gone(self) -> bool:
        return self._store_lost or time.monotonic() - self._store_answered > self.silence_s + 0.5

    def _is_left(self) -> bool:
        """Whether some peer is gone, without whom no collective ends."""
        self.silence_s = self._patience()
        silent, named = self._suspects()
        return silent and bool(named)

    def _suspects(self) -> tuple[bool, list[int]]:
        """(whether they are silent, the ranks); all ranks where nothing tells them apart."""
        heard, gone = dict(self._heard), self._store_is_gone() and self.rank != 0
        now = self._store_answered if gone else time.monotonic()  # who was silent while the store still answered?
        silent = [r for r, (message, at) in heard.items() if message["ended"] or now - at > self.silence_s]
        silent = [r for r in silent if r != self.rank]
        if guilty := [r for r in silent if not heard[r][0]["victim"]]:
            return True, guilty
        if gone and not all("waits" in message for message, _ in heard.values()):
            return True, [0]  # rank 0 left while steps were still taken
        # Victims have left because of another one, which is still there: this rank itself, it may be.
        there = {r: message for r, (message, _) in heard.items() if r not in silent}
        most = max((message["marks"] for message, _ in heard.values()), default=0)
        behind = [r for r, message in there.items() if message["marks"] < most]
        busy = [r for r, message in there.items() if not message.get("waits", True)]
        if behind or busy:
            return False, behind or busy
        if gone:
            return True, [0]
        return (True, silent) if silent else (False, sorted(heard))

    def _describe(self, silent: bool, ranks: list[int]) -> str:
        if not ranks:
            return ""
        parts = []
        for rank in ranks[:8]:
            message, _ = self._heard.get(rank, (None, 0.0))
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
