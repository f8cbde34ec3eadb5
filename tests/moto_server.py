"""moto's stand-in for Amazon's services (S3, STS, ECR), as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def moto_server() -> Iterator[str]:
    """Yields its address; where there is no moto, the test is skipped."""
    pytest.importorskip("moto")
    moto = [sys.executable, "-u", "-m", "moto.server", "-p", "0"]
    process = subprocess.Popen(moto, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", line):
                yield found[1]
                break
        else:
            pytest.fail("moto's server did not start")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
