"""The core needs no extra to be imported: what common/ reads of extras/ it imports inside functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPTS = ("train_ddp", "train_ddp_cp", "train_fsdp2")


@pytest.mark.parametrize("script", SCRIPTS)
def test_train_script_imports_no_extra(script):
    code = f"import sys, {script}; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'extras'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_scripts_with_a_shebang_can_be_run():
    """`./train_ddp_cp.py`: those of the root and of the jobs; files that others source have neither."""
    files = [path for part in (".", "slurm", "kubernetes", "docker") for path in sorted((ROOT / part).glob("*.*"))]
    scripts = [path for path in files if path.suffix in (".py", ".sh", ".sbatch") and path.is_file()]
    assert {path.name for path in scripts} > {"train_ddp.py", "embed.py"}
    for path in scripts:
        assert path.read_bytes().startswith(b"#!") == bool(path.stat().st_mode & 0o100), path.name
