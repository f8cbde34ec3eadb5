"""A file system that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(parent: Path, size: str) -> Iterator[Path]:
    """A directory under `parent` of `size` ("2m"), or the test is skipped."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    disk = parent / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def enlarge(disk: Path, size: str) -> None:
    """Enlarge it to `size`."""
    subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)


def fill(disk: Path) -> None:
    """Fill it with a file called `mine`."""
    with suppress(OSError), open(disk / "mine", "wb", buffering=0) as file:
        while file.write(bytes(1000)):
            pass
