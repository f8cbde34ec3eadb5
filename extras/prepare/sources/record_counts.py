"""The number of records of files, an epoch: estimated without reading them all."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from extras.prepare.sources.find_files import File
from extras.prepare.sources.hub import REMOTE
from extras.prepare.sources.sequence_files import has_row_groups, open_stream, reader_of, row_counts

HEAD_BYTES = 16 << 20  # decompressed, of a file: shorter files are counted, of longer ones this is a sample
CHUNK_BYTES = 1 << 16
SAMPLED_FILES = 8  # without row groups; the others are assumed to have as many records a byte
SAMPLED_REMOTE = 4  # with row groups: the Hub limits the rate of requests


def count_records(files: tuple[File, ...]) -> int:
    """Records of some files, rows without a protein included. Exact for local files with row groups (parquet), and for
    other files of up to 16 MiB each (decompressed), if there are at most 8 or they have at most 16 MiB in all; else
    extrapolated from the beginning of some of them. The same on every call and machine."""
    grouped = [file for file in files if has_row_groups(file)]
    others = [file for file in files if not has_row_groups(file)]
    remote = [file for file in grouped if file.path.startswith(REMOTE)]
    local = [file for file in grouped if not file.path.startswith(REMOTE)]
    with ThreadPoolExecutor(8) as pool:
        exact = sum(pool.map(_records, local))
    if any(file.path.startswith(REMOTE) for file in others):  # each is a request
        most = 1
    else:
        most = len(others) if sum(file.size for file in others) <= HEAD_BYTES else SAMPLED_FILES
    return exact + _extrapolated(remote, SAMPLED_REMOTE) + _extrapolated(others, most)


def _records(file: File) -> float:
    if has_row_groups(file):
        return sum(row_counts(file))
    return getattr(reader_of(file), "records", estimated)(file)


def _extrapolated(files: list[File], most: int) -> int:
    """From `most` of the files, spread over all."""
    count = min(len(files), most)
    sampled = [files[i * len(files) // count] for i in range(count)]
    found, size = sum(map(_records, sampled)), sum(file.size for file in sampled)
    return round(found * (sum(file.size for file in files) / max(size, 1)))


def filled(lines: list[bytes]) -> int:
    """Lines that are not blank."""
    return sum(bool(line.strip()) for line in lines)


def estimated(file: File, records: Callable[[list[bytes]], int] = filled) -> float:
    """Records of a file, from those of its first HEAD_BYTES by size. records: of some lines."""
    with open_stream(file) as (raw, stream):
        head, known = bytearray(), (0, 0)
        at = raw.tell()
        while len(head) < HEAD_BYTES and (chunk := stream.read(CHUNK_BYTES)):
            if at and raw.tell() != at:  # the decompressor read more: it has used what it had before
                known = len(head), at
            head += chunk
            at = raw.tell()
        if len(head) < HEAD_BYTES:
            return records(head.splitlines())
        unpacked, read = known if known[0] else (len(head), at)
        return records(head[:unpacked].splitlines()) * (raw.seek(0, os.SEEK_END) / read)
