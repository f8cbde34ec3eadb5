"""Runs of a data script that are killed (SIGKILL) at a chosen touch of the disk, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.data_fixtures import call, load_script
from tests.forked import context

TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")  # audit events, before each


def run_killed_at(touch: int | str | None, script: str, out: Path, *arguments, settings: dict | None = None) -> int:
    """Run `script` and kill it just before its `touch`th touch of anything below `out`, or of a path that ends in
    `touch`; None: let it end.

    settings: {"module.NAME": value} to set first. Returns the number of touches. AssertionError if it fails.
    """
    count = context().Value("i", 0)
    process = context().Process(target=_run, args=(count, touch, script, str(out), arguments, settings or {}))
    process.start()
    process.join(60)
    # Threads touch the disk in another order every time, some of it or not: the last touch may not come.
    assert process.exitcode in ((0,) if touch is None else (0, -signal.SIGKILL)), process.exitcode
    return count.value


def _run(count, touch: int | str | None, script: str, out: str, arguments: tuple, settings: dict) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for name, value in settings.items():
        module, _, attribute = name.rpartition(".")
        setattr(sys.modules[module], attribute, value)

    def hook(event: str, details: tuple) -> None:
        paths = [str(d) for d in details if isinstance(d, str | os.PathLike) and str(d).startswith(out)]
        if event in TOUCHES and paths:
            if touch == count.value or (isinstance(touch, str) and paths[0].endswith(touch)):
                os.kill(os.getpid(), signal.SIGKILL)
            with count.get_lock():
                count.value += 1

    sys.addaudithook(hook)
    call(load_script(script), *arguments)
