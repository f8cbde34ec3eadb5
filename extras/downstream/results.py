"""What downstream scripts and evaluations have in common: directories of results, and names of results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common.cli import UserError
from common.files.json_files import replace_directory

RESULTS = "results.json"
NAMED = 4  # files of a directory, in the last line of a script


def check_output(output: Path, overwrite: bool) -> None:
    """UserError unless --output_dir is new, or a directory of results that may be replaced."""
    if output.exists() and not (overwrite and (output / RESULTS).is_file()):
        raise UserError(f"--output_dir {output}: exists: choose another, or --overwrite one of this script")


@contextmanager
def results_directory(output: Path) -> Iterator[Path]:
    """As `replace_directory`. UserError where nothing can be written."""
    try:
        with replace_directory(output) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"--output_dir {output}: {error.strerror}: free some space, or choose another") from error


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
