"""How long a start takes, by part, up to the end of the first step; after a failure from when the launcher noticed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

LAUNCHED = "LAUNCHED"  # in the environment, of extras.launch: JSON, {part: seconds since the epoch at its end}


class StartUp:
    """parts: {part: seconds}; those of the launcher come first: "teardown" of the other ranks and "rendezvous"."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        ends: dict[str, float] = json.loads(os.environ.get(LAUNCHED, "{}"))
        self.is_restart = "noticed" in ends
        begin, *rest = ends.items() or [("", _process_start())]
        self._end = begin[1]
        for part, end in rest:
            self._add(part, end)
        self._reported = False

    def done(self, part: str) -> None:
        """This part has ended; with the first one, "imports", the process' own start."""
        self._add(part, time.time())

    def report(self) -> str:
        """A line for the log after the first step; "" after others."""
        if self._reported:
            return ""
        self.done("first step")
        self._reported = True
        since = "the launcher noticed that a rank had ended" if self.is_restart else "the start"
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.parts.items())
        return f"First step {sum(self.parts.values()):.2f} s after {since}: {parts}"

    def _add(self, part: str, end: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + max(0.0, end - self._end)
        self._end = end


def _process_start() -> float:
    """Seconds since the epoch, to hundredths; now if there is no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return time.time()
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
