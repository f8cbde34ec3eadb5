"""Read the one column of texts, proteins or documents, of a file, by the module of its format.

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
from types import ModuleType
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.hooks import extra
from extras.prepare.sources.alphabet_texts import AlphabetCleaner
from extras.prepare.sources.compression import (
    STRADDLING,
    check_file,
    decompressing,
    find_too_long,
    too_long,
)
from extras.prepare.sources.find_files import File
from extras.prepare.sources.formats import FORMATS
from extras.prepare.sources.hub import FIRST_WAIT_S, REMOTE, Retries, brief
from extras.prepare.sources.record_columns import column_named, is_text, wrong_delimiter
from extras.prepare.sources.records import BadRecords, characters
from extras.prepare.sources.residues import Cleaner, is_alignment

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
    longest, row = unit.file.content.longest, 0
    with closing(reader_of(unit.file).texts(unit)) as blocks, _naming_the_row(unit, lambda: row):
        for text in blocks:
            first, row = first_row - row, row + len(text)
            if first >= len(text):
                continue
            if isinstance(text, pa.ChunkedArray):
                text = text.combine_chunks()
            text = as_text(unit, text)
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
        raise too_long(f"{unit}: after row {row():,}", block_bytes(unit)) from None


def reader_of(file: File) -> ModuleType:
    """The module of a file's format: see `Format`."""
    return import_module(FORMATS[file.kind].module)


def column_of(file: File) -> str | None:
    """The name of the column of texts; None for a format without columns. UserError if there is none."""
    return reader_of(file).column(Unit(file))


def as_text(unit: Unit, text: pa.Array) -> pa.Array:
    """Cast any of Arrow's types of texts to string; UserError for other types."""
    if pa.types.is_string(text.type) or pa.types.is_binary(text.type):
        return text
    check_text(unit, text.type)
    return text.cast(pa.string())


def check_text(unit: Unit, kind: pa.DataType) -> None:
    of_values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not is_text(of_values):
        raise UserError(f"{unit}: the column of {unit.file.content.name} holds {kind}: expected texts")


def column_among(unit: Unit, names: list[str]) -> str:
    content = unit.file.content
    if (column := column_named(names, content.columns)) is not None:
        return column
    wrong_delimiter(str(unit), names)
    found = ", ".join(names)[:80]
    raise UserError(f"{unit}: no column {' or '.join(content.columns)}, only {found}: {content.other_column}")


def block_bytes(unit: Unit) -> int:
    """Block size of a parser: a row must fit in it."""
    return max(BLOCK_BYTES, unit.file.content.longest)


def open_file(file: File):
    """A seekable binary file."""
    if not file.path.startswith(REMOTE):
        return pa.memory_map(file.path)
    from huggingface_hub import HfFileSystem

    return HfFileSystem().open(file.path, "rb", block_size=8 << 20)


@contextmanager
def open_stream(file: File) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The raw file, whose position shows the progress of reading, and its decompressed bytes."""
    if file.path.startswith(REMOTE):
        raw = io.BufferedReader(open_file(file))
    else:
        check_file(Path(file.path), file.path)
        raw = open(file.path, "rb")  # noqa: SIM115
    with raw, decompressing(raw, file.path) as stream:
        yield raw, stream


ROW_BITS = 40  # a record's number is unit << ROW_BITS | row


def units_of(files: tuple[File, ...], wanted: int) -> list[Unit]:
    """The units of some files: the files if there are at least `wanted`, else their row groups, of those with some."""
    if len(files) >= wanted:
        return [Unit(file) for file in files]
    return [unit for file in files for unit in _row_groups(file)]


def _row_groups(file: File) -> list[Unit]:
    if not has_row_groups(file):
        return [Unit(file)]
    return [Unit(file, group) for group in range(len(row_counts(file)))]


def has_row_groups(file: File) -> bool:
    """Whether the format has parts that can be read alone, and says how many rows each has."""
    return hasattr(reader_of(file), "row_counts")


def row_counts(file: File) -> list[int]:
    """Rows in each row group of a file that has some, with retries."""
    retries = _retries(file)
    while True:
        try:
            with reporting(file.path):
                return reader_of(file).row_counts(file)
        except _Network as trouble:
            retries.wait_after(trouble.error)


def _retries(file: File, first_wait_s: float = FIRST_WAIT_S, what: str = "") -> Retries:
    repo = "/".join(file.path.removeprefix(REMOTE).split("/")[1:3]).split("@")[0]
    return Retries(what or file.path, repo, first_wait_s=first_wait_s)


def check_columns(files: tuple[File, ...]) -> None:
    """UserError for a local file without a column of texts, say a table beside the data. Only the beginning of each
    is read; Hub files are not requested."""

    def check(file: File) -> None:
        with reporting(file.path):
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
            with reporting(str(unit)):
                for text in read_texts(unit, row):
                    yield text
                    row, retries.failures = row + len(text), 0
                return
        except _Network as trouble:
            retries.wait_after(trouble.error)


def read_batches(unit: Unit, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Some columns of a local file, unchanged. Errors as of `read_rows`."""
    row = 0
    with reporting(str(unit)), _naming_the_row(unit, lambda: row):
        for batch in reader_of(unit.file).rows(unit, names):
            yield batch
            row += batch.num_rows


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
    cleaner, row = cleaner_of(unit), first_row
    for text in read_rows(unit, first_row, wait_s):
        data, offsets, refused = cleaner(*characters(text), lambda number, row=row: f"row {row + number + 1:,}")
        cleaner.changes.empty += int(np.count_nonzero(np.diff(offsets) == 0)) - len(refused)
        row += len(text)
        if str(unit) not in _told:  # not only at the end: a file may be long
            report(f"{unit}, rows {first_row + 1:,} to {row:,}", unit, cleaner)
        yield data, offsets
    report(str(unit), unit, cleaner)


def cleaner_of(unit: Unit) -> Cleaner:
    content = unit.file.content
    if content.alphabet:
        alphabet = extra().alphabet(json.loads(content.alphabet), "--alphabet")
        return AlphabetCleaner(str(unit), alphabet, BadRecords(content.on_bad_record))
    bad_records, aligned = BadRecords(content.on_bad_record), is_alignment(unit.file.path)
    return Cleaner(str(unit), content.gaps, bad_records, aligned, content.chains)


_told: dict[str, list] = {}  # what this process has reported of each unit: every epoch reads it again


def report(where: str, unit: Unit, cleaner: Cleaner) -> None:
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
def reporting(what: str) -> Iterator[None]:
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
