"""What a table of measurements must say about where it comes from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path


def where_measured(module: str, *libraries: str) -> list[str]:
    """Two lines of Markdown: hardware, versions and commit; and the command that made the table."""
    versions = ", ".join(f"{name} {sys.modules[name].__version__}" for name in libraries)
    python = f"Python {platform.python_version()}"
    hardware = f"{os.cpu_count()} CPU cores, {_processor()}"
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    return [", ".join([hardware, python, versions, f"commit {_commit()}"]), f"`{command}`"]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
