"""Files of evaluations during training, by what their results are named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from common.cli import UserError


def named_tables(flag: str, paths: Sequence[str]) -> dict[str, Path]:
    """{name in the keys of results: file} of a flag's files. UserError for two of the same name."""
    tables: dict[str, Path] = {}
    for path in map(Path, paths):
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem)
        if name in tables:
            raise UserError(f"{flag}: two files are named {name}: rename one")
        tables[name] = path
    return tables
