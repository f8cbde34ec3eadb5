"""How many records some files hold, without reading them all: what an epoch of a source that nobody counted is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from common.sources.dataset import File
from common.sources.hub import REMOTE
from common.sources.sequence_files import Unit, local_path, open_stream
from common.sources.stream_reader import num_rows

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
