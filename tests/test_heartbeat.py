"""Log lines while something takes long: `log_every`, and the first step of a compiled model."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from common.cli import log_every
from common.models.layers.compiling import FirstStep
from tests.patience import wait_until


def test_log_every_stops_at_the_end(caplog):
    with caplog.at_level("INFO"):
        with suppress(ZeroDivisionError), log_every("Clustering", every=0.05):
            wait_until(lambda: len(caplog.messages) >= 2)
            raise ZeroDivisionError
        said = list(caplog.messages)
        assert len(said) >= 2
    assert all(line.startswith("Clustering: ") and line.endswith(" s so far") for line in said)
    assert "log_every" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("compiles", [True, False])
def test_first_step_logs_compilation_once(caplog, compiles):
    first_step = FirstStep(compiles)
    with caplog.at_level("INFO"):
        for _ in range(3):
            with first_step.waited_for():
                pass
    assert len(caplog.messages) == compiles
    assert all("compiles the layers" in line for line in caplog.messages)
