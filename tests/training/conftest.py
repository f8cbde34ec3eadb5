"""A run that several files look at: what it says, and what it leaves."""

from __future__ import annotations

import pytest

from tests.training_fixtures import train


@pytest.fixture(scope="session")
def evaluated_run(dataset, tmp_path_factory):
    """A finished run of 12 steps on two ranks with everything on, and what rank 0 said."""
    output_dir = tmp_path_factory.mktemp("run")
    flags = {"max_steps": 12, "do_eval": True, "eval_on_start": True, "eval_steps": 4, "logging_steps": 5}
    return output_dir, train(dataset, output_dir, 2, **flags)
