"""The texts of Arrow IPC files and streams, as `datasets.save_to_disk` and `pyarrow.feather` write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from common.cli import UserError
from extras.prepare.sources.find_files import File
from extras.prepare.sources.record_columns import TOKENS
from extras.prepare.sources.sequence_files import Unit, as_text, check_text, column_among, open_file

MAGIC = b"ARROW1"  # of a file; a stream has none
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
ROWS_AT_ONCE = 4096
Reader = pa.RecordBatchFileReader | pa.RecordBatchStreamReader


def column(unit: Unit) -> str:
    return _column_of(unit, schema(unit))


def schema(unit: Unit) -> pa.Schema:
    with _opened(unit.file) as reader:
        return reader.schema


def records(file: File) -> int:
    with _opened(file) as reader:
        return sum(batch.num_rows for batch in _batches(reader))


def texts(unit: Unit) -> Iterator[pa.Array]:
    name = _column_of(unit, schema(unit))
    for batch in rows(unit, [name]):
        yield as_text(unit, batch.column(0))


def rows(unit: Unit, names: list[str]) -> Iterator[pa.RecordBatch]:
    with _opened(unit.file) as reader:
        for batch in _batches(reader):
            chosen = batch.select(names)
            has_large = any(map(pa.types.is_large_string, chosen.schema.types))
            for first in range(0, batch.num_rows, ROWS_AT_ONCE):
                part = chosen.slice(first, ROWS_AT_ONCE)
                # A copy: Arrow casts no 64-bit offsets above 2 GB to 32 bits, be there few bytes between them.
                yield part.take(np.arange(part.num_rows)) if has_large else part


@contextmanager
def _opened(file: File) -> Iterator[Reader]:
    """Of a file or stream. UserError for a stream that is cut short: its reader would end there in silence."""
    with open_file(file) as source:
        start = source.read(len(MAGIC))
        source.seek(0)
        if start == MAGIC:
            yield pa.ipc.open_file(source)
            return
        source.seek(max(0, file.size - len(END_OF_STREAM)))
        if source.read(len(END_OF_STREAM)) != END_OF_STREAM:
            raise UserError(f"{file.path}: no Arrow file or stream, or it is cut short: write or fetch it again")
        source.seek(0)
        yield pa.ipc.open_stream(source)


def _batches(reader: Reader) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _column_of(unit: Unit, fields: pa.Schema) -> str:
    if TOKENS in fields.names:
        raise UserError(
            f"{unit}: holds token ids (a column {TOKENS}): tokenised already: give its directory as --dataset_dir"
        )
    name = column_among(unit, fields.names)
    check_text(unit, fields.field(name).type)
    return name
