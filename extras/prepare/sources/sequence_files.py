"""Read the one column of texts, proteins or documents, of a file: parquet, JSON lines, CSV, TSV, FASTA, plain text.

All but parquet may be compressed. Other columns or fields are never parsed: they may have any type, another one in
each row, or begin late. A unit, a file or a row group of parquet, is read from one end to the other; reading from the
Hub is retried.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from common.cli import UserError, one_line
from extras.prepare.sources.compression import (
    HEAD_BYTES,
    STRADDLING,
    check_file,
    decompressing,
    detect_non_text,
    find_too_long,
    strip_compression,
    too_long,
)
from extras.prepare.sources.csv_records import column_named, read_header
from extras.prepare.sources.dataset import File
from extras.prepare.sources.fasta import read_fasta_lines
from extras.prepare.sources.formats import FORMATS
from extras.prepare.sources.hub import FIRST_WAIT_S, REMOTE, Retries, brief
from extras.prepare.sources.parquet_pages import coalesce, fetched, read_columns
from extras.prepare.sources.records import BadRecords, characters, columns
from extras.prepare.sources.residues import Cleaner, is_alignment
from extras.prepare.sources.tables import Table

TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
TEXTS += (pa.types.is_string_view, pa.types.is_binary_view, pa.types.is_null)
ROWS_AT_ONCE = 4096
BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Unit:
    """A file, or one of its row groups."""

    file: File
    row_group: int | None = None  # None: the whole file

    def __str__(self) -> str:
        return self.file.path + ("" if self.row_group is None else f", row group {self.row_group}")


def read_texts(unit: Unit, first_row: int) -> Iterator[pa.Array]:
    """The texts from row `first_row` on, unchanged, string or binary; "" for a missing one.

    UserError for a column of another type and for a text that is too long; Arrow's errors for a damaged file.
    """
    readers = {"parquet": _parquet, "json": _json, "csv": _csv, "fasta": _fasta}
    texts = readers.get(unit.file.kind) or import_module(FORMATS[unit.file.kind].module).texts
    longest, row = unit.file.content.longest, 0
    with closing(texts(unit)) as blocks, _naming_the_row(unit, lambda: row):
        for text in blocks:
            first, row = first_row - row, row + len(text)
            if first >= len(text):
                continue
            if isinstance(text, pa.ChunkedArray):
                text = text.combine_chunks()
            text = _as_text(unit, text)
            if (long := find_too_long(text, longest)) is not None:
                raise too_long(f"{unit}: row {row - len(text) + long + 1:,}", longest)
            yield (text.fill_null("") if text.null_count else text)[max(first, 0) :]


@contextmanager
def _naming_the_row(unit: Unit, row: Callable[[], int]) -> Iterator[None]:
    """Turn pyarrow's error for a row longer than a parser's block into a UserError. row: rows read so far."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if STRADDLING not in str(error):
            raise
        raise too_long(f"{unit}: after row {row():,}", _block_bytes(unit)) from None


def column_of(file: File) -> str | None:
    """The name of the column of texts; None for a format without columns. UserError if there is none."""
    unit = Unit(file)
    if module := FORMATS[file.kind].module:
        return import_module(module).column(unit)
    if file.kind == "parquet":
        with _open(file) as handle:
            return _column_of_schema(unit, pq.read_schema(handle))
    if file.kind == "fasta":
        check_file(Path(file.path), file.path)
        return None
    with open_stream(file) as (_, stream):
        if file.kind == "csv":
            return _column(unit, read_header(stream, str(unit), _delimiter(unit)))
        return _column(unit, _names_of_first_object(unit, stream))


def _as_text(unit: Unit, text: pa.Array) -> pa.Array:
    """Cast any of Arrow's types of texts to string; UserError for other types."""
    if pa.types.is_string(text.type) or pa.types.is_binary(text.type):
        return text
    _check_text(unit, text.type)
    return text.cast(pa.string())


def _check_text(unit: Unit, kind: pa.DataType) -> None:
    of_values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_text(of_values) for is_text in TEXTS):
        raise UserError(f"{unit}: the column of {unit.file.content.name} holds {kind}: expected texts")


def _parquet(unit: Unit) -> Iterator[pa.Array]:
    with _open(unit.file) as handle:
        metadata = pq.read_metadata(handle)
        groups = range(metadata.num_row_groups) if unit.row_group is None else [unit.row_group]
        column = _column_of_schema(unit, metadata.schema.to_arrow_schema())
        for group in groups:
            where = f"{unit.file.path}, row group {group}"
            file = handle
            if unit.file.path.startswith(REMOTE):
                file = fetched(handle, metadata.row_group(group), column, unit.file.size)
            batches = read_columns(file, where, metadata, group, [column], ROWS_AT_ONCE, unit.file.content.longest)
            yield from coalesce((_as_text(unit, batch.column(0)) for batch in batches), ROWS_AT_ONCE, BLOCK_BYTES)


