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
    with open_stream(unit.file) as (_, stream):
        return column_among(unit, _names_of_first_object(unit, stream))


def texts(unit: Unit) -> Iterator[pa.Array]:
    options = pa.json.ReadOptions(block_size=block_bytes(unit), use_threads=False)
    name = column(unit)
    parse = pa.json.ParseOptions(explicit_schema=pa.schema([(name, pa.string())]), unexpected_field_behavior="ignore")
    with (
        open_stream(unit.file) as (_, stream),
        pa.json.open_json(stream, read_options=options, parse_options=parse) as reader,
    ):
        for batch in reader:
            yield batch.column(name)


def _names_of_first_object(unit: Unit, stream: BinaryIO) -> list[str]:
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
        return [*json.loads(line).keys()]
    except (ValueError, AttributeError, RecursionError) as error:
        raise pa.ArrowInvalid(f"its first line is not a JSON object ({one_line(error)})") from None
