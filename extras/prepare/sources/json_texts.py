"""The texts of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.json

from common.cli import UserError, one_line
from extras.prepare.sources.compression import HEAD_BYTES, detect_non_text, too_long
from extras.prepare.sources.sequence_files import Unit, block_bytes, column_among, open_stream


def column(unit: Unit) -> str:
    return column_among(unit, schema(unit).names)


def schema(unit: Unit) -> pa.Schema:
    """The fields of the first object; what is no text, number or null is a structure."""
    kinds = {str: pa.string(), type(None): pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    with open_stream(unit.file) as (_, stream):
        first = _first_object(unit, stream)
    return pa.schema([(name, kinds.get(type(value), pa.struct([]))) for name, value in first.items()])


def texts(unit: Unit) -> Iterator[pa.Array]:
    name = column(unit)
    for batch in _batches(unit, pa.schema([(name, pa.string())])):
        yield batch.column(name)


def rows(unit: Unit, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Fields that the first object lacks are texts."""
    kinds = schema(unit)
    here = {name: kinds.field(name) for name in kinds.names}
    yield from _batches(unit, pa.schema([here.get(name, pa.field(name, pa.string())) for name in names]))


def _batches(unit: Unit, fields: pa.Schema) -> Iterator[pa.RecordBatch]:
    options = pa.json.ReadOptions(block_size=block_bytes(unit), use_threads=False)
    parse = pa.json.ParseOptions(explicit_schema=fields, unexpected_field_behavior="ignore")
    with (
        open_stream(unit.file) as (_, stream),
        pa.json.open_json(stream, read_options=options, parse_options=parse) as reader,
    ):
        yield from reader


def _first_object(unit: Unit, stream: BinaryIO) -> dict:
    if problem := detect_non_text(stream.peek(HEAD_BYTES)[:HEAD_BYTES]):
        raise UserError(f"{unit}: not JSON lines: {problem}")
    line, number, longest = b"\n", 0, block_bytes(unit)
    while line and not line.strip():
        line, number = stream.readline(longest + 1), number + 1
    if len(line) > longest:
        raise too_long(f"{unit}: line {number}", longest)
    if line.lstrip().startswith(b"["):
        raise UserError(f"{unit}: a JSON array: write an object a line: jq -c '.[]' FILE > NEW.jsonl")
    try:
        return dict(json.loads(line).items())
    except (ValueError, AttributeError, RecursionError) as error:
        raise pa.ArrowInvalid(f"its first line is not a JSON object ({one_line(error)})") from None
