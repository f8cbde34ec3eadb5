"""Stream `id,text` CSV files, plain or compressed, with pyarrow's parser; every error names file and row.

The header is read first, so that only the columns that are needed are parsed: pyarrow would infer types of the others,
and fail in the middle of a file.
"""

from __future__ import annotations

import codecs
import csv
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from common.cli import UserError, one_line
from common.data.token_store import as_parquet, untokenised_columns
from extras.prepare.sources.compression import (
    HEAD_BYTES,
    LONGEST_PROTEIN,
    PARQUET,
    SUFFIXES,
    check_duplicates,
    check_file,
    detect_non_text,
    file_of_chunks,
    find_too_long,
    open_decompressed,
    too_long,
)
from extras.prepare.sources.records import characters, texts
from extras.prepare.sources.residues import IS_WHITESPACE, Cleaner
from extras.prepare.sources.tables import Table

logger = logging.getLogger(__name__)
LONGEST_HEADER = 1 << 20  # bytes
NAMED = 5  # files that are left out, in a log line


def read_header(file: BinaryIO, where: str, delimiter: str = ",") -> list[str]:
    """The names of the columns, as written; the file is left at the second line.

    UserError for an empty or binary file, or another encoding.
    """
    problem = detect_non_text(file.peek(HEAD_BYTES)[:HEAD_BYTES])
    line = file.readline(LONGEST_HEADER)
    if not line:
        raise UserError(f"{where}: Empty CSV file")
    if problem or b"\0" in line:
        raise UserError(f"{where}: row 0: not CSV: {problem or 'a NUL byte in the header'}")
    if len(line) == LONGEST_HEADER:
        raise UserError(f"{where}: row 0: the header has no end: not a CSV file")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: row 0: the header is not UTF-8: byte 0x{line[error.start]:02x}") from None
    try:
        return next(csv.reader([text.rstrip("\r\n")], delimiter=delimiter), [])
    except csv.Error as error:  # a name of more than 128 KiB
        raise UserError(f"{where}: row 0: the header cannot be read ({one_line(error)})") from None


def column_named(names: list[str], wanted: tuple[str, ...]) -> str | None:
    """The name in `names` that matches the first of `wanted` that has a match; case is ignored."""
    lower = [name.strip().lower() for name in names]
    matches = [names[lower.index(name)] for name in wanted if lower.count(name) == 1]
    return matches[0] if matches else None


COLUMNS = ("id", "text")
HEADER = b"id,text\n"
BLOCK_BYTES = 1 << 20  # read at once to count lines: stays in the processor's cache


def count_lines(path: Path) -> int | None:
    """Lines after the header of a file in which every line is a row; None where only a CSV parser can tell."""
    lines, last = 0, b"\n"
    with open_decompressed(path) as file:
        if file.readline(len(HEADER) + 1) != HEADER:
            return None
        while block := file.read(BLOCK_BYTES):
            raw = np.frombuffer(last + block, np.uint8)
            ends = np.flatnonzero(raw == ord("\n"))
            if b'"' in block or b"\r" in block or (np.diff(ends) == 1).any():  # the parser leaves empty lines out
                return None
            lines += len(ends) - (last == b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


NOT_UTF8 = "\ufffd"
PARSED_BYTES = LONGEST_PROTEIN  # of a block of the parser: a row must fit
SIDECAR = "rename the columns, or move the file away if it has no proteins"
REMEDY = "fix or remove the row, or give --on_bad_record skip"


def csv_files(directory: Path) -> list[Path]:
    """The *.csv files of a directory, also compressed, x999 before x1000.

    UserError if there are none, for a directory or pipe, and for a file that is there plain and compressed.
    """
    if not directory.is_dir():
        raise UserError(f"--input_dir {directory}: no such directory: run 0.download_data.py first")
    names = [f"*.csv{packed}" for packed in ("", *SUFFIXES)]
    files = [path for name in names for path in directory.glob(name) if not path.name.startswith(".")]
    if not files:
        if columns := untokenised_columns(directory):
            raise UserError(f"--input_dir {directory}: {as_parquet(directory, columns)}")
        if parquet := next(directory.glob("*.parquet"), None):
            raise UserError(f"--input_dir {directory}: no *.csv files in it; {parquet.name} is {PARQUET}")
        raise UserError(f"--input_dir {directory}: no *.csv files in it: run 0.download_data.py first")
    for path in files:
        check_file(path, str(path))
    check_duplicates(f"--input_dir {directory}", files)
    if others := sorted({path.name for path in directory.glob("[!.]*")} - {path.name for path in files}):
        logger.warning("--input_dir %s: left out, not *.csv: %s", directory, ", ".join(others[:NAMED]))
    return sorted(files, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path.name)])


def count_rows(
    path: Path, cleaner: Cleaner | None = None, line_ends: bool = False, max_record: int = LONGEST_PROTEIN
) -> int:
    """Number of rows of `read_rows`; without `cleaner` rows are counted without checking them."""
    rows = count_lines(path) if cleaner is None else None
    if rows is None:
        rows = sum(batch.num_rows for batch in read_rows(path, cleaner, line_ends, max_record))
    return rows


