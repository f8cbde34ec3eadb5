"""Directories that datasets' save_to_disk wrote with text, not tokens: what to do with them, for messages."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path

from common.data.token_store import COLUMN


def untokenised_columns(directory: Path) -> list[str]:
    """The columns of a directory of datasets' save_to_disk (of its first split) if none is COLUMN, else []."""
    for info in (directory / "dataset_info.json", *sorted(directory.glob("*/dataset_info.json"))):
        with suppress(OSError, ValueError, KeyError, TypeError):
            columns = list(json.loads(info.read_text(encoding="utf-8"))["features"])
            return [] if COLUMN in columns else columns
    return []


def as_parquet(directory: Path, columns: list[str]) -> str:
    """For messages: how to train on such columns of text."""
    root = directory.parent if (directory.parent / "dataset_dict.json").is_file() else directory
    load, out = f"datasets.load_from_disk({str(root)!r})", f"{root}.parquet"
    write = f"{load}.to_parquet({out!r})"
    if (root / "dataset_dict.json").is_file():
        out = f"{root}-*.parquet"
        write = f"[split.to_parquet(f{f'{root}-{{name}}.parquet'!r}) for name, split in {load}.items()]"
    return (
        f"saved by datasets with the columns {', '.join(columns)[:80]}, so it is not tokenised: write parquet, and "
        f'train on that by --dataset {shlex.quote(out)}: python -c "import datasets; {write}"'
    )
