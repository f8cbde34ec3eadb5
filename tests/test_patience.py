"""Waits of tests: as long as the machine is slow, and ended where nothing comes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import patience


def load(monkeypatch, text: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("0.10 0.2 0.3 1/200 77\n", 1),
        ("0.10 0.2 0.3 41/200 77\n", 20.5),  # they have only just begun
        ("40.0 0.2 0.3 1/200 77\n", 20),
    ],
)
def test_limit_grows_with_the_load(monkeypatch, text, times):
    load(monkeypatch, text)
    clock = iter([100.0, 100 + 9.9 * times, 100 + 10.1 * times])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    limit = patience.Limit(10)
    assert [limit.passed(), limit.passed()] == [False, True]


def test_wait_ends_where_nothing_comes():
    with pytest.raises(AssertionError, match="nothing happened:\nlast words"):
        patience.wait_until(lambda: False, said=lambda: "last words", seconds=0.01)
    assert not patience.wait_until(lambda: False, lambda: False)
    with pytest.raises(subprocess.TimeoutExpired):
        patience.run(["sleep", "600"], 0.01)


def test_run_gives_what_a_slow_process_prints():
    program = "import sys, time; text = sys.stdin.read(); print(text, flush=True); time.sleep(1.2); sys.exit(text)"
    done = patience.run([sys.executable, "-S", "-c", program], text="in")
    assert (done.returncode, done.stdout, done.stderr) == (1, "in\n", "in\n")
