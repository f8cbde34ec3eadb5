"""benchmarks/same_bits.py: what counts as a difference between two runs' outputs."""

from __future__ import annotations

import json

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.same_bits import STEPS, checkpoint, difference, figures
from common.checkpoint.writer import Writer
from tests.training.format_1 import to_format_1
from tests.training.hostile_changes import vouch

LAYER = torch.tensor([1.0, 2.0])


def write_run(directory, loss: float = 3.5, seconds: float = 1.0, **row):
    directory.mkdir()
    row = {"step": 1, "loss": loss, "step_seconds": seconds, "peak_memory_gb": seconds} | row
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (directory / "all_results.json").write_text(json.dumps({"test_loss": 3.25, "test_runtime": seconds}))
    return directory


def test_figures_leave_out_what_the_machine_decides(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", seconds=2.0)
    assert figures(one) == figures(other)
    assert figures(one)["all_results.json test_loss"] == "3.25"
    assert difference(figures(one), figures(other)) == ""


def test_difference_names_the_first_figure_of_another_value(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", loss=3.5000000000000004)
    found = difference(figures(one), figures(other))
    assert found == "metrics.jsonl 0 (step 1) loss: 3.5 / 3.5000000000000004"


def test_difference_names_a_figure_that_is_gone_and_no_new_one(tmp_path):
    one, more = write_run(tmp_path / "one"), write_run(tmp_path / "more", eval_loss=3.0)
    assert difference(figures(more), figures(one)) == "metrics.jsonl 0 (step 1) eval_loss: 3.0 / missing"
    assert difference(figures(one), figures(more)) == ""


def test_checkpoint_shows_a_bit_of_a_tensor_whatever_the_format(tmp_path):
    changed, found = torch.nextafter(LAYER, LAYER + 1), {}
    for name, weight in {"one": LAYER, "same": LAYER, "earlier": LAYER, "weight": changed}.items():
        directory = tmp_path / name / f"checkpoint-{STEPS}"
        dcp.save({"model": {"weight": weight}}, storage_writer=Writer(directory), no_dist=True)
        manifest = {"format_version": 2, "model": {}, "files": {}}
        (directory / "manifest.json").write_text(json.dumps(manifest))
        vouch(directory)
        if name == "earlier":
            to_format_1(directory)
        found[name] = checkpoint(tmp_path / name)
    assert difference(found["one"], found["same"]) == difference(found["earlier"], found["one"]) == ""
    assert difference(found["one"], found["weight"]).startswith("model.weight: torch.float32 [2] sha256 ")
