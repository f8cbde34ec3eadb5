"""A measurement in a process of its own: nothing that another one has warmed, cached or set is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from common.cli import UserError

ROOT = Path(__file__).parent.parent


def measured_afresh(module: str, flags: dict[str, object], environment: dict[str, str], what: str) -> dict:
    """The JSON that `python -m module --flag value ...` prints last; UserError, naming `what`, if it fails.

    A flag whose value is True stands alone.
    """
    command = [sys.executable, "-m", module]
    for name, value in flags.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise UserError(f"{what}: failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
