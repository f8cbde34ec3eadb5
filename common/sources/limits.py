"""How long a record may be: what bounds the memory that a reader takes, whatever a compressed file unpacks to."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.files.records import characters

LONGEST_PROTEIN = 4 << 20  # bytes with its header; a hundred times the longest protein known
LONGEST_DOCUMENT = 16 << 20  # five times War and Peace
HELP = "longest record of the input, in bytes; memory grows with it"
MOST = 1 << 30  # Arrow counts the bytes of a block in 32 bits
STRADDLING = "straddling object"  # pyarrow's CSV and JSON readers about a row that is longer than a block


def check_flag(longest: int) -> None:
    """UserError for a --max_record_length that is none."""
    if not 1 <= longest <= MOST:
        raise UserError(f"--max_record_length {longest}: a number of bytes, 1 to {MOST}")


def too_long(where: str, longest: int) -> UserError:
    """The error for a record or line of more than `longest` bytes. where: file and line or record."""
    return UserError(
        f"{where}: longer than {longest:,} bytes: remove the record, or raise --max_record_length if it is meant to be"
    )


def first_too_long(text: pa.Array, longest: int) -> int | None:
    """The first text (string or binary) of more bytes, counted from 0, if one is."""
    lengths = np.diff(characters(text)[1])
    return int(np.argmax(lengths > longest)) if len(lengths) and lengths.max() > longest else None
