"""Stream `id,text` CSV files; every complaint names file and row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from common.cli import UserError, one_line
from common.files.csv_header import column_named, read_header
from common.files.records import BadRecords

BLOCK_BYTES = 1 << 20  # what is worked on stays in the processor's cache
PARSED_BYTES = 4 << 20  # a row must fit
COLUMNS = ("id", "text")
HEADER = b"id,text\n"
STRAY_QUOTE = (
    "a text that goes on over a line end, after a quote that is not closed: mend or remove the quote (or, if texts "
    "may hold line ends, give --line_ends_in_text to 1.tokenize_uniref_csv.py)"
)
REMEDY = "mend or remove the row, or give --on_bad_record skip"


def csv_files(directory: Path) -> list[Path]:
    """The *.csv files of a directory, x999 before x1000. UserError if there are none."""
    if not directory.is_dir():
        raise UserError(f"--input_dir {directory}: no such directory: run 0.download_data.py first")
    files = [path for path in directory.glob("*.csv") if not path.name.startswith(".")]
    if not files:
        raise UserError(f"--input_dir {directory}: no *.csv files in it: run 0.download_data.py first")
    return sorted(files, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path.name)])


def count_rows(path: Path, bad_records: BadRecords | None = None, line_ends: bool = False) -> int:
    """Rows that `read_rows` will give: without `bad_records`, rows after the header (not yet looked into)."""
    rows = _count_lines(path) if bad_records is None else None
    return sum(batch.num_rows for batch in read_rows(path, bad_records, line_ends)) if rows is None else rows


def read_rows(path: Path, bad_records: BadRecords | None = None, line_ends: bool = False) -> Iterator[pa.RecordBatch]:
    """Record batches with `id` and `text`, both string; text is not empty and ASCII. Memory is a few blocks.

    bad_records: called with the complaint about each row that is not so, or has more or fewer columns than the header;
    such rows are left out (UserError without it). line_ends: texts in quotes may hold some, which are taken out. Else
    one is a UserError whatever bad_records says: after a stray quote, all up to the next one is one "text".
    """
    with open(path, "rb") as file:
        rows = 0
        if file.readline(len(HEADER) + 1) == HEADER:
            for batch in _plain_rows(file):
                yield batch
                rows += batch.num_rows
        else:
            file.seek(0)
        yield from _parsed_rows(path, file, rows, bad_records, line_ends)


def _plain_rows(file: BinaryIO) -> Iterator[pa.RecordBatch]:
    """The rows up to the first block that holds anything but plain lines of two columns, or to the end of the file.

    A plain block is cut at its commas and line ends, ten times as fast as a CSV parser reads it. The file is left at
    the beginning of the first row that was not given.
    """
    begin, rest = file.tell(), b""
    while data := file.read(BLOCK_BYTES):
        data = rest + data
        data, rest = data[: (cut := data.rfind(b"\n") + 1)], data[cut:]
        batch = _cut_plain(data)
        if batch is None:
            file.seek(begin)
            return
        begin += len(data)
        yield batch
    if rest:
        batch = _cut_plain(rest + b"\n")
        if batch is None:
            file.seek(begin)
        else:
            yield batch


def _cut_plain(data: bytes) -> pa.RecordBatch | None:
    """The rows of whole lines, if each is `id,text` with some text, all ASCII, without quotes or carriage returns."""
    raw = np.frombuffer(data, np.uint8)
    commas, ends = np.flatnonzero(raw == ord(",")), np.flatnonzero(raw == ord("\n"))
    if not len(ends) or len(commas) != len(ends) or b'"' in data or raw.max() >= 128:
        return None
    if data.startswith(HEADER) or b"\n" + HEADER in data:  # once more: files that were joined
        return None
    if np.count_nonzero(raw < ord(" ")) != len(ends):  # carriage returns and other control characters
        return None
    if not ((commas + 1 < ends).all() and (commas[1:] > ends[:-1]).all()):
        return None
    # One binary array over the block, four values a line (id, comma, text, line end), of which two are taken.
    offsets = np.zeros(4 * len(ends) + 1, np.int32)
    offsets[1::4], offsets[2::4], offsets[3::4], offsets[4::4] = commas, commas + 1, ends, ends + 1
    pieces = pa.StringArray.from_buffers(4 * len(ends), pa.py_buffer(offsets), pa.py_buffer(data))
    columns = [pieces.take(pa.array(np.arange(first, 4 * len(ends), 4))) for first in (0, 2)]
    return pa.RecordBatch.from_arrays(columns, names=COLUMNS)


def _parsed_rows(
    path: Path, file: BinaryIO, before: int, bad_records: BadRecords | None, line_ends: bool
) -> Iterator[pa.RecordBatch]:
    """The rows from where the file stands, by pyarrow's parser; `before` rows came before them."""
    misshapen: list[int] = []  # rows of a wrong number of columns, which the parser leaves out
    parsed = before
    for batch in _parse(path, file, before, misshapen, bad_records, line_ends):
        rows = np.arange(parsed + 1, parsed + batch.num_rows + 1)
        rows += np.searchsorted(np.array(misshapen) - np.arange(len(misshapen)), rows, side="right")
        parsed += batch.num_rows
        if line_ends:
            batch = _joined(batch)
        elif (row := first_with_line_end(batch.columns)) is not None:
            raise UserError(f"{path}: row {rows[row]}: {STRAY_QUOTE}")
        bad = _complaints(batch)
        for i, complaint in sorted(bad.items()):
            (bad_records or BadRecords())(UserError(f"{path}: row {rows[i]}: {complaint}: {REMEDY}"))
        if bad:
            keep = np.ones(batch.num_rows, dtype=bool)
            keep[list(bad)] = False
            batch = batch.filter(pa.array(keep))
        yield pa.RecordBatch.from_arrays([column.cast(pa.string()) for column in batch.columns], names=COLUMNS)


