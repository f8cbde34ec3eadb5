"""Read the rows of source files, with retries for the Hub's, and estimate how many there are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa

from common.cli import UserError
from extras.sources.dataset import File
from extras.sources.hub import FIRST_WAIT_S, REMOTE, Patience, brief
from extras.sources.records import characters
from extras.sources.residues import check_residues, clean, count_unknown
from extras.sources.sequence_files import Unit, column_of, local_path, open_stream, read_texts, row_counts

# Read the texts of a source's files, or its proteins, piece by piece: what a stream is made of.
#
# A unit is what is read from one end to the other: a file, or a row group of a parquet file where files are few.

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
    (extras/sources/residues.py)."""
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


# How many records some files hold, without reading them all: what an epoch of a source that nobody counted is.

HEAD_BYTES = 16 << 20  # unpacked, of a text file: one that is no longer is counted, of a longer one it is a sample
CHUNK_BYTES = 1 << 16
TEXTS_LOOKED_AT = 8  # files: the others have as many records a byte
REMOTE_LOOKED_AT = 4  # a Hub counts its requests


def count_records(files: tuple[File, ...]) -> int:
    """Records of some files, rows without a protein included. Exact for local parquet files, and for others of up to
    16 MiB each (unpacked), if there are up to 8 of them or they have up to 16 MiB together; else from the records a
    byte at the beginning of some. The same on every call and machine."""
    parquet = [file for file in files if file.kind == "parquet"]
    texts = [file for file in files if file.kind != "parquet"]
    remote = [file for file in parquet if file.path.startswith(REMOTE)]
    local = [file for file in parquet if not file.path.startswith(REMOTE)]
    with ThreadPoolExecutor(8) as pool:
        exact = sum(pool.map(num_rows, local))
    if any(file.path.startswith(REMOTE) for file in texts):  # each is a request
        most = 1
    else:
        most = len(texts) if sum(file.size for file in texts) <= HEAD_BYTES else TEXTS_LOOKED_AT
    sampled = _spread(remote, REMOTE_LOOKED_AT), _spread(texts, most)
    return exact + _extrapolated(remote, sampled[0], num_rows) + _extrapolated(texts, sampled[1], _count_text)


def _spread(files: list[File], most: int) -> list[File]:
    count = min(len(files), most)
    return [files[i * len(files) // count] for i in range(count)]


def _extrapolated(files: list[File], sampled: list[File], count) -> int:
    found, size = sum(map(count, sampled)), sum(file.size for file in sampled)
    return round(found * (sum(file.size for file in files) / max(size, 1)))


def _count_text(file: File) -> float:
    if file.kind == "fasta":
        file = replace(file, path=local_path(Unit(file)))
    with open_stream(file) as (raw, stream):
        head, known = bytearray(), (0, 0)
        at = raw.tell()
        while len(head) < HEAD_BYTES and (chunk := stream.read(CHUNK_BYTES)):
            if at and raw.tell() != at:  # what unpacks reads ahead: now it has used up what it had
                known = len(head), at
            head += chunk
            at = raw.tell()
        if len(head) < HEAD_BYTES:
            return _records(file.kind, head.splitlines())
        unpacked, read = known if known[0] else (len(head), at)
        return _records(file.kind, head[:unpacked].splitlines()) * (raw.seek(0, os.SEEK_END) / read)


def _records(kind: str, lines: Iterable[bytes]) -> int:
    if kind == "fasta":
        return sum(line.startswith(b">") for line in lines)
    if kind == "text":
        filled = [bool(line.strip()) for line in lines]
        return sum(now and not before for before, now in zip([False, *filled], filled, strict=False))
    return max(0, sum(bool(line.strip()) for line in lines) - (kind == "csv"))
