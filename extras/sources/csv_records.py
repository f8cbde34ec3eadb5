"""Stream `id,text` CSV files, plain or compressed, with pyarrow's parser; every error names file and row.

The header is read first, so that only the columns that are needed are parsed: pyarrow would infer types of the others,
and fail in the middle of a file.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from common.cli import UserError, one_line
from extras.sources.compression import (
    HEAD_BYTES,
    LONGEST_PROTEIN,
    STRADDLING,
    SUFFIXES,
    check_duplicates,
    check_file,
    detect_non_text,
    file_of_chunks,
    find_too_long,
    open_decompressed,
    too_long,
)
from extras.sources.records import BadRecords, characters, clean, texts

LONGEST_HEADER = 1 << 20  # bytes


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
    found = [names[lower.index(name)] for name in wanted if lower.count(name) == 1]
    return found[0] if found else None


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
STRAY_QUOTE = (
    "a text that continues after a line end, after a quote that is not closed: fix or remove the quote (or, if texts "
    "may have line ends, give --line_ends_in_text to 1.tokenize_uniref_csv.py)"
)
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
        raise UserError(f"--input_dir {directory}: no *.csv files in it: run 0.download_data.py first")
    for path in files:
        check_file(path, str(path))
    check_duplicates(f"--input_dir {directory}", files)
    return sorted(files, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path.name)])


def count_rows(
    path: Path, bad_records: BadRecords | None = None, line_ends: bool = False, max_record: int = LONGEST_PROTEIN
) -> int:
    """Number of rows of `read_rows`; without `bad_records` rows are counted without checking them."""
    rows = count_lines(path) if bad_records is None else None
    if rows is None:
        rows = sum(batch.num_rows for batch in read_rows(path, bad_records, line_ends, max_record))
    return rows


def read_rows(
    path: Path, bad_records: BadRecords | None = None, line_ends: bool = False, max_record: int = LONGEST_PROTEIN
) -> Iterator[pa.RecordBatch]:
    """Record batches with string columns `id` and `text`; text is ASCII, clean (extras.sources.records), not empty.

    bad_records: called with the error of each other row, or row of more or fewer columns than the header; such rows
    are left out. Without it, UserError. line_ends: quoted texts may have line ends, which are removed. Without it, a
    line end is always a UserError: after a stray quote, everything up to the next one is one text. max_record: maximum
    bytes of a text; a longer one is always a UserError. Memory is a few blocks.
    """
    with open_decompressed(path) as file:
        names = read_header(file, str(path))
        misshapen: list[int] = []  # rows of a wrong number of columns, which the parser leaves out
        parsed = 0
        for batch in _parse(
            path, file_of_chunks(_as_utf8(file)), names, misshapen, bad_records, line_ends, max_record
        ):
            rows = np.arange(parsed + 1, parsed + batch.num_rows + 1)
            rows += np.searchsorted(np.array(misshapen) - np.arange(len(misshapen)), rows, side="right")
            parsed += batch.num_rows
            # A pass for minimum and maximum instead of one for each of the bytes that are complained about.
            printable = [_is_printable(column) for column in batch.columns]
            if not line_ends and not all(printable) and (row := first_with_line_end(batch.columns)) is not None:
                raise UserError(f"{path}: row {rows[row]}: {STRAY_QUOTE}")
            if (row := find_too_long(batch.column("text"), max_record)) is not None:
                raise too_long(f"{path}: row {rows[row]}", max_record)
            text = texts(*clean(*characters(batch.column("text")), str(path)), pa.binary())
            batch = pa.RecordBatch.from_arrays([batch.column("id"), text], names=COLUMNS)
            bad = _complaints(batch, *printable)
            for i, complaint in sorted(bad.items()):
                (bad_records or BadRecords())(UserError(f"{path}: row {rows[i]}: {complaint}: {REMEDY}"))
            if bad:
                keep = np.ones(batch.num_rows, dtype=bool)
                keep[list(bad)] = False
                batch = batch.filter(pa.array(keep))
            yield pa.RecordBatch.from_arrays([column.cast(pa.string()) for column in batch.columns], names=COLUMNS)


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
    misshapen: list[int],
    bad_records: BadRecords | None,
    line_ends: bool,
    max_record: int,
) -> Iterator[pa.RecordBatch]:
    """`id` and `text` as binary. Rows of a wrong number of columns raise, or are noted in `misshapen`."""
    chosen = [column_named(names, (column,)) for column in COLUMNS]
    if None in chosen:
        raise UserError(f"{path}: row 0: the header is {','.join(names)[:80]!r}: expected id,text: {SIDECAR}")
    if not file.peek(1):
        return
    swallowed: list[int] = []
    given = 0

    def leave_out(row) -> str:
        if "\n" in row.text and not line_ends:
            swallowed.append(row.number)
            return "error"
        misshapen.append(row.number)
        complaint = f"Expected {row.expected_columns} columns, got {row.actual_columns}"
        bad_records(UserError(f"{path}: row {misshapen[-1]}: {complaint}: {REMEDY}"))
        return "skip"

    # With threads, errors do not name the row.
    block = PARSED_BYTES if max_record <= LONGEST_PROTEIN else max_record
    read = pa.csv.ReadOptions(block_size=block, use_threads=False, column_names=names)
    # Binary: pyarrow's error for invalid UTF-8 does not name the row.
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(chosen, pa.binary()), include_columns=chosen, strings_can_be_null=False
    )
    parse = pa.csv.ParseOptions(
        newlines_in_values=line_ends,
        invalid_row_handler=leave_out if bad_records and bad_records.policy == "skip" else None,
    )
    try:
        with pa.csv.open_csv(file, read_options=read, convert_options=convert, parse_options=parse) as reader:
            for batch in reader:
                yield batch.rename_columns(COLUMNS)
                given += batch.num_rows
    except pa.ArrowInvalid as error:
        if swallowed:
            raise UserError(f"{path}: row {swallowed[0]}: {STRAY_QUOTE}") from None
        if STRADDLING in str(error):
            raise too_long(f"{path}: after row {given + len(misshapen)}", block) from None
        if "out of sync" in str(error):  # the quote that is not closed is in the block after those given
            raise UserError(f"{path}: {STRAY_QUOTE}") from None
        message = re.sub(r"^CSV parse error: |(?<=got \d): .*|(?<=got \d\d): .*", "", one_line(error))
        message = re.sub(r"Row #(\d+)", lambda match: f"row {match[1]}", message)
        raise UserError(f"{path}: {message[:200]}: {REMEDY}") from None


def first_with_line_end(columns: Iterable[pa.Array]) -> int | None:
    """The first row with a line end in one of its values (binary or string), if there is one."""
    found = []
    for column in columns:
        data, offsets = characters(column)
        places = np.flatnonzero((data == ord("\n")) | (data == ord("\r")))
        places = places[(places >= offsets[0]) & (places < offsets[-1])]
        found += [int(np.searchsorted(offsets, places[0], side="right")) - 1] if len(places) else []
    return min(found, default=None)


def _complaints(batch: pa.RecordBatch, id_printable: bool, text_printable: bool) -> dict[int, str]:
    """The problem of each bad row. *_printable: `_is_printable` of the columns."""
    found: dict[int, str] = {}
    if not id_printable:
        damaged = pa.compute.match_substring(batch.column("id"), NOT_UTF8)
        found = dict.fromkeys(np.flatnonzero(damaged).tolist(), "the id is not UTF-8")
    if not text_printable:
        data, offsets = characters(batch.column("text"))
        places = np.flatnonzero((data >= 128) | (data < ord(" ")))
        rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
        for row, place in zip(rows.tolist(), places[first], strict=True):
            kind = "non-ASCII" if data[place] >= 128 else "control"
            found[row] = f"{kind} byte 0x{data[place]:02x} in the text"
        damaged = pa.compute.match_substring(batch.column("text"), NOT_UTF8)
        found |= dict.fromkeys(np.flatnonzero(damaged).tolist(), "bytes in the text that are not UTF-8")
    lengths = [np.diff(characters(column)[1]) for column in batch.columns]
    for row in np.flatnonzero((lengths[0] == len(COLUMNS[0])) & (lengths[1] == len(COLUMNS[1]))).tolist():
        if all(batch.column(n)[row].as_py().lower() == name.encode() for n, name in enumerate(COLUMNS)):
            found[row] = "the header once more"
    return found | dict.fromkeys(np.flatnonzero(lengths[1] == 0).tolist(), "the text is empty")
