"""Records as lines of bytes `id TAB text [TAB cluster] NEWLINE`, counting of bad records, and prefetching.

No field has a tab or line end, and all lines of an input have the same fields, so nothing is quoted or escaped: a
record is one element to sort by, and a batch of records is one Arrow array, contiguous in memory and written as one
buffer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.data import Policy as Policy
from common.data.counter_rng import BYTES, GAMMA, WORD, derive_key, hash_counters, mix

logger = logging.getLogger(__name__)
Lines = pa.LargeBinaryArray
TAB, NEWLINE = b"\t\n"
FIELDS = ("id", "text", "cluster")
REMEMBERED = 5
Item = TypeVar("Item")
_END = object()


def view(lines: Lines) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the lines, uint8 [B], and the offset of each line, int64 [N + 1]; read-only views."""
    _, offsets, data = lines.buffers()
    offsets = np.frombuffer(offsets, np.int64)[lines.offset : lines.offset + len(lines) + 1]
    data = np.frombuffer(data or b"", np.uint8)[offsets[0] : offsets[-1]]
    return data, offsets - offsets[0]


def cut(data: np.ndarray, pieces: np.ndarray) -> pa.LargeBinaryArray:
    """The pieces [begin, end) of `data` (uint8 [B]), one element each; pieces int64 [N, 2], in order, no overlap."""
    # An array of all pieces and the gaps between them, of which every other element is taken: no loop over pieces.
    offsets = np.ascontiguousarray(pieces, np.int64).reshape(-1)
    alternating = Lines.from_buffers(
        pa.large_binary(), max(len(offsets) - 1, 0), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
    return alternating.take(numbers(np.arange(0, len(offsets), 2)))


def numbers(values: np.ndarray) -> pa.Array:
    """[N], contiguous, as an Arrow array in the same memory. `pa.array` would import pandas."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def characters(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a string or binary array, uint8 [C], and the offset of each row, int32 [N + 1]; views."""
    _, offsets, data = text.buffers()
    offsets = np.frombuffer(offsets, np.int32, offsets.size // 4)[text.offset : text.offset + len(text) + 1]
    return np.frombuffer(data or b"", np.uint8), offsets


def texts(data: np.ndarray, offsets: np.ndarray, kind: pa.DataType) -> pa.Array:
    """The string or binary array with these buffers: the inverse of `characters`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def columns(lines: Lines) -> pa.RecordBatch:
    """Records as lines in columns `id`, `text` and perhaps `cluster` (null if empty), all string."""
    data, offsets = view(lines)
    tabs = np.flatnonzero(data == TAB)
    ends = tabs.reshape(len(lines), len(tabs) // max(len(lines), 1))  # of all fields but the last
    begins = np.column_stack([offsets[:-1], ends + 1])
    ends = np.column_stack([ends, offsets[1:] - 1])
    parts = [cut(data, np.stack(pieces, axis=1)).cast(pa.string()) for pieces in zip(begins.T, ends.T, strict=True)]
    if len(parts) == len(FIELDS):
        parts[-1] = pc.if_else(pc.equal(parts[-1], ""), pa.scalar(None, pa.string()), parts[-1])
    return pa.RecordBatch.from_arrays(parts, names=FIELDS[: len(parts)])


def skip(batches: Iterable[Lines], count: int) -> Iterator[Lines]:
    """All but the first `count` lines."""
    for lines in batches:
        if count < len(lines):
            yield lines.slice(count)
        count = max(0, count - len(lines))


class BadRecords:
    """Called with the error of each bad record: "error" raises the first, "skip" counts them all."""

    def __init__(self, policy: Policy = "error", count: int = 0, first: list[str] | None = None) -> None:
        """count, first: the `state` of a stopped run."""
        self.policy = policy
        self.count = count
        self.first = list(first or [])  # messages of the first few

    def __call__(self, complaint: UserError) -> None:
        if self.policy == "error":
            raise complaint
        self.count += 1
        if len(self.first) < REMEMBERED:
            self.first.append(str(complaint))

    def add(self, other: dict) -> None:
        """Add those of another input, its `state`."""
        self.count += other.get("count", 0)
        self.first = (self.first + other.get("first", []))[:REMEMBERED]

    @property
    def state(self) -> dict:
        return {"count": self.count, "first": self.first}

    def report(self) -> None:
        """Log the number of bad records and the first few messages."""
        if self.count:
            first = f"the first {len(self.first)}" if self.count > len(self.first) else "these"
            logger.warning("%s bad records were skipped, %s:", f"{self.count:,}", first)
            for complaint in self.first:
                logger.warning("  %s", complaint)


def hash_bytes(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64 [N] hashes of N byte strings: data uint8 [C] end to end, offsets int [N + 1], where each begins.

    Eight bytes at a time, zero-padded at the end; the length is part of the hash.
    """
    offsets = offsets.astype(np.int64)
    lengths = np.diff(offsets)
    padded = np.concatenate((data[: offsets[-1]], np.zeros(8, np.uint8)))
    words = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # at every byte, overlapping
    hashes = hash_counters(derive_key(BYTES), lengths)
    for begin in range(0, int(lengths.max(initial=0)), 8):
        active = np.flatnonzero(lengths > begin)
        missing = np.maximum(0, begin + 8 - lengths[active]).astype(np.uint64) * np.uint64(8)  # bits
        word = words[offsets[active] + begin] & (np.uint64(WORD) >> missing)
        hashes[active] = mix((hashes[active] ^ word) * np.uint64(GAMMA) + np.uint64(GAMMA))
    return hashes


def hash_names(names: pa.Array) -> np.ndarray:
    """uint64 [n] of a string or binary array."""
    return hash_bytes(*characters(names))


def prefetch(items: Iterable[Item], depth: int = 2) -> Iterator[Item]:
    """Prefetch up to `depth` items in a thread; errors are raised at the item where they occurred.

    Worthwhile if the work releases the GIL: decompression, NumPy and Arrow on large arrays, files.
    """
    items = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        pending = deque(pool.submit(next, items, _END) for _ in range(depth))
        try:
            while (item := pending.popleft().result()) is not _END:
                pending.append(pool.submit(next, items, _END))
                yield item
        finally:
            pool.shutdown(cancel_futures=True)
            if hasattr(items, "close"):
                items.close()
