"""A run that several files look at: what it says, and what it leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.format_1 import to_format_1
from tests.training_fixtures import train


@pytest.fixture(scope="session")
def evaluated_run(dataset, tmp_path_factory):
    """A finished run of 12 steps on two ranks with everything on, and what rank 0 said."""
    output_dir = tmp_path_factory.mktemp("run")
    flags = {"max_steps": 12, "do_eval": True, "eval_on_start": True, "eval_steps": 4, "logging_steps": 5}
    return output_dir, train(dataset, output_dir, 2, **flags)


@pytest.fixture(scope="session")
def short_run(dataset, tmp_path_factory) -> Path:
    """The output directory of a run of two steps, with a checkpoint and without final_model."""
    out = tmp_path_factory.mktemp("short") / "out"
    train(dataset, out, max_steps=2, save_final_model=False)
    return out


@pytest.fixture(scope="session")
def earlier_run(short_run, tmp_path_factory) -> Path:
    """The same with its checkpoint in format 1, as before 0.5."""
    out = Path(shutil.copytree(short_run, tmp_path_factory.mktemp("earlier") / "out"))
    to_format_1(out / "checkpoint-2")
    return out
