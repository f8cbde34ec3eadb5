"""CSV files of plain lines `id,text`, nothing quoted, as step 0 writes them: read without a CSV parser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from common.files.records import characters, texts
from common.sources.packed import open_unpacked
from common.sources.residues import clean

BLOCK_BYTES = 1 << 20  # what is worked on stays in the processor's cache
COLUMNS = ("id", "text")
HEADER = b"id,text\n"


class PlainRows:
    """The rows up to the first block that holds anything but plain lines of two columns, or to the end of the file.

    A plain block is cut at its commas and line ends, ten times as fast as a CSV parser reads it. `rest`, in the end:
    what was read of the file and not given, from the beginning of a row.
    """

    def __init__(self, file: BinaryIO, where: str):
        self.file, self.where, self.rest = file, where, b""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while data := self.file.read(BLOCK_BYTES):
            data = self.rest + data
            cut = data.rfind(b"\n") + 1
            batch = _cut(data[:cut], self.where)
            if batch is None:
                self.rest = data
                return
            self.rest = data[cut:]
            yield batch
        if self.rest and (batch := _cut(self.rest + b"\n", self.where)) is not None:
            self.rest = b""
            yield batch


def _cut(data: bytes, where: str) -> pa.RecordBatch | None:
    """The rows of whole lines, if each is `id,text` with some text, all ASCII, without quotes or carriage returns."""
    raw = np.frombuffer(data, np.uint8)
    commas, ends = np.flatnonzero(raw == ord(",")), np.flatnonzero(raw == ord("\n"))
    if not len(ends) or len(commas) != len(ends) or b'"' in data or raw.max() >= 128:
        return None
    if np.count_nonzero(raw < ord(" ")) != len(ends):  # carriage returns and other control characters
        return None
    if not ((commas + 1 < ends).all() and (commas[1:] > ends[:-1]).all()):
        return None
    begins = np.append(0, ends[:-1] + 1)
    like_header = np.flatnonzero((commas - begins == len("id")) & (ends - commas == len(",text")))
    if any(data[begins[row] : ends[row] + 1].lower() == HEADER for row in like_header):  # files that were joined
        return None
    # One binary array over the block, four values a line (id, comma, text, line end), of which two are taken.
    offsets = np.zeros(4 * len(ends) + 1, np.int32)
    offsets[1::4], offsets[2::4], offsets[3::4], offsets[4::4] = commas, commas + 1, ends, ends + 1
    pieces = pa.StringArray.from_buffers(4 * len(ends), pa.py_buffer(offsets), pa.py_buffer(data))
    ids, text = (pieces.take(pa.array(np.arange(first, 4 * len(ends), 4))) for first in (0, 2))
    if b" " in data or b"*\n" in data:
        cleaned, offsets = clean(*characters(text), where)
        if not np.diff(offsets).all():
            return None
        text = texts(cleaned, offsets, pa.string())
    return pa.RecordBatch.from_arrays([ids, text], names=COLUMNS)


def count_lines(path: Path) -> int | None:
    """Lines after the header of a file in which every line is a row; None where only a CSV parser can tell."""
    lines, last = 0, b"\n"
    with open_unpacked(path) as file:
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
