"""Tables of measurements: what each says about where it comes from, and where it goes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


def where_measured(module: str, *libraries: str) -> list[str]:
    """Two lines of Markdown: hardware, versions and commit; and the command that made the table."""
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    python = f"Python {platform.python_version()}"
    hardware = f"{os.cpu_count()} CPU cores, {_processor()}"
    command = " ".join([f"python -m {module}", *sys.argv[1:]])
    return [", ".join([hardware, python, versions, f"commit {_commit()}"]), f"`{command}`"]


def publish(text: str, output: str | None) -> None:
    """Print it, and write it to `output` if there is one."""
    print(text)
    if output:
        Path(output).write_text(text.rstrip() + "\n", encoding="utf-8")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    if not shutil.which("git"):
        return "unknown"
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
