"""The texts of Arrow IPC files and streams, as `datasets.save_to_disk` and `pyarrow.feather` write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from common.cli import UserError
from extras.prepare.sources.find_files import File
from extras.prepare.sources.record_columns import TOKENS
from extras.prepare.sources.sequence_files import Unit, as_text, check_text, column_among, open_file

MAGIC = b"ARROW1"  # of a file; a stream has none
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
ROWS_AT_ONCE = 4096


def column(unit: Unit) -> str:
    return _column_of(unit, schema(unit))


def schema(unit: Unit) -> pa.Schema:
    with open_file(unit.file) as source:
        return _reader(unit.file, source).schema


def records(file: File) -> int:
    return sum(batch.num_rows for batch in _batches(file))


def texts(unit: Unit) -> Iterator[pa.Array]:
    name = _column_of(unit, schema(unit))
    for batch in rows(unit, [name]):
        yield as_text(unit, batch.column(0))


def rows(unit: Unit, names: list[str]) -> Iterator[pa.RecordBatch]:
    for batch in _batches(unit.file):
        chosen = batch.select(names)
        chosen.validate(full=True)  # Arrow takes the offsets of a damaged file as they are
        has_large = any(map(pa.types.is_large_string, chosen.schema.types))
        for first in range(0, batch.num_rows, ROWS_AT_ONCE):
            part = chosen.slice(first, ROWS_AT_ONCE)
            # A copy: Arrow casts no 64-bit offsets above 2 GB to 32 bits, be there few bytes between them.
            yield part.take(np.arange(part.num_rows)) if has_large else part


def _batches(file: File) -> Iterator[pa.RecordBatch]:
    """ArrowInvalid for a damaged file, and for a stream that ends before the file does."""
    with open_file(file) as source:
        reader = _reader(file, source)
        try:
            if isinstance(reader, pa.RecordBatchFileReader):
                yield from map(reader.get_batch, range(reader.num_record_batches))
                return
            yield from reader
        except pa.ArrowMemoryError as error:  # a damaged length
            raise pa.ArrowInvalid(str(error)) from None
        if source.tell() != file.size:
            raise pa.ArrowInvalid("it goes on after the end of its stream")


def _reader(file: File, source: pa.NativeFile | BinaryIO) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Of a file or stream. UserError for a stream that is cut short: its reader would end there in silence."""
    start = source.read(len(MAGIC))
    source.seek(0)
    if start == MAGIC:
        return pa.ipc.open_file(source)
    source.seek(max(0, file.size - len(END_OF_STREAM)))
    if source.read(len(END_OF_STREAM)) != END_OF_STREAM:
        raise UserError(f"{file.path}: no Arrow file or stream, or it is cut short: write or fetch it again")
    source.seek(0)
    return pa.ipc.open_stream(source)


def _column_of(unit: Unit, fields: pa.Schema) -> str:
    if TOKENS in fields.names:
        raise UserError(
            f"{unit}: holds token ids (a column {TOKENS}): tokenised already: give its directory as --dataset_dir"
        )
    name = column_among(unit, fields.names)
    check_text(unit, fields.field(name).type)
    return name
