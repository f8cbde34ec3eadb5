"""The texts of CSV and TSV."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute

from common.cli import UserError
from extras.prepare.sources.csv_records import delimiter_of, read_header
from extras.prepare.sources.find_files import File
from extras.prepare.sources.record_counts import estimated, filled
from extras.prepare.sources.sequence_files import Unit, block_bytes, column_among, open_stream
from extras.prepare.sources.tables import Table


def column(unit: Unit) -> str:
    with open_stream(unit.file) as (_, stream):
        return column_among(unit, read_header(stream, str(unit), delimiter_of(unit.file.path)))


def records(file: File) -> float:
    return estimated(file, lambda lines: max(0, filled(lines) - 1))  # the header is none


def texts(unit: Unit) -> Iterator[pa.Array]:
    line_ends = unit.file.content.line_ends
    with open_stream(unit.file) as (_, stream):
        delimiter = delimiter_of(unit.file.path)
        names = read_header(stream, str(unit), delimiter)
        name = column_among(unit, names)
        table = Table(str(unit), names, [name], pa.string(), block_bytes(unit), delimiter, line_ends)
        for numbers, batch in table.rows(stream):
            if not line_ends and (again := _header_again(batch.column(0), name)) is not None:
                raise UserError(f"{unit}: row {numbers[again]}: the header once more: remove the row")
            yield batch.column(0)


def _header_again(text: pa.Array, column: str) -> int | None:
    """The first row that holds the column's name, as in concatenated files. In capitals, it may be a protein."""
    length = pa.compute.equal(pa.compute.binary_length(text), len(column.encode()))
    for row in np.flatnonzero(length).tolist():
        found = text[row].as_py()
        if found == column or (found.lower() == column.lower() and not found.isupper()):
            return row
    return None
