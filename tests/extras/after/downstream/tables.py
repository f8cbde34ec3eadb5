"""Tables of labels for tests."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path


def write_table(path: Path, names: Sequence[str], rows: Iterable[tuple]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path
