"""With which versions a run was made: in run_info.json and in the model card."""

from __future__ import annotations

import platform
import re
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "esm2-pretraining"
COMMIT = re.compile(r"[0-9a-f]{40}")


def software() -> str:
    """This project's version and commit, Python's and the libraries'."""
    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    parts.append(f"transformers {metadata.version('transformers')}")
    with suppress(OSError, KeyError, tomllib.TOMLDecodeError, metadata.PackageNotFoundError):
        if (file := ROOT / "pyproject.toml").exists():
            version = tomllib.loads(file.read_text())["project"]["version"]
        else:  # installed from a wheel
            version = metadata.version(PROJECT)
        parts.insert(0, f"{PROJECT} {version}")
    if sha := commit(ROOT):
        parts.insert(1, f"commit {sha[:12]}")
    return ", ".join(parts)


def commit(root: Path) -> str | None:
    """The commit of a checkout, read from git's files: starting git would take longer than the export."""
    with suppress(OSError, ValueError):
        directory = root / ".git"
        if directory.is_file():  # of a worktree
            directory = root / directory.read_text().partition("gitdir:")[2].strip()
        head = (directory / "HEAD").read_text().strip()
        name = head.removeprefix("ref: ")
        if name == head:
            return head if COMMIT.fullmatch(head) else None
        shared = directory / "commondir"
        place = directory / shared.read_text().strip() if shared.is_file() else directory
        if (place / name).is_file():
            sha = (place / name).read_text().strip()
        else:
            packed = (place / "packed-refs").read_text().splitlines()
            sha = next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
        return sha if COMMIT.fullmatch(sha) else None
    return None
