"""Stream CSV and TSV files of proteins, plain or compressed, with pyarrow's parser; every error names file and row.

The header is read first, so that only the columns that are needed are parsed: pyarrow would infer types of the others,
and fail in the middle of a file.
"""

from __future__ import annotations

import codecs
import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from common.cli import UserError, one_line
from extras.prepare.sources.compression import (
    HEAD_BYTES,
    LONGEST_PROTEIN,
    SUFFIXES,
    check_duplicates,
    check_file,
    detect_non_text,
    open_decompressed,
    strip_compression,
)
from extras.prepare.sources.find_files import natural_order
from extras.prepare.sources.record_columns import Columns, Wanted
from extras.prepare.sources.record_rows import REMEDY, clean_rows
from extras.prepare.sources.residues import Cleaner
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


HEADERS = (b"id,text\n", b"id,text,cluster\n")  # of step 0
BLOCK_BYTES = 1 << 20  # read at once to count lines: stays in the processor's cache


def count_lines(path: Path) -> int | None:
    """Lines after the header of a file in which every line is a row; None where only a CSV parser can tell."""
    lines, last = 0, b"\n"
    with open_decompressed(path) as file:
        if file.readline(len(HEADERS[-1]) + 1) not in HEADERS:
            return None
        while block := file.read(BLOCK_BYTES):
            raw = np.frombuffer(last + block, np.uint8)
            ends = np.flatnonzero(raw == ord("\n"))
            if b'"' in block or b"\r" in block or (np.diff(ends) == 1).any():  # the parser leaves empty lines out
                return None
            lines += len(ends) - (last == b"\n")
            last = block[-1:]
    return lines + (last != b"\n")


PARSED_BYTES = LONGEST_PROTEIN  # of a block of the parser: a row must fit


def csv_files(directory: Path) -> list[Path]:
    """The *.csv files of a directory, also compressed, x999 before x1000; there may be none.

    UserError for a directory or pipe of such a name, and for a file that is there plain and compressed.
    """
    if not directory.is_dir():
        raise UserError(f"--input_dir {directory}: no such directory: run 0.download_data.py first")
    names = [f"*.csv{packed}" for packed in ("", *SUFFIXES)]
    files = [path for name in names for path in directory.glob(name) if not path.name.startswith(".")]
    for path in files:
        check_file(path, str(path))
    check_duplicates(f"--input_dir {directory}", files)
    if files and (others := sorted({path.name for path in directory.glob("[!.]*")} - {path.name for path in files})):
        logger.warning("--input_dir %s: left out, not *.csv: %s", directory, ", ".join(others[:NAMED]))
    return sorted(files, key=lambda path: natural_order(path.name))


def count_rows(
    path: Path, cleaner: Cleaner | None = None, line_ends: bool = False, max_record: int = LONGEST_PROTEIN
) -> int:
    """Number of rows of `read_rows`; without `cleaner` rows are counted without checking them."""
    rows = count_lines(path) if cleaner is None else None
    if rows is None:
        rows = sum(batch.num_rows for batch in read_rows(path, cleaner, line_ends, max_record))
    return rows


def read_rows(
    path: Path,
    cleaner: Cleaner | None = None,
    line_ends: bool = False,
    max_record: int = LONGEST_PROTEIN,
    wanted: Wanted = Wanted(),  # noqa: B008  (frozen)
) -> Iterator[pa.RecordBatch]:
    """Record batches of a CSV or TSV file, as of `clean_rows`.

    cleaner: of the texts; its `bad_records` is also called with the error of each row of more or fewer columns than
    the header. By default it raises, and gaps are refused. line_ends: quoted texts may have line ends, which are
    removed. Without it, a line end in a value is always a UserError (extras.prepare.sources.tables). max_record:
    maximum bytes of a text. Memory is a few blocks.
    """
    cleaner = cleaner or Cleaner(str(path))
    delimiter = delimiter_of(str(path))
    with open_decompressed(path) as file:
        names = read_header(file, str(path), delimiter)
        columns = wanted.choose(f"{path}: row 0", names)
        block = PARSED_BYTES if max_record <= LONGEST_PROTEIN else max_record
        table = Table(str(path), names, columns.names, pa.binary(), block, delimiter, line_ends)
        header = {role: name.lower() for role, name in columns._asdict().items() if name and role != "cluster"}
        yield from clean_rows(path, _parse(table, file, columns, cleaner), cleaner, max_record, header)


def delimiter_of(path: str) -> str:
    return "\t" if strip_compression(path.lower()).endswith(".tsv") else ","


class _AsUtf8:
    """A file's bytes, with NOT_UTF8 in place of invalid UTF-8: pyarrow's error for a row with such bytes and a wrong
    number of columns does not name the row."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, size: int) -> bytes:
        """About as many bytes; none at the end."""
        while data := self.file.read(size):
            if not (data.isascii() and not self.decoder.getstate()[0]):
                data = self.decoder.decode(data).encode()
            if data:
                return data
        return self.decoder.decode(b"", final=True).encode()


def _parse(
    table: Table, file: BinaryIO, columns: Columns, cleaner: Cleaner
) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
    """The numbers of rows, and their columns as binary: pyarrow's error for invalid UTF-8 does not name the row. Rows
    of a wrong number of columns raise, or are skipped by the cleaner's `bad_records`."""

    def misshapen(row: int, what: str) -> None:
        cleaner.bad_records(UserError(f"{table.where}: row {row}: {what}: {REMEDY}"))

    try:
        for rows, batch in table.rows(_AsUtf8(file), misshapen if cleaner.skips else None):
            yield rows, columns.of(batch)
    except pa.ArrowInvalid as error:
        raise UserError(f"{table.where}: {one_line(error)}: {REMEDY}") from None
