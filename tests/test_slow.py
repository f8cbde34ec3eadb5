"""Which tests run: slow ones only when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

FILE = "tests/ops/test_push.py"
SLOW = f"{FILE}::test_push_keeps_an_immutable_tag"


@pytest.mark.parametrize(
    ("arguments", "collected"),
    [([FILE], False), ([FILE, "--slow"], True), ([FILE, "-m", "slow"], True), ([SLOW], True)],
    ids=["default", "--slow", "-m", "by name"],
)
def test_slow_tests_run_only_when_asked_for(arguments, collected):
    # -v: addopts has -q, and twice it lists no names
    command = [sys.executable, "-m", "pytest", "--collect-only", "-v", "-q", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (SLOW in found) == collected
