"""What downstream scripts and evaluations have in common: names of results."""

from __future__ import annotations

from pathlib import Path

RESULTS = "results.json"
PICTURES = (".png", ".svg", ".pdf")
NAMED = 4  # files of a directory, in the last line of a script


def to_open(directory: Path) -> str:
    """What there is to open, pictures first, for the last line of a script."""
    paths = sorted(directory.glob("[!.]*"), key=lambda path: (path.suffix not in PICTURES, path.name))
    more = f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else ""
    return ", ".join(map(str, paths[:NAMED])) + more
