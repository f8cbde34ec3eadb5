"""Commands that job scripts written before 0.3 name: modules that moved to extras/, and their aliases."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.training_fixtures import ROOT, environment


@pytest.mark.parametrize(
    ("alias", "module"), [("common.ranks.launch", "extras.launch"), ("common.preflight", "extras.preflight")]
)
def test_alias_runs_the_module_it_stands_for(alias, module):
    helps = [
        subprocess.run(
            [sys.executable, "-m", name, "--help"],
            capture_output=True,
            text=True,
            env=environment(),
            cwd=ROOT,
            check=True,
        ).stdout.partition("\n\n")[2]  # without the usage, which names the command
        for name in (alias, module)
    ]
    assert helps[0] == helps[1] != ""


def test_alias_passes_exit_status_on():
    command = [sys.executable, "-m", "common.preflight", "--no_such_flag"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "unknown flag --no_such_flag" in done.stderr
