"""What stands in for `python` forks, and does not quietly begin with imports of its own."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import sklearn  # noqa: F401  (it sets environment variables: KMP_INIT_AT_FORK)

from tests.data_fixtures import environment
from tests.patience import wait_until
from tests.warm_python import ROOT, at_work, python


def test_stand_in_forks_for_a_job_without_the_variables_that_imports_set():
    env = {name: value for name, value in environment().items() if not name.startswith("KMP_")}
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)  # less than it prints: it waits
    words = [python(), "train_ddp.py", "--help_all"]
    with os.fdopen(read) as out, subprocess.Popen(words, cwd=ROOT, env=env, stdout=write) as started:
        os.close(write)

        def begun_anew() -> bool:  # the interpreter in its place
            return Path(f"/proc/{started.pid}/cmdline").read_bytes().split(b"\0")[1:2] == [b"train_ddp.py"]

        try:
            assert wait_until(lambda: at_work(started.pid) != started.pid or begun_anew())
            assert at_work(started.pid) != started.pid
            assert out.read().startswith("usage: train_ddp.py ")
        finally:
            started.kill()
