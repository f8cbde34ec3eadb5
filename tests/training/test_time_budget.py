"""A run that ends after some minutes, and one that would take days."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from common.cli import UserError
from common.distributed.world import World
from common.training.time_budget import LONG_S, TIMED, WARM, TimeBudget
from tests.training_fixtures import _main, arguments, flags_of, on_ranks, rows, train

ALONE = World(0, 0, 1, torch.device("cpu"))
FOREVER = 10**9  # steps


def test_run_ends_after_minutes_with_results_and_model_and_goes_on(dataset, tmp_path):
    flags = {
        "do_eval": True,
        "max_eval_samples": 4,
        "eval_on_start": True,
        "save_final_model": True,
        "save_steps": 10**6,
    }
    said = train(dataset, tmp_path, 2, max_steps=5000, stop_after_minutes=0.01, **flags)
    last = rows(tmp_path)[-1]
    assert 1 <= last["step"] < 5000
    assert f"Ending at step {last['step']} of 5000, for --stop_after_minutes 0.01" in said
    assert last["total_steps"] == 5000
    assert (tmp_path / f"checkpoint-{last['step']}").is_dir()
    assert (tmp_path / "final_model" / "model.safetensors").exists()
    assert (tmp_path / "test_results.json").exists()
    end = last["step"] + 2
    said = train(dataset, tmp_path, 2, max_steps=5000, stop_at_step=end, stop_after_minutes=0, **flags)
    assert [row["step"] for row in rows(tmp_path)] == list(range(end + 1))
    assert "Flags differ" not in said


def estimated(seconds: float, step: int = 0, **flags) -> None:
    args = arguments("x", **flags)
    of_run = TimeBudget(args.stop_after_minutes, args.yes, ALONE, {}, step, FOREVER)
    for number in range(1, WARM + TIMED + 2):
        of_run.after_step(step + number, 1e3 if number == WARM else seconds)


def test_long_run_asks_for_yes_on_a_terminal_only(caplog, monkeypatch):
    seconds = 2 * LONG_S / FOREVER
    with caplog.at_level("INFO"):
        estimated(seconds)
    assert caplog.messages[0] == (
        "Estimated time, without evaluations: about 2.0 days: 999,999,995 steps of 0.000173 s"
    )
    assert caplog.messages[1].startswith("This run takes about 2.0 days")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(UserError, match="about 2.0 days: .*give --yes"):
        estimated(seconds)
    caplog.clear()
    with caplog.at_level("INFO"):
        estimated(seconds, yes=True)
        estimated(seconds, step=7)  # a resume
        estimated(seconds / 3)
        estimated(seconds, stop_after_minutes=30.0)
        estimated(50 / FOREVER)  # not worth saying
    assert len(caplog.messages) == 4
    assert "about 0:30:00" in caplog.messages[3]


def _with_a_terminal_on_rank_0(argv: list[str]) -> None:
    if os.environ["RANK"] == "0":
        sys.stderr.isatty = lambda: True
    _main(argv)


def test_ranks_agree_that_a_run_is_too_long(dataset, tmp_path):
    codes, said = on_ranks(2, _with_a_terminal_on_rank_0, flags_of(dataset, tmp_path, max_steps=FOREVER))
    assert codes == [2, 2], said
    assert "give --yes to train for so long" in said[0]
