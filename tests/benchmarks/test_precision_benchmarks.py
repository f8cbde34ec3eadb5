"""The benchmarks of emulated precision, at sizes that take seconds: they run, in pieces too, and add up rightly."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from common.files.safe_files import read_json_lines
from common.models.esm2.config import load_config
from common.models.layers.config_base import override
from tests.forked import run_script
from tests.training_fixtures import TINY_OVERRIDES, environment, flags_of, rows, train
from tests.warm_python import python


def benchmark(name: str, *flags) -> subprocess.CompletedProcess:
    return run_script(f"benchmarks.{name}", *flags, env=environment(), settings={"sys.executable": python()})


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def another_seed(run: Path, copy: Path) -> None:
    """A finished run of a second seed, made of the first one's: another loss, no time spent."""
    shutil.copytree(run, copy)
    results = json.loads((copy / "eval_results.json").read_text())
    results["eval_loss_masked"] += 0.01 if "BF16" in run.name else 0.03
    (copy / "eval_results.json").write_text(json.dumps(results))


@pytest.mark.slow
def test_convergence_resumes_and_compares_by_seed(dataset, tmp_path):
    out = tmp_path / "out"
    flags = ["--dataset_dir", dataset, "--output_dir", out, "--config_overrides", TINY_OVERRIDES, "--steps", 4]
    flags += ["--evaluations", 2, "--tokens_per_pack", 512, "--max_seq_length", 128, "--max_eval_samples", 10]
    flags += ["--seeds", "1,2", "--formats", "BF16,NVFP4 half"]
    first = benchmark("precision_convergence", *flags, "--max_runs", 1)
    assert first.returncode == 0, first.stderr
    assert "3 runs are still to do" in first.stdout
    done = out / "BF16-1" / "eval_results.json"
    when = done.stat().st_mtime_ns
    another_seed(out / "BF16-1", out / "BF16-2")
    second = benchmark("precision_convergence", *flags, "--max_runs", 1)
    assert second.returncode == 0, second.stderr
    assert "1 runs are still to do" in second.stdout
    another_seed(out / "NVFP4_half-1", out / "NVFP4_half-2")
    last = benchmark("precision_convergence", *flags)
    assert last.returncode == 0, last.stderr
    assert done.stat().st_mtime_ns == when, "a finished run was run again"
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == [
        *("BF16-1", "BF16-2", "NVFP4_half-1", "NVFP4_half-2")
    ]

    def loss(name: str) -> float:
        return json.loads((out / name / "eval_results.json").read_text())["eval_loss_masked"]

    text = (out / "convergence.md").read_text()
    assert text.strip() in last.stdout
    rows = {cells(line)[0]: cells(line) for line in text.splitlines() if line.startswith("| ")}
    differences = [loss(f"NVFP4_half-{seed}") - loss(f"BF16-{seed}") for seed in (1, 2)]
    assert 0 not in differences
    assert float(rows["NVFP4 half"][3].split()[0]) == pytest.approx(statistics.mean(differences), abs=1e-4)
    error = statistics.stdev(differences) / 2**0.5
    assert float(rows["NVFP4 half"][3].split()[2]) == pytest.approx(error, abs=1e-4)
    mean = statistics.mean((loss("BF16-1"), loss("BF16-2")))
    assert float(rows["BF16"][2].split()[0]) == pytest.approx(mean, abs=1e-4)
    assert rows["BF16"][1] == "2"
    evaluated = [row["step"] for row in read_json_lines(out / "BF16-1" / "metrics.jsonl") if "eval_loss" in row]
    assert evaluated == [2, 4]
    assert (out / "convergence.png").read_bytes().startswith(b"\x89PNG")


def test_convergence_refuses_an_unknown_format(tmp_path):
    said = benchmark("precision_convergence", "--dataset_dir", tmp_path, "--output_dir", tmp_path, "--formats", "FP2")
    assert said.returncode == 2
    assert said.stderr.startswith("error: --formats FP2: choose of BF16,FP8 delayed,MXFP8,NVFP4 half,NVFP4 all,FP32")
    assert said.stderr.count("\n") == 1


def test_cost_of_emulation_and_of_statistics(tmp_path):
    config = override(load_config("facebook/esm2_t6_8M_UR50D"), TINY_OVERRIDES)
    config.to_transformers().save_pretrained(tmp_path / "model")
    flags = ("--config_name", tmp_path / "model", "--tokens", 128, "--length", 64, "--rounds", 1, "--dtypes", "fp32")
    said = benchmark("emulation_cost", *flags, "--watched", "MXFP8", "--output", tmp_path / "cost.md")
    assert said.returncode == 0, said.stderr
    text = (tmp_path / "cost.md").read_text()
    assert text.strip() == said.stdout.strip()
    rows = [cells(line) for line in text.splitlines() if line.startswith("| ")]
    steps, added = rows[1:8], rows[9]
    assert [row[0] for row in steps][::6] == ["none", "NVFP4"]
    assert float(steps[0][3]) == 1

    def rounded(text: str) -> float:
        """By how much of itself a number may be off for want of digits."""
        return 0.51 * 10.0 ** -len(text.partition(".")[2]) / float(text)

    for row in steps:
        told, off = float(row[1]) / float(steps[0][1]), rounded(row[1]) + rounded(steps[0][1]) + rounded(row[3])
        assert float(row[3]) == pytest.approx(told, rel=1.1 * off)
    assert added[0] == "MXFP8"
    assert all(cell.endswith("%") for cell in added[1:])


def test_floor_is_the_difference_of_perturbed_runs(dataset, tmp_path):
    flags = {"max_steps": 6, "fp8": True, "emulate_precision": True, "seed": 3}
    train(dataset, tmp_path / "run", stop_at_step=2, **flags)
    own = ["--steps", 2, "--perturbations", 1, "--relative", 1e-3, "--report", tmp_path / "floor.md"]
    done = benchmark("precision_floor", *own, "train_ddp.py", *flags_of(dataset, tmp_path / "unused", **flags))
    assert done.returncode == 0, done.stderr
    assert "  1-2     FP8, delayed scaling, hybrid\n  rest    FP32 (" in done.stdout
    assert (tmp_path / "floor.md").read_text().strip() in done.stdout
    assert not (tmp_path / "unused").exists()
    found = [cells(line) for line in done.stdout.splitlines() if re.match(r"\| \d", line)]
    for cell, row in zip(found, rows(tmp_path / "run"), strict=True):
        assert (cell[0], cell[1], cell[3]) == (str(row["step"]), f"{row['step_loss']:.4f}", f"{row['grad_norm']:.4f}")
        assert all(1e-6 < float(apart) < 0.3 for apart in (cell[2], cell[4]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", 2], "no script among the arguments"),
        (["--steps", 0, "train_ddp.py"], "--steps 0: must be at least 1"),
        (["train_ddp.py", "--bf17"], "unknown flag --bf17"),
    ],
)
def test_floor_refuses_in_one_line(words, message):
    done = benchmark("precision_floor", *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line
