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
