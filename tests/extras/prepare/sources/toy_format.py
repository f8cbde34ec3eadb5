"""A data format of a file of its own, as CONTRIBUTING.md has it: an id, a blank and a protein on each line."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from common.cli import UserError
from extras.prepare.sources.formats import Format
from extras.prepare.sources.sequence_files import Unit, open_stream

LINES_AT_ONCE = 4
FORMAT = Format((".pairs",), ("proteins",), __name__)


def column(unit: Unit) -> None:
    with open_stream(unit.file) as (_, stream):
        _protein(unit, stream.readline())


def texts(unit: Unit) -> Iterator[pa.Array]:
    with open_stream(unit.file) as (_, stream):
        while lines := [line for _ in range(LINES_AT_ONCE) if (line := stream.readline())]:
            yield pa.array([_protein(unit, line) for line in lines], pa.string())


def _protein(unit: Unit, line: bytes) -> str:
    if len(words := line.decode().split()) != 2:
        raise UserError(f"{unit}: expected an id and a protein, not {line!r}")
    return words[1]