def _column_of_schema(unit: Unit, schema: pa.Schema) -> str:
    column = _column(unit, schema.names)
    _check_text(unit, schema.field(column).type)
    return column


def _json(unit: Unit) -> Iterator[pa.Array]:
    options = pa.json.ReadOptions(block_size=_block_bytes(unit), use_threads=False)
    column = column_of(unit.file)
    parse = pa.json.ParseOptions(
        explicit_schema=pa.schema([(column, pa.string())]), unexpected_field_behavior="ignore"
    )
    with (
        open_stream(unit.file) as (_, stream),
        pa.json.open_json(stream, read_options=options, parse_options=parse) as reader,
    ):
        for batch in reader:
            yield batch.column(column)


def _names_of_first_object(unit: Unit, stream: BinaryIO) -> list[str]:
    if problem := detect_non_text(stream.peek(HEAD_BYTES)[:HEAD_BYTES]):
        raise UserError(f"{unit}: not JSON lines: {problem}")
    line, number, longest = b"\n", 0, _block_bytes(unit)
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


def _csv(unit: Unit) -> Iterator[pa.Array]:
    line_ends = unit.file.content.line_ends
    with open_stream(unit.file) as (_, stream):
        names = read_header(stream, str(unit), _delimiter(unit))
        column = _column(unit, names)
        table = Table(str(unit), names, [column], pa.string(), _block_bytes(unit), _delimiter(unit), line_ends)
        for numbers, batch in table.rows(stream):
            if not line_ends and (again := _header_again(batch.column(0), column)) is not None:
                raise UserError(f"{unit}: row {numbers[again]}: the header once more: remove the row")
            yield batch.column(0)


def _delimiter(unit: Unit) -> str:
    return "\t" if strip_compression(unit.file.path.lower()).endswith(".tsv") else ","


def _header_again(text: pa.Array, column: str) -> int | None:
    """The first row that holds the column's name, as in concatenated files. In capitals, it may be a protein."""
    length = pa.compute.equal(pa.compute.binary_length(text), len(column.encode()))
    for row in np.flatnonzero(length).tolist():
        found = text[row].as_py()
        if found == column or (found.lower() == column.lower() and not found.isupper()):
            return row
    return None


def _fasta(unit: Unit) -> Iterator[pa.Array]:
    cleaner = _cleaner(unit)
    for lines in read_fasta_lines(local_path(unit), max_record=unit.file.content.longest, cleaner=cleaner):
        yield columns(lines).column("text")
    _report(str(unit), unit, cleaner)


def _column(unit: Unit, names: list[str]) -> str:
    content = unit.file.content
    if (column := column_named(names, content.columns)) is not None:
        return column
    found = ", ".join(names)[:80]
    for delimiter, name in {";": "semicolons", "\t": "tabs", ",": "commas"}.items():
        if len(names) == 1 and delimiter in names[0]:
            raise UserError(
                f"{unit}: one column, {found!r}: separated by {name}? Save it as CSV with commas, or as .tsv"
            )
    raise UserError(f"{unit}: no column {' or '.join(content.columns)}, only {found}: {content.other_column}")


def _block_bytes(unit: Unit) -> int:
    """Block size of a parser: a row must fit in it."""
    return max(BLOCK_BYTES, unit.file.content.longest)


def _open(file: File):
    """A seekable binary file."""
    if not file.path.startswith(REMOTE):
        return pa.memory_map(file.path)
    from huggingface_hub import HfFileSystem

    return HfFileSystem().open(file.path, "rb", block_size=8 << 20)


