"""JSON files and files of JSON lines, written so that nobody ever reads half of what was meant to be whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from common.files.output_directory import replace_flushed, sync


def write_json(path: Path, value: dict) -> None:
    """Replace the file at once: whoever reads finds the old one or the new one."""
    with replace_flushed(path) as partial:
        partial.write_text(json.dumps(value, indent=4, sort_keys=True) + "\n")


def write_json_flushed(path: Path, value: dict, sort_keys: bool) -> None:
    """Have it on the disk on return: a file of a directory that appears under its name when all of it is there."""
    with open(path, "w") as file:
        json.dump(value, file, indent=2, sort_keys=sort_keys)
        sync(file)


def read_json_lines(path: Path) -> list[dict]:
    """One object a line, none where there is no file; a last line torn by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class JsonLinesLog:
    """Rows with a "step", added as they come: metrics.jsonl has one a logged step, quant_stats.jsonl several."""

    def __init__(self, path: Path, keep_through: int):
        """Rows beyond step `keep_through` belong to steps that will be taken again: they are dropped."""
        self.path = path
        kept = [row for row in read_json_lines(path) if row["step"] <= keep_through]
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(_lines(kept))
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def write(self, *rows: dict) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(_lines(rows))
        except OSError as error:  # of a full disk, which names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
