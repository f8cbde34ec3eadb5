"""How long a start under extras.launch takes, by part, up to the end of the first step."""

from __future__ import annotations

import json
import os
import time

LAUNCHED = "LAUNCHED"  # in the environment, of extras.launch: JSON, {part: seconds since the epoch at its end}


class StartUp:
    """parts: {part: seconds}. First those of the launcher: "teardown" of the other ranks after a failure, and
    "rendezvous", to which at the first start its own imports count."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        ends: dict[str, float] = json.loads(os.environ.get(LAUNCHED, "{}"))
        self.is_restart, self._reported = "noticed" in ends, not ends
        begin, *rest = ends.items() or [("", time.time())]
        self._end = begin[1]
        for part, end in rest:
            self._add(part, end)

    def done(self, part: str) -> None:
        """This part has ended; "imports" has the process' own start, too."""
        self._add(part, time.time())

    def report(self) -> str:
        """A line for the log after the first step; "" after others, and without that launcher."""
        if self._reported:
            return ""
        self.done("first step")
        self._reported = True
        since = "the launcher noticed" if self.is_restart else "the launcher's start"
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.parts.items())
        return f"First step {sum(self.parts.values()):.2f} s after {since}: {parts}"

    def _add(self, part: str, end: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + max(0.0, end - self._end)
        self._end = end
