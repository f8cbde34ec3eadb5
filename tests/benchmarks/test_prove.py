"""benchmarks/prove.py: a run equals the independent loop, and a wrong one is found."""

from __future__ import annotations

import math
import os
import sys

import pytest
import torch

from benchmarks.measuring import completed, words
from benchmarks.prove import BOUNDS, Bounds, Row, differences, left_by, prepare, report, rows, step_sequences
from benchmarks.stock_loop import FAMILIES, PEAK, RECIPE, loop
from common.cli import UserError
from tests.forked import run_script

ROW = Row("ESM-2", "train_ddp.py")
SMALL = {"tokens_per_pack": 256, "max_seq_length": 128}


def test_prove_finds_a_run_equal_to_the_loop_and_a_wrong_rate(tmp_path):
    initial = prepare(tmp_path)["ESM-2"]
    family, out = FAMILIES["ESM-2"], tmp_path / "out"
    flags = ROW.flags(tmp_path) | SMALL
    done = run_script("train_ddp.py", *words(flags | {"output_dir": out}), env=os.environ)
    assert done.returncode == 0, done.stderr
    ours, steps = left_by(out, family), step_sequences(flags)
    found = {}
    for rate in (PEAK, 1.01 * PEAK):
        theirs = loop(family, family.initial(), steps, "cpu", recipe=RECIPE | {"learning_rate": rate})
        found[rate] = differences(ours, theirs, initial)
    page, status = report({ROW: found[PEAK]}, [])
    assert status == 0, page
    page, status = report({ROW: found[1.01 * PEAK]}, [])
    assert status == 1, page
    assert found[1.01 * PEAK].weights > 5 * BOUNDS["fp32"].weights


@pytest.mark.parametrize("outcome", ["failed: run: given up", Bounds(0.0, math.nan, 0.0), Bounds(0.0, 0.0, 2e-3)])
def test_report_has_status_1_for_a_row_that_failed_or_differs(outcome):
    page, status = report({ROW: Bounds(0.0, 1e-6, 1e-5), Row("Llama", "train_ddp.py"): outcome}, [])
    assert status == 1
    assert page.count("| yes |") == page.count("| **no** |") == 1
    assert "1 of 2 checks passed" in page


def test_rows_are_those_that_the_devices_can_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))  # Turing has no bf16
    assert {row.precision for row in rows("cuda", 1)} == {"fp32"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))  # Ampere has no FP8
    assert all(row.emulated for row in rows("cuda", 1) if row.precision == "FP8")
    assert {row.ranks for row in rows("cuda", 1)} == {1}
    assert {row.script for row in rows("cuda", 2) if row.ranks == 2} == {row.script for row in rows("cpu", 0)}


def test_completed_gives_up():
    with pytest.raises(UserError, match="it: given up after 0 s"):
        completed([sys.executable, "-c", "import time; time.sleep(600)"], "it", seconds=0.1)
