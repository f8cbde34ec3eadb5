"""Changes of a checkpoint's files: the parts that hostile.py's cases are made of.

A change gets a copy of a good checkpoint. Where it is `vouched`, the manifest is written anew afterwards, as an
attacker would.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files.safe_files import size_and_crc

CANARY = "canary"  # beside the checkpoint: no change may read, write or remove it
SHARD = "__0_0.distcp"


@dataclass(frozen=True)
class Case:
    """change: of the checkpoint's directory; reason: what the error line says; earlier: it is in format 1."""

    name: str
    change: Callable[[Path], Any]
    reason: str
    vouched: bool = True
    earlier: bool = False

    def __call__(self, checkpoint: Path) -> None:
        self.change(checkpoint)
        if self.vouched:
            vouch(checkpoint)


def vouch(checkpoint: Path) -> None:
    """Rewrite the manifest to match the files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {p.name: size_and_crc(p) for p in checkpoint.iterdir() if p.name != "manifest.json"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def edited(name: str, edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of one of the JSON files: `edit` changes the content, or returns another one."""

    def change(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        other = edit(content)
        (checkpoint / name).write_text(json.dumps(content if other is None else other))

    return change


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).write_bytes(content)


def put(*path, value: Any) -> Callable[[Any], None]:
    """An edit: the value at a path of keys. A callable makes it of the old one."""

    def edit(content: Any) -> None:
        *way, last = path
        for key in way:
            content = content[key]
        content[last] = value(content.get(last)) if callable(value) else value

    return edit


def replaced(name: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A change that puts something else in a file's place."""

    def change(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        make(checkpoint / name)

    return change


# ---- pickles --------------------------------------------------------------------------------------------------------
