"""Transformer Engine's part of tests/gpu over the stand-in: its own Python, on a CPU, in smaller shapes."""

from __future__ import annotations

import os
import re

import pytest

from tests.forked import run_script
from tests.te_on_cpu.boot import needs_site

pytestmark = needs_site
FILES = "tests/gpu/test_te.py", "tests/gpu/test_te_decoders.py"


CASES = [("9.0", "", 26), ("10.0", "matmuls or recipes_have", 7)]


@pytest.mark.parametrize(("capability", "which", "at_least"), CASES, ids=["9.0", "10.0"])
def test_gpu_files_pass_over_the_stand_in(capability, which, at_least):
    """At 9.0 all of it; at 10.0 what has recipes that Hopper has not: MXFP8 and NVFP4."""
    environment = os.environ | {"GPU_CAPABILITY": capability, "GPU_TESTS_SMALL": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    plugin = ("-p", "tests.te_on_cpu.plugin", "-p", "no:xdist")
    done = run_script("pytest", *plugin, "-v", "--tb=short", "-k", which, *FILES, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= at_least, done.stdout
