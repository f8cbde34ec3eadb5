"""A train script loads no extra before a flag asks for one, but their catalogue."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

IMPORTS = """
import sys, train_ddp, train_ddp_cp, train_fsdp2
print(*sorted(module for module in sys.modules if module.split(".")[0] == "extras"))
from common.models.esm2.config import load_config
from common.training.optim import OptimizerFlags
load_config("facebook/esm2_t6_8M_UR50D")
OptimizerFlags().check()
print("transformers" in sys.modules)
"""


def test_train_scripts_import_the_catalogue_alone_and_a_preset_no_transformers():
    """Transformers would take longer than everything else that a process imports for its first step."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["extras extras.catalogue", "False"], done.stdout + done.stderr


def test_scripts_with_a_shebang_can_be_run():
    """`./train_ddp_cp.py`: those of the root and of the jobs; files that others source have neither."""
    files = [path for part in (".", "slurm", "kubernetes", "docker") for path in sorted((ROOT / part).glob("*.*"))]
    scripts = [path for path in files if path.suffix in (".py", ".sh", ".sbatch") and path.is_file()]
    assert {path.name for path in scripts} > {"train_ddp.py", "embed.py"}
    for path in scripts:
        assert path.read_bytes().startswith(b"#!") == bool(path.stat().st_mode & 0o100), path.name
