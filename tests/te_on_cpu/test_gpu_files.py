"""Transformer Engine's part of tests/gpu over the stand-in: its own Python, on a CPU, in smaller shapes."""

from __future__ import annotations

import os
import re

import pytest

from tests.forked import run_script
from tests.te_on_cpu.boot import needs_site

pytestmark = needs_site
FILES = "tests/gpu/test_te.py", "tests/gpu/test_te_decoders.py"
GRAPHS = ("tests/gpu/test_te_graphs.py",)


CASES = [("9.0", "", 32, FILES), ("10.0", "matmuls or recipes_have", 9, FILES), ("9.0", "", 2, GRAPHS)]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "which", "at_least", "files"), CASES, ids=["9.0", "10.0", "graphs"])
def test_gpu_files_pass_over_the_stand_in(capability, which, at_least, files):
    """At 9.0 all of it; at 10.0 what Hopper has no recipes for (MXFP8, NVFP4). Graphs with cuDNN's attention."""
    environment = os.environ | {"GPU_CAPABILITY": capability, "GPU_TESTS_SMALL": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    environment |= {"GPU_ATTENTION": "1"} if files is GRAPHS else {}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    plugin = ("-p", "tests.te_on_cpu.plugin", "-p", "no:xdist")
    done = run_script("pytest", *plugin, "-v", "--tb=short", "-k", which, *files, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(passed) >= at_least, done.stdout
