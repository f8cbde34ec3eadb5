"""The first line of a CSV file, read before a parser sees the file: only the columns that are needed are then parsed.

A parser that is let loose on all of them infers their types, and fails in the middle of a file for a column that
nobody asked for.
"""

from __future__ import annotations

import csv
from typing import BinaryIO

from common.cli import UserError, one_line
from common.sources.packed import LOOKED_AT, what_it_is

LONGEST = 1 << 20  # bytes of a header


def read_header(file: BinaryIO, where: str, delimiter: str = ",") -> list[str]:
    """The names of the columns, as written; the file is left at the second line.

    UserError for what is no line of text: another encoding, a binary file, nothing at all.
    """
    told = what_it_is(file.peek(LOOKED_AT)[:LOOKED_AT])
    line = file.readline(LONGEST)
    if not line:
        raise UserError(f"{where}: Empty CSV file")
    if told or b"\0" in line:
        raise UserError(f"{where}: row 0: not CSV: {told or 'a NUL byte in the header'}")
    if len(line) == LONGEST:
        raise UserError(f"{where}: row 0: the header has no end: this is no CSV file")
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: row 0: the header is not UTF-8: byte 0x{line[error.start]:02x}") from None
    try:
        return next(csv.reader([text.rstrip("\r\n")], delimiter=delimiter), [])
    except csv.Error as error:  # a name of more than 128 KiB
        raise UserError(f"{where}: row 0: the header cannot be read ({one_line(error)})") from None


def column_named(names: list[str], wanted: tuple[str, ...]) -> str | None:
    """The column among `names` that is called as the first of `wanted` that is there, in any case."""
    lower = [name.strip().lower() for name in names]
    found = [names[lower.index(name)] for name in wanted if lower.count(name) == 1]
    return found[0] if found else None
