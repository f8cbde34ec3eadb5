"""The texts of parquet files, which are read by row groups."""

from __future__ import annotations

from collections.abc import Iterator

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
    with open_file(unit.file) as handle:
        return _column_of_schema(unit, pq.read_schema(handle))


def row_counts(file: File) -> list[int]:
    with open_file(file) as handle:
        metadata = pq.read_metadata(handle)
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def texts(unit: Unit) -> Iterator[pa.Array]:
    with open_file(unit.file) as handle:
        metadata = pq.read_metadata(handle)
        groups = range(metadata.num_row_groups) if unit.row_group is None else [unit.row_group]
        name = _column_of_schema(unit, metadata.schema.to_arrow_schema())
        for group in groups:
            where = f"{unit.file.path}, row group {group}"
            file = handle
            if unit.file.path.startswith(REMOTE):
                file = fetched(handle, metadata.row_group(group), name, unit.file.size)
            batches = read_columns(file, where, metadata, group, [name], ROWS_AT_ONCE, unit.file.content.longest)
            yield from coalesce((as_text(unit, batch.column(0)) for batch in batches), ROWS_AT_ONCE, BLOCK_BYTES)


def _column_of_schema(unit: Unit, schema: pa.Schema) -> str:
    column = column_among(unit, schema.names)
    check_text(unit, schema.field(column).type)
    return column
