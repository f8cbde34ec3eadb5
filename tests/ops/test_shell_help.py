"""--help of every shell script says what it is for, and does nothing."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.patience import run

# Sourced by others; one that is, by a user's shell; of tests and images, not run by users.
OTHERS = {"docker/env.sh", "kubernetes/env_vars.sh", "slurm/clm.sh", "slurm/common.sh", "slurm/create_venv.sh"}
OTHERS |= {"slurm/env.sh", "slurm/node.sh", "docker/finish_image.sh", "docker/install_efa.sh"}
FOLDERS = ("*.sh", "docker/*.sh", "kubernetes/*.sh", "slurm/*.sh", "slurm/*.sbatch")
SCRIPTS = sorted({str(path.relative_to(ROOT)) for folder in FOLDERS for path in ROOT.glob(folder)} - OTHERS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_help_describes_and_does_nothing(script):
    header = (ROOT / script).read_text().splitlines()[1]
    assert header.startswith("# ")
    path = "/usr/bin:/bin"  # neither docker's own nor Slurm's variables, and no answer of either is waited for
    done = run(["bash", script, "--help"], 20, cwd=ROOT, env={"PATH": path, "HOME": "/"})
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert said[0] == header.removeprefix("# ")
    assert not [line for line in said if line.startswith(("#", "SBATCH", "set "))]
