"""The picture of a run and its table: what they show, of what a run has left or is leaving."""

from __future__ import annotations

import json
import re
import signal

import numpy as np
import pytest
from PIL import Image

from common.cli import UserError
from common.figures import FigureFlags
from common.files.runs import read_run_info
from common.files.safe_files import JsonLinesLog
from common.training.curves import draw_curves, read_results
from common.training.run_directory import clear
from common.training.run_logger import write_results
from common.training.verdict import held_out_prefixes
from extras.report import held_out_table
from tests.forked import Script, run_script
from tests.live_runs import newest_step
from tests.patience import wait_until
from tests.training_fixtures import environment, flags_of, rows, train


def test_curves_show_rows(tmp_path):
    """Two runs that differ in one point differ in the picture, there and nowhere else."""

    def pixels(losses: list[float]) -> np.ndarray:
        log = JsonLinesLog(tmp_path / "metrics.jsonl", -1)
        for step, loss in enumerate(losses, 1):
            log.write({"step": step, "loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0})
        [path] = draw_curves(tmp_path)
        assert path == tmp_path / "training_curves.png"
        return np.asarray(Image.open(path).convert("RGB"), dtype=int)

    falling = [3.0 - 0.02 * n for n in range(40)]
    whole, changed = pixels(falling), pixels([*falling[:20], 2.9, *falling[21:]])
    height, width, _ = whole.shape
    assert min(height, width) > 600
    assert len(np.unique(whole.reshape(-1, 3), axis=0)) > 50, "blank"
    rows_changed, columns_changed = np.nonzero(np.abs(whole - changed).sum(-1))
    assert len(rows_changed) > 50
    assert rows_changed.max() < height // 2, "the loss is the upper left panel"
    assert columns_changed.max() < width // 2
    assert columns_changed.min() > width // 8, "the start of the curve is as it was"
    blue = (
        (whole[..., 2] > 150)
        & (whole[..., 0] < 80)
        & (np.arange(width) < width // 2)
        & (np.arange(height) < height // 2)[:, None]
    )
    left, right = (
        np.nonzero(blue & span)[0].mean() for span in (np.arange(width) < width // 4, np.arange(width) > width // 3)
    )
    assert right > left + 30, "a falling loss falls"


def test_curves_show_each_of_many_held_out_sets(tmp_path):
    def pixels(sets: int) -> np.ndarray:
        log = JsonLinesLog(tmp_path / "metrics.jsonl", -1)
        for step in (1, 2):
            row = {"step": step, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0}
            for n in range(sets):
                row |= {f"eval_s{n}_loss": 2.0 + n / 10, f"eval_s{n}_samples": 3}
            log.write(row)
        return np.asarray(Image.open(draw_curves(tmp_path)[0]).convert("RGB"), dtype=int)

    five, six = pixels(5), pixels(6)
    changed = np.abs(five - six).sum(-1)[: five.shape[0] // 2, : five.shape[1] // 2]
    assert np.count_nonzero(changed) > 100


def test_curves_show_held_out_and_unigram(evaluated_run, tmp_path):
    output_dir, _ = evaluated_run
    for name in ("metrics.jsonl", "all_results.json"):
        (tmp_path / name).write_text((output_dir / name).read_text())
    assert (output_dir / "training_curves.png").exists()
    whole = draw_curves(tmp_path)[0].read_bytes()
    results = read_results(tmp_path)
    assert draw_curves(tmp_path)[0].read_bytes() == whole, "a function of the files"
    for key in ("eval_loss_masked", "eval_unigram_loss_masked", "eval_neighbours_loss_masked"):
        (tmp_path / "all_results.json").write_text(json.dumps(results | {key: results[key] + 0.5}))
        assert draw_curves(tmp_path)[0].read_bytes() != whole, key
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "training_curves.png").unlink()
    assert draw_curves(tmp_path) == []
    assert not (tmp_path / "training_curves.png").exists()


def test_curves_of_interrupted_run(dataset, tmp_path):
    argv = flags_of(dataset, tmp_path, max_steps=5000, save_steps=5, save_total_limit=2, do_eval=True, eval_steps=5)
    settings = {"common.training.run_logger.DRAW_EVERY_S": 0.0}
    running = Script("train_ddp.py", *argv, env=environment(), settings=settings)
    picture = tmp_path / "training_curves.png"
    wait_until(lambda: picture.exists() and newest_step(tmp_path), lambda: running.poll() is None)
    assert running.poll() is None
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    assert picture.exists()
    picture.unlink()
    done = run_script("extras.report", tmp_path, env=environment())
    assert done.returncode == 0, done.stderr
    last = rows(tmp_path)[-1]
    assert f"not finished: step {last['step']:,} of 5,000, training loss {last['loss']:.4f}\n" in done.stdout
    held_out = [row for row in rows(tmp_path) if "eval_loss_masked" in row][-1]
    assert re.search(rf"unigram predictor +{held_out['eval_unigram_loss_masked']:.4f} ", done.stdout)
    assert re.search(rf"at step {held_out['step']} +{held_out['eval_loss_masked']:.4f} ", done.stdout)
    assert f"plot    {picture}" in done.stdout
    assert read_run_info(tmp_path)["starts"] == [0]
    stop = newest_step(tmp_path) + 2
    train(dataset, tmp_path, max_steps=5000, save_steps=5, do_eval=True, eval_steps=5, stop_at_step=stop)
    about = read_run_info(tmp_path)
    assert about["starts"] == [0, stop - 1]
    assert about["device"] == "cpu x 1, fp32"
    assert about["data"] == str(dataset)
    assert "parameters)" in about["model"]


@pytest.mark.parametrize("count", [10, 10_000])
def test_curves_title_names_model_and_data(tmp_path, count):
    """Title, starts and skipped steps; legible with ten rows and with ten thousand."""
    log = JsonLinesLog(tmp_path / "metrics.jsonl", -1)
    noise = np.random.default_rng(0).normal(0, 0.05, count)
    log.write(
        *(
            {
                "step": n + 1,
                "total_steps": count,
                "tokens": 512 * n,
                "epoch": n / count,
                "loss": 2.9 - n / count + noise[n],
            }
            | {"learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0, "skipped_steps": int(n > count // 2)}
            for n in range(count)
        )
    )

    def drawn(**about) -> np.ndarray:
        (tmp_path / "run_info.json").write_text(json.dumps(about))
        return np.asarray(Image.open(draw_curves(tmp_path)[0]).convert("RGB"), dtype=int)

    plain = drawn()
    titled = drawn(model="esm2_t6_8M", data="processed/arrow", device="cpu x 2")
    restarted = drawn(starts=[0, count // 3])
    height, width, _ = plain.shape
    changed = np.nonzero(np.abs(plain - titled).sum(-1))[0]
    assert len(changed) > 100
    assert changed.max() < height // 7, "above the curves"
    columns = np.nonzero(np.abs(plain - restarted).sum(-1))[1]
    assert len(columns) > 100
    orange = (plain[..., 0] > 200) & (abs(plain[..., 1] - 159) < 30) & (plain[..., 2] < 60)
    assert orange[: height // 2, : width // 2].sum() > 20, "steps skipped"


def test_report_table_of_a_named_set_without_hidden_residues(tmp_path):
    results = {"eval_loss": 2.0, "perplexity": 7.39, "eval_accuracy": 0.3, "eval_samples": 9}
    results |= {"eval_own_loss": 1.0, "eval_own_perplexity": 2.72, "eval_own_accuracy": 0.5, "eval_own_samples": 4}
    write_results(tmp_path, "eval", results)
    assert held_out_prefixes([results]) == ["eval", "eval_own"]
    shown = [held_out_table(tmp_path, prefix).splitlines()[-1].split()[-3:] for prefix in ("eval", "eval_own")]
    assert shown == [["2.0000", "7.39", "30.0%"], ["1.0000", "2.72", "50.0%"]]


def test_report_table_shows_before_unigram_and_after(evaluated_run):
    output_dir, _ = evaluated_run
    before, results = rows(output_dir)[0], read_results(output_dir)
    lines = held_out_table(output_dir).splitlines()
    assert lines[0].split("  ")[0] == "held-out proteins, hidden residues"
    assert set(lines[1]) == {"-"}
    assert len({len(line) for line in lines}) == 1
    of_hidden = ("loss_masked", "perplexity_masked", "accuracy_masked")
    expected = {
        "before training": tuple(before[f"eval_{k}"] for k in of_hidden),
        "unigram predictor": tuple(results[f"eval_unigram_{k}"] for k in of_hidden),
        "neighbour predictor": tuple(results[f"eval_neighbours_{k}"] for k in of_hidden),
        "after training": tuple(results[f"eval_{k}"] for k in of_hidden),
    }
    assert [line.split("  ")[0] for line in lines[2:]] == list(expected)
    for line, (loss, perplexity, accuracy) in zip(lines[2:], expected.values(), strict=True):
        assert line.split()[-3:] == [f"{loss:.4f}", f"{perplexity:.2f}", f"{accuracy:.1%}"]


def test_report_draws_other_formats_and_a_new_run_removes_them(tmp_path):
    JsonLinesLog(tmp_path / "metrics.jsonl", -1).write(
        {"step": 1, "total_steps": 1, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0}
    )
    done = run_script("extras.report", tmp_path, "--figure_format", "svg", "pdf", env=environment())
    assert done.returncode == 0, done.stderr
    drawn = [tmp_path / f"training_curves.{form}" for form in ("svg", "pdf")]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("plot")] == list(map(str, drawn))
    [svg] = draw_curves(tmp_path, FigureFlags(["svg"]))
    assert ">Learning rate</text>" in svg.read_text()
    refused = run_script("extras.report", tmp_path, "--figure_format", "gif", env=environment())
    assert refused.returncode == 2
    assert "--figure_format gif: choose png, svg, pdf" in refused.stderr
    clear(tmp_path)
    assert list(tmp_path.glob("training_curves*")) == []


def test_damaged_results_are_one_line(tmp_path):
    (tmp_path / "all_results.json").write_text("garbage")
    with pytest.raises(UserError, match=r"all_results.json: damaged, .*: the run's command writes it again"):
        read_results(tmp_path)