def characters(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a string or binary array end to end, uint8 [C], and where each row begins, int32 [N + 1]; views."""
    _, offsets, data = text.buffers()
    offsets = np.frombuffer(offsets, np.int32)[text.offset : text.offset + len(text) + 1]
    return np.frombuffer(data or b"", np.uint8), offsets


def _parse(
    path: Path,
    file: BinaryIO,
    before: int,
    misshapen: list[int],
    bad_records: BadRecords | None,
    line_ends: bool,
) -> Iterator[pa.RecordBatch]:
    """`id` and `text` as binary; rows of a wrong number of columns are an error, or left out and noted."""
    names = list(COLUMNS)
    if file.tell() == 0:
        names = read_header(file, str(path))
    chosen = [column_named(names, (column,)) for column in COLUMNS]
    if None in chosen:
        raise UserError(f"{path}: row 0: the header is {','.join(names)[:80]!r}: expected id,text")
    if not file.peek(1):
        return
    swallowed: list[int] = []

    def number(counted: int) -> int:
        return counted + before

    def leave_out(row) -> str:
        if "\n" in row.text and not line_ends:
            swallowed.append(number(row.number))
            return "error"
        misshapen.append(number(row.number))
        complaint = f"Expected {row.expected_columns} columns, got {row.actual_columns}"
        bad_records(UserError(f"{path}: row {misshapen[-1]}: {complaint}: {REMEDY}"))
        return "skip"

    # Threads lose the row number of an error.
    read = pa.csv.ReadOptions(block_size=PARSED_BYTES, use_threads=False, column_names=names)
    # Binary: pyarrow's own complaint about bytes that are no UTF-8 does not say where they are.
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
    except pa.ArrowInvalid as error:
        if swallowed:
            raise UserError(f"{path}: row {swallowed[0]}: {STRAY_QUOTE}") from None
        if "out of sync" in str(error):  # the quote that is not closed is in the block after those given
            raise UserError(f"{path}: {STRAY_QUOTE}") from None
        message = re.sub(r"^CSV parse error: ", "", one_line(error))
        message = re.sub(r"Row #(\d+)", lambda match: f"row {number(int(match[1]))}", message)
        raise UserError(f"{path}: {message[:200]}: {REMEDY}") from None


def first_with_line_end(columns: Iterable[pa.Array]) -> int | None:
    """The first row that has a line end in one of its values (binary or string), if any has."""
    found = []
    for column in columns:
        data, offsets = characters(column)
        places = np.flatnonzero((data == ord("\n")) | (data == ord("\r")))
        places = places[(places >= offsets[0]) & (places < offsets[-1])]
        found += [int(np.searchsorted(offsets, places[0], side="right")) - 1] if len(places) else []
    return min(found, default=None)


def _joined(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Line ends taken out of the texts, as out of those of a FASTA file."""
    text = batch.column("text")
    if first_with_line_end([text]) is not None:
        for end in (b"\n", b"\r"):
            text = pa.compute.replace_substring(text, end, b"")
    return pa.RecordBatch.from_arrays([batch.column("id"), text], names=COLUMNS)


def _complaints(batch: pa.RecordBatch) -> dict[int, str]:
    """What is wrong with which row."""
    found = {}
    try:
        batch.column("id").cast(pa.string())
    except pa.ArrowInvalid:
        bad = [i for i, name in enumerate(batch.column("id")) if not _is_utf8(name.as_py())]
        found |= dict.fromkeys(bad, "the id is not UTF-8")
    data, offsets = characters(batch.column("text"))
    data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    control = data < ord(" ")
    if len(data) and (data.max() >= 128 or control.any()):
        places = np.flatnonzero((data >= 128) | control)
        rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
        for row, place in zip(rows.tolist(), places[first], strict=True):
            kind = "non-ASCII" if data[place] >= 128 else "control"
            found[row] = f"{kind} byte 0x{data[place]:02x} in the text"
    repeated = pa.compute.and_(*(pa.compute.equal(batch.column(n), name.encode()) for n, name in enumerate(COLUMNS)))
    found |= dict.fromkeys(np.flatnonzero(repeated).tolist(), "the header once more")
    return found | dict.fromkeys(np.flatnonzero(np.diff(offsets) == 0).tolist(), "the text is empty")


def _count_lines(path: Path) -> int | None:
    """Lines after the header of a file in which every line is a row; None where only a CSV parser can tell."""
    lines, last = 0, b"\n"
    with open(path, "rb") as file:
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


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
