"""common/training/log_row.py: what a row sums, through a kill too; and a key that is added in one place."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.data.loader import StepCounts
from common.distributed.world import World
from common.training import log_row
from common.training.log_row import FIELDS, RowWindow, StepRecord, StepResult
from common.training.run_logger import RunLogger
from common.training.trainer_state import TrainerState
from extras.publish.trackers import grouped
from tests.data_fixtures import load_script
from tests.live_runs import trajectory
from tests.training_fixtures import _main, arguments, flags_of, on_ranks, rows, train
from tests.typed import contributing

ALONE = World(0, 0, 1, torch.device("cpu"))
KILLED = {"max_steps": 11, "logging_steps": 5, "save_steps": 4, "save_final_model": False}
TARGETS = eval(f"[{contributing('A key of the logged row')[0]}]", vars(log_row))[0]


def record(state: TrainerState, loss: float = 2.0, **more) -> StepRecord:
    """Of a step of two seconds, 10 tokens and 12 computed ones, which the state has counted."""
    result = StepResult(loss, 1.0, not math.isfinite(loss), 0.5, 0.25, [])
    counts = StepCounts(3, 10, 100, 2, 0, 0, 12)
    state.advance({}, 1.5, counts, 7.0, 2.0, result)
    return StepRecord(
        **{"state": state, "total_steps": 9, "learning_rate": 0.1, "counts": counts, "result": result, "flops": 3e12}
        | {"seconds": 2.0, "waited": 0.5, "saving": 0.0, "ranks": {}, "world": ALONE, "peak_flops": None}
        | more
    )


def test_row_loss_is_the_mean_since_the_last_row():
    state = TrainerState()
    window = RowWindow(state.row_sums)

    def after(*losses: float) -> dict:
        for loss in losses:
            last = record(state, loss)
            window.add(last)
        return {key: value for key, value in window.row(last).items() if key in ("loss", "train_perplexity")}

    assert after(3.0, math.inf, 2.0) == {"loss": 2.5, "train_perplexity": math.exp(2.5)}
    assert after(math.nan) == {}, "all skipped"
    assert after(800.0)["train_perplexity"] == math.exp(700), "no overflow"
    assert (state.loss_total, state.skipped_steps) == (805.0, 2)


def test_row_sums_means_speeds_and_last_values():
    state = TrainerState()
    window = RowWindow(state.row_sums)
    ranks = {"rank_seconds_max": 0.5, "slowest_host": "a"}
    window.add(record(state, saving=0.25, ranks=ranks, peak_flops=3e12))
    last = record(state, saving=0.5, seconds=4.0, waited=1.5, peak_flops=3e12)
    window.add(last)
    row = window.row(last)
    assert row.keys() == {field.name for field in FIELDS} - {"rank_seconds_min", "rank_seconds_median", "slowest_rank"}
    assert (row["step_seconds"], row["data_wait_seconds"], row["checkpoint_seconds"]) == (3.0, 1.0, 0.75)
    assert (row["tokens_per_second"], row["tokens_per_second_per_gpu"]) == (20 / 6, 4.0)
    assert (row["tflops_per_device"], row["mfu"]) == (1.0, pytest.approx(1 / 3))
    assert {key: row[key] for key in ranks} == ranks
    assert state.row_sums == {}


def test_row_of_any_duration_has_a_line():
    """The sums may be those of a checkpoint that somebody else has written."""
    row = {"step": 1, "total_steps": 9, "loss": 2.0, "train_perplexity": 7.4}
    for seconds in (1e18, math.inf):
        assert "eta: " in log_row.step_line(row | {"step_seconds": seconds})
        assert "ETA " in log_row.terminal_line(row | {"step_seconds": seconds}, None, 100)


def test_sums_of_a_row_are_those_of_both_starts():
    """Through a checkpoint of this version; one of 0.4 has the sums of the loss alone."""
    state = TrainerState()
    window = RowWindow(state.row_sums)
    window.add(record(state, 3.0))
    saved = asdict(state)
    older = {name: value for name, value in saved.items() if name != "row_sums"} | {"row_loss": 3.0, "row_steps": 1}
    rows_of = []
    for start in (saved, older):
        resumed = TrainerState.read(start, "checkpoint")
        window = RowWindow(resumed.row_sums)
        last = record(resumed, 2.0, seconds=3.0)
        window.add(last)
        rows_of.append(window.row(last))
    assert [row["loss"] for row in rows_of] == [2.5, 2.5]
    assert [row["step_seconds"] for row in rows_of] == [2.5, 3.0]
    assert TrainerState.read(older | {"row_loss": 0.0, "row_steps": 0}, "checkpoint").row_sums == {}


def test_speeds_of_a_row_survive_a_kill(dataset, tmp_path):
    train(dataset, tmp_path, **KILLED)
    shutil.rmtree(tmp_path / "checkpoint-11")  # as if the machine had died before: three steps into the row
    train(dataset, tmp_path, **KILLED)
    history = rows(tmp_path)
    for before, row in zip(history, history[1:], strict=False):
        steps = row["step"] - before["step"]
        tokens = row["tokens_per_second"] * row["step_seconds"] * steps
        assert tokens == pytest.approx(row["tokens"] - before["tokens"])


def _train_with_targets(argv: list[str]) -> None:
    FIELDS.append(TARGETS)
    _main(argv)


def test_added_field_is_written_shown_and_survives_a_kill(dataset, tmp_path):
    def run(out: Path, **flags) -> str:
        codes, said = on_ranks(2, _train_with_targets, flags_of(dataset, out, **KILLED | flags))
        assert codes == [0, 0], said
        return said[0]

    every, killed = tmp_path / "every", tmp_path / "killed"
    run(every, logging_steps=1)
    said = run(killed)
    whole = trajectory(killed)
    targets = {row["step"]: row["targets"] for row in rows(every)}
    bounds = (0, 1, 5, 10, 11)
    expected = [sum(targets[n + 1] for n in range(*pair)) for pair in zip(bounds, bounds[1:], strict=False)]
    assert [row["targets"] for row in whole] == expected
    assert f"targets: {expected[-1]}" in said
    shutil.rmtree(killed / "checkpoint-11")
    run(killed)
    assert trajectory(killed) == whole


def test_added_field_is_in_the_reference_and_the_tracker(monkeypatch):
    monkeypatch.setattr(log_row, "FIELDS", [*FIELDS, TARGETS])
    page = load_script("docs/make_reference.py").metrics_page()
    assert "| `targets` | targets | since the last row, of all ranks |" in page
    assert grouped({"targets": 3}) == {"train/targets": 3}


def test_log_line_is_written_at_once(tmp_path, monkeypatch):
    """In a file that several ranks and threads write, a line in two pieces could have another's words between them."""
    written = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None, isatty=lambda: False)
    monkeypatch.setattr("sys.stderr", stream)
    handler = logging.StreamHandler(stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    log = RunLogger(arguments(tmp_path).log, tmp_path, ALONE, bf16=False)
    with log.progress_bar(10, 0):
        logging.getLogger().warning("a line")
    assert written == ["a line\n"]
