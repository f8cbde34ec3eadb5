"""Read the texts of a source's files, or its proteins, piece by piece: what a stream is made of.

A unit is what is read from one end to the other: a file, or a row group of a parquet file where files are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.files.records import characters
from common.sources.dataset import File
from common.sources.hub import FIRST_WAIT_S, REMOTE, Patience, brief
from common.sources.residues import check_residues, clean, count_unknown
from common.sources.sequence_files import Unit, column_of, read_texts, row_counts

ROW_BITS = 40  # a record's number is (number of its unit, row)


def units_of(files: tuple[File, ...], wanted: int) -> list[Unit]:
    """The units of some files: the files themselves when there are `wanted` or more, else parquet's row groups."""
    if len(files) >= wanted:
        return [Unit(file) for file in files]
    units = []
    for file in files:
        if file.kind != "parquet":
            units.append(Unit(file))
            continue
        units += [Unit(file, group) for group in range(len(_row_counts(file)))]
    return units


def num_rows(file: File) -> int:
    """Of a parquet file."""
    return sum(_row_counts(file))


def _row_counts(file: File) -> list[int]:
    patience = _patience(file)
    while True:
        try:
            with _reporting(file.path):
                return row_counts(file)
        except _Network as trouble:
            patience.wait_after(trouble.error)


def _patience(file: File, first_wait_s: float = FIRST_WAIT_S, what: str = "") -> Patience:
    repo = "/".join(file.path.removeprefix(REMOTE).split("/")[1:3]).split("@")[0]
    return Patience(what or file.path, repo, first_wait_s=first_wait_s)


def check_columns(files: tuple[File, ...]) -> None:
    """UserError for a local file without a column of texts: a table that lies beside the data, say. The beginning
    of each is read; the Hub's are not asked for."""

    def check(file: File) -> None:
        with _reporting(file.path):
            column_of(file)

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(check, (file for file in files if not file.path.startswith(REMOTE))):
            pass


def read_rows(unit: Unit, first_row: int, wait_s: float = FIRST_WAIT_S) -> Iterator[pa.Array]:
    """The rows of a unit from `first_row` on, in blocks, string or binary: a missing value is an empty row.

    Network trouble is retried with growing waits and goes on at the row where it broke off; UserError after ATTEMPTS
    in vain, and for files that aren't what their names say.
    """
    row, patience = first_row, _patience(unit.file, wait_s, str(unit))
    while True:
        try:
            with _reporting(str(unit)):
                for text in read_texts(unit, row):
                    yield text
                    row, patience.failures = row + len(text), 0
                return
        except _Network as trouble:
            patience.wait_after(trouble.error)


def read_sequences(
    unit: Unit, first_row: int, wait_s: float = FIRST_WAIT_S
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`read_rows` of proteins: characters uint8 [C] and where each row begins [n + 1]. They are clean
    (common/sources/residues.py)."""
    for text in read_rows(unit, first_row, wait_s):
        data, offsets = clean(*characters(text), str(unit))
        check_residues(str(unit), count_unknown(data), len(data))
        yield data, offsets


class _Network(Exception):
    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Damaged files become a UserError, what may be better the next time a _Network."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: cannot be read: {brief(error)}: mend the file or leave it out") from None
    except (OSError, RuntimeError) as error:
        if what.startswith(REMOTE):
            raise _Network(error) from error
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or brief(error)  # of Arrow: a damaged file has no errno
        raise UserError(f"{what}: cannot be read: {reason}: mend the file or leave it out") from None
    except Exception as error:
        if what.startswith(REMOTE) and _is_of_a_connection(error):
            raise _Network(error) from error
        raise


def _is_of_a_connection(error: Exception) -> bool:
    from httpx import HTTPError

    return isinstance(error, HTTPError)
