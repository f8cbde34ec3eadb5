"""The texts of parquet files, which are read by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from extras.prepare.sources.find_files import File
from extras.prepare.sources.hub import REMOTE
from extras.prepare.sources.parquet_pages import coalesce, fetched, read_columns
from extras.prepare.sources.sequence_files import (
    BLOCK_BYTES,
    Unit,
    as_text,
    check_text,
    column_among,
    open_file,
)

ROWS_AT_ONCE = 4096


def column(unit: Unit) -> str:
    return _column_of_schema(unit, schema(unit))


def schema(unit: Unit) -> pa.Schema:
    with open_file(unit.file) as handle:
        return pq.read_schema(handle)


def row_counts(file: File) -> list[int]:
    with open_file(file) as handle:
        metadata = pq.read_metadata(handle)
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def texts(unit: Unit) -> Iterator[pa.Array]:
    with open_file(unit.file) as handle:
        metadata = pq.read_metadata(handle)
        name = _column_of_schema(unit, metadata.schema.to_arrow_schema())
        for batches in _row_groups(unit, handle, metadata, [name]):
            yield from coalesce((as_text(unit, batch.column(0)) for batch in batches), ROWS_AT_ONCE, BLOCK_BYTES)


def rows(unit: Unit, names: list[str]) -> Iterator[pa.RecordBatch]:
    with open_file(unit.file) as handle:
        for batches in _row_groups(unit, handle, pq.read_metadata(handle), names):
            yield from batches


def _row_groups(
    unit: Unit, handle: BinaryIO, metadata: pq.FileMetaData, names: list[str]
) -> Iterator[Iterator[pa.RecordBatch]]:
    """Columns of each row group of the unit. One column of a remote file is fetched in one request."""
    groups = range(metadata.num_row_groups) if unit.row_group is None else [unit.row_group]
    for group in groups:
        file = handle
        if unit.file.path.startswith(REMOTE):
            file = fetched(handle, metadata.row_group(group), names[0], unit.file.size)
        where = f"{unit.file.path}, row group {group}"
        yield read_columns(file, where, metadata, group, names, ROWS_AT_ONCE, unit.file.content.longest)


def _column_of_schema(unit: Unit, schema: pa.Schema) -> str:
    column = column_among(unit, schema.names)
    check_text(unit, schema.field(column).type)
    return column
