"""Commands that job scripts written before 0.3 name: modules that moved to extras/, and their aliases."""

from __future__ import annotations

import pytest

from tests.forked import run_script
from tests.training_fixtures import environment


@pytest.mark.parametrize(
    ("alias", "module"), [("common.ranks.launch", "extras.launch"), ("common.preflight", "extras.preflight")]
)
def test_alias_runs_the_module_it_stands_for(alias, module):
    runs = [run_script(name, "--help", env=environment()) for name in (alias, module)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    helps = [run.stdout.partition("\n\n")[2] for run in runs]  # without the usage, which names the command
    assert helps[0] == helps[1] != ""


def test_alias_passes_exit_status_on():
    done = run_script("common.preflight", "--no_such_flag", env=environment())
    assert done.returncode == 2
    assert "unknown flag --no_such_flag" in done.stderr