@contextmanager
def open_stream(file: File) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The raw file, whose position shows the progress of reading, and its decompressed bytes."""
    if file.path.startswith(REMOTE):
        raw = io.BufferedReader(_open(file))
    else:
        check_file(Path(file.path), file.path)
        raw = open(file.path, "rb")  # noqa: SIM115
    with raw, decompressing(raw, file.path) as stream:
        yield raw, stream


def local_path(unit: Unit) -> str:
    """A local path to read FASTA from: a Hub file is downloaded to the cache first."""
    path = unit.file.path
    if not path.startswith(REMOTE):
        return path
    from huggingface_hub import hf_hub_download

    owner, rest, name = path.removeprefix(REMOTE + "datasets/").split("/", 2)
    repo, revision = rest.split("@")
    return hf_hub_download(f"{owner}/{repo}", name, repo_type="dataset", revision=revision)


ROW_BITS = 40  # a record's number is unit << ROW_BITS | row


def units_of(files: tuple[File, ...], wanted: int) -> list[Unit]:
    """The units of some files: the files if there are at least `wanted`, else row groups of parquet files."""
    if len(files) >= wanted:
        return [Unit(file) for file in files]
    units = []
    for file in files:
        groups = range(len(row_counts(file))) if file.kind == "parquet" else [None]
        units += [Unit(file, group) for group in groups]
    return units


def row_counts(file: File) -> list[int]:
    """Rows in each row group of a parquet file, with retries."""
    retries = _retries(file)
    while True:
        try:
            with _reporting(file.path), _open(file) as handle:
                metadata = pq.read_metadata(handle)
                return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        except _Network as trouble:
            retries.wait_after(trouble.error)


def _retries(file: File, first_wait_s: float = FIRST_WAIT_S, what: str = "") -> Retries:
    repo = "/".join(file.path.removeprefix(REMOTE).split("/")[1:3]).split("@")[0]
    return Retries(what or file.path, repo, first_wait_s=first_wait_s)


def check_columns(files: tuple[File, ...]) -> None:
    """UserError for a local file without a column of texts, say a table beside the data. Only the beginning of each
    is read; Hub files are not requested."""

    def check(file: File) -> None:
        with _reporting(file.path):
            column_of(file)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(check, (file for file in files if not file.path.startswith(REMOTE))):
            pass


def read_rows(unit: Unit, first_row: int, wait_s: float = FIRST_WAIT_S) -> Iterator[pa.Array]:
    """The rows of a unit from `first_row` on, in blocks, string or binary; a missing value is an empty row.

    Network failures are retried with exponential backoff, resuming at the row that failed. UserError after ATTEMPTS
    failures, and for files of another format than their names say.
    """
    row, retries = first_row, _retries(unit.file, wait_s, str(unit))
    while True:
        try:
            with _reporting(str(unit)):
                for text in read_texts(unit, row):
                    yield text
                    row, retries.failures = row + len(text), 0
                return
        except _Network as trouble:
            retries.wait_after(trouble.error)


def read_sequences(
    unit: Unit, first_row: int, wait_s: float = FIRST_WAIT_S
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`read_rows` of proteins, cleaned (extras.prepare.sources.residues): characters uint8 [C] and row offsets [n +
    1].

    A row that is skipped or has no protein is empty. What was changed is logged at the end of the unit.
    """
    if unit.file.kind == "fasta":  # cleaned as it is parsed, where records have names
        yield from (characters(text) for text in read_rows(unit, first_row, wait_s))
        return
    cleaner, row = _cleaner(unit), first_row
    for text in read_rows(unit, first_row, wait_s):
        data, offsets, refused = cleaner(*characters(text), lambda number, row=row: f"row {row + number + 1:,}")
        cleaner.changes.empty += int(np.count_nonzero(np.diff(offsets) == 0)) - len(refused)
        row += len(text)
        if str(unit) not in _told:  # not only at the end: a file may be long
            _report(f"{unit}, rows {first_row + 1:,} to {row:,}", unit, cleaner)
        yield data, offsets
    _report(str(unit), unit, cleaner)


def _cleaner(unit: Unit) -> Cleaner:
    content = unit.file.content
    return Cleaner(str(unit), content.gaps, BadRecords(content.on_bad_record), is_alignment(unit.file.path))


_told: dict[str, list] = {}  # what this process has reported of each unit: every epoch reads it again


def _report(where: str, unit: Unit, cleaner: Cleaner) -> None:
    """Log what was changed and skipped, unless there is nothing new."""
    state = cleaner.state
    if state != Cleaner("").state and state not in _told.setdefault(str(unit), []):
        _told[str(unit)].append(state)
        cleaner.report(where)


class _Network(Exception):
    """A failure of the network, which a retry may mend. error: the original."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Turn a damaged file into a UserError, and a failure that a retry may mend into a _Network."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: cannot be read: {brief(error)}: repair the file or leave it out") from None
    except (OSError, RuntimeError) as error:
        if what.startswith(REMOTE):
            raise _Network(error) from error
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or brief(error)  # of Arrow: a damaged file has no errno
        raise UserError(f"{what}: cannot be read: {reason}: repair the file or leave it out") from None
    except Exception as error:
        if not what.startswith(REMOTE):
            raise
        from httpx import HTTPError

        if isinstance(error, HTTPError):
            raise _Network(error) from error
        raise
