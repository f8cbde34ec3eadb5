"""What downstream scripts and evaluations have in common: names of results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from common.cli import UserError

RESULTS = "results.json"
NAMED = 4  # files of a directory, in the last line of a script


def to_open(directory: Path) -> str:
    """What there is to open, pictures first, for the last line of a script."""
    paths = sorted(directory.glob("[!.]*"), key=lambda path: (path.suffix != ".png", path.name))
    more = f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more


def named_tables(flag: str, paths: Sequence[str]) -> dict[str, Path]:
    """{name in the keys of results: file} of a flag's files. UserError for two of the same name."""
    tables: dict[str, Path] = {}
    for path in map(Path, paths):
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)
        if name in tables:
            raise UserError(f"{flag}: two files are named {name}: rename one")
        tables[name] = path
    return tables