def read_rows(
    path: Path, cleaner: Cleaner | None = None, line_ends: bool = False, max_record: int = LONGEST_PROTEIN
) -> Iterator[pa.RecordBatch]:
    """Record batches with string columns `id` and `text`; text is ASCII, clean (extras.prepare.sources.residues), not
    empty.

    cleaner: of the texts; its `bad_records` is also called with the error of each other row, or row of more or fewer
    columns than the header; such rows are left out. By default it raises, and gaps are refused. line_ends: quoted
    texts may have line ends, which are removed. Without it, a line end in a value is always a UserError
    (extras.prepare.sources.tables). max_record: maximum bytes of a text; a longer one is always a UserError. Memory is
    a few blocks.
    """
    cleaner = cleaner or Cleaner(str(path))
    with open_decompressed(path) as file:
        names = read_header(file, str(path))
        for rows, batch in _parse(path, file_of_chunks(_as_utf8(file)), names, cleaner, line_ends, max_record):
            if (row := find_too_long(batch.column("text"), max_record)) is not None:
                raise too_long(f"{path}: row {rows[row]}", max_record)
            batch, rows = _without(batch, rows, _complaints(batch), path, cleaner)
            data, ends, refused = cleaner(*characters(batch.column("text")), lambda n, rows=rows: f"row {rows[n]}")
            batch = pa.RecordBatch.from_arrays([batch.column("id"), texts(data, ends, pa.binary())], names=COLUMNS)
            empty = dict.fromkeys(np.flatnonzero(np.diff(ends) == 0).tolist(), "the text is empty")
            batch, _ = _without(batch, rows, empty | dict.fromkeys(refused, ""), path, cleaner)
            yield pa.RecordBatch.from_arrays([column.cast(pa.string()) for column in batch.columns], names=COLUMNS)


def _without(
    batch: pa.RecordBatch, rows: np.ndarray, bad: dict[int, str], path: Path, cleaner: Cleaner
) -> tuple[pa.RecordBatch, np.ndarray]:
    """Leave out bad rows, with their numbers in `rows`. bad: what is wrong with each; "": it has been said."""
    for i, complaint in sorted(bad.items()):
        if complaint:
            cleaner.bad_records(UserError(f"{path}: row {rows[i]}: {complaint}: {REMEDY}"))
    if not bad:
        return batch, rows
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[list(bad)] = False
    return batch.filter(pa.array(keep)), rows[keep]


def _as_utf8(file: BinaryIO) -> Iterator[bytes]:
    """A file's bytes, with NOT_UTF8 in place of invalid UTF-8: pyarrow's error for a row with such bytes and a wrong
    number of columns does not name the row."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := file.read(PARSED_BYTES):
        yield data if data.isascii() and not decoder.getstate()[0] else decoder.decode(data).encode()
    yield decoder.decode(b"", final=True).encode()


def _is_printable(column: pa.Array) -> bool:
    """Whether all bytes of a binary array are printable ASCII, which few files are not."""
    data, offsets = characters(column)
    data = data[offsets[0] : offsets[-1]]
    return not len(data) or (data.min() >= ord(" ") and data.max() < 127)


def _parse(
    path: Path,
    file: BinaryIO,
    names: list[str],
    cleaner: Cleaner,
    line_ends: bool,
    max_record: int,
) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
    """The numbers of rows, and their `id` and `text` as binary: pyarrow's error for invalid UTF-8 does not name the
    row. Rows of a wrong number of columns raise, or are skipped by the cleaner's `bad_records`."""
    chosen = [column_named(names, (column,)) for column in COLUMNS]
    if None in chosen:
        raise UserError(f"{path}: row 0: the header is {','.join(names)[:80]!r}: expected id,text: {SIDECAR}")

    def misshapen(row: int, what: str) -> None:
        cleaner.bad_records(UserError(f"{path}: row {row}: {what}: {REMEDY}"))

    block = PARSED_BYTES if max_record <= LONGEST_PROTEIN else max_record
    table = Table(str(path), names, chosen, pa.binary(), block, line_ends=line_ends)
    try:
        for rows, batch in table.rows(file, misshapen if cleaner.skips else None):
            yield rows, batch.rename_columns(COLUMNS)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: {one_line(error)}: {REMEDY}") from None


def _complaints(batch: pa.RecordBatch) -> dict[int, str]:
    """The problem of each row that is not text, or the header once more."""
    complaints: dict[int, str] = {}
    # A pass for minimum and maximum instead of one for each of the bytes that are complained about.
    if not _is_printable(batch.column("id")):
        damaged = pa.compute.match_substring(batch.column("id"), NOT_UTF8)
        complaints = dict.fromkeys(np.flatnonzero(damaged).tolist(), "the id is not UTF-8")
    if not _is_printable(batch.column("text")):
        data, offsets = characters(batch.column("text"))
        places = np.flatnonzero((data >= 128) | ((data < ord(" ")) & ~IS_WHITESPACE[data]))
        rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
        for row, place in zip(rows.tolist(), places[first], strict=True):
            kind = "non-ASCII" if data[place] >= 128 else "control"
            complaints[row] = f"{kind} byte 0x{data[place]:02x} in the text"
        damaged = pa.compute.match_substring(batch.column("text"), NOT_UTF8)
        complaints |= dict.fromkeys(np.flatnonzero(damaged).tolist(), "bytes in the text that are not UTF-8")
    lengths = [np.diff(characters(column)[1]) for column in batch.columns]
    for row in np.flatnonzero((lengths[0] == len(COLUMNS[0])) & (lengths[1] == len(COLUMNS[1]))).tolist():
        if all(batch.column(n)[row].as_py().lower() == name.encode() for n, name in enumerate(COLUMNS)):
            complaints[row] = "the header once more"
    return complaints
