"""Records as lines of bytes: `id TAB text NEWLINE`, many of them in one Arrow array, end to end in memory.

Neither id nor text holds white space, so nothing is ever quoted or escaped: a record is one element to sort by, and
a batch of them is one buffer to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

Lines = pa.LargeBinaryArray
TAB, NEWLINE = b"\t\n"


def view(lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the lines, uint8 [B], and where each line begins, int64 [N + 1]; views, not to be changed."""
    _, offsets, data = lines.buffers()
    offsets = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    data = np.frombuffer(data or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets - offsets[0]


def cut(data: np.ndarray, pieces: np.ndarray) -> pa.LargeBinaryArray:
    """The pieces [begin, end) of `data` (uint8 [B]), one element each; pieces int64 [N, 2], in order, no overlap."""
    # One array of all pieces and of what lies between them, then every other element of it: no loop over pieces.
    offsets = np.ascontiguousarray(pieces, np.int64).reshape(-1)
    alternating = Lines.from_buffers(
        pa.large_binary(), max(len(offsets) - 1, 0), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return alternating.take(pa.array(np.arange(0, len(offsets), 2)))


def columns(lines: Lines) -> pa.RecordBatch:
    """The same records in columns `id` and `text`, both string."""
    data, offsets = view(lines)
    tabs = np.flatnonzero(data == TAB)
    ids, texts = (
        cut(data, np.stack(pieces, axis=1)).cast(pa.string())
        for pieces in ((offsets[:-1], tabs), (tabs + 1, offsets[1:] - 1))
    )
    return pa.RecordBatch.from_arrays([ids, texts], names=["id", "text"])


def skip(batches: Iterable[Lines], count: int) -> Iterator[Lines]:
    """All but the first `count` lines."""
    for lines in batches:
        if count < len(lines):
            yield lines.slice(count)
        count = max(0, count - len(lines))
