"""Rows of a benchmark that hang and die, in a module that is imported in no time: each of their processes does."""

from __future__ import annotations

import os
import time


def misbehave(cases: list[tuple[str, str]], args, results) -> None:
    """A process of rows in which `te` hangs, `torch-compiled` dies, and `torch` leaves its GPU unusable."""
    for size, mode in cases:
        if mode == "te":
            time.sleep(600)
        if mode == "torch-compiled":
            os._exit(7)
        results.send({"size": size, "mode": mode, "process": os.getpid()})
        if mode == "torch":
            return
