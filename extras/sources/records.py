"""Records as lines of bytes `id TAB text NEWLINE`, counting of bad records, prefetching, and cleaning of residues.

Neither id nor text has white space, so nothing is quoted or escaped: a record is one element to sort by, and a batch
of records is one Arrow array, contiguous in memory and written as one buffer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.models.esm2.alphabet import BYTE_TO_ID, UNK

logger = logging.getLogger(__name__)
Lines = pa.LargeBinaryArray
TAB, NEWLINE = b"\t\n"
Policy = Literal["error", "skip"]  # for records that cannot be used
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
    return alternating.take(pa.array(np.arange(0, len(offsets), 2)))


def characters(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a string or binary array, uint8 [C], and the offset of each row, int32 [N + 1]; views."""
    _, offsets, data = text.buffers()
    offsets = np.frombuffer(offsets, np.int32)[text.offset : text.offset + len(text) + 1]
    return np.frombuffer(data or b"", np.uint8), offsets


def texts(data: np.ndarray, offsets: np.ndarray, kind: pa.DataType) -> pa.Array:
    """The string or binary array with these buffers: the inverse of `characters`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def columns(lines: Lines) -> pa.RecordBatch:
    """The same records in columns `id` and `text`, both string."""
    data, offsets = view(lines)
    tabs = np.flatnonzero(data == TAB)
    ids, sequences = (
        cut(data, np.stack(pieces, axis=1)).cast(pa.string())
        for pieces in ((offsets[:-1], tabs), (tabs + 1, offsets[1:] - 1))
    )
    return pa.RecordBatch.from_arrays([ids, sequences], names=["id", "text"])


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


# Which characters of a text are residues: one rule for all readers. White space, and stops (`*`) at the end, are
# removed; any other character becomes `<unk>` and is counted. Too many unknown characters, or words, are an error;
# DNA, whose letters all stand for residues, is a warning.

WHITESPACE = b" \t\r\n\v\f"
STOP = b"*"[0]
RESIDUES = np.flatnonzero(BYTE_TO_ID != UNK).astype(np.uint8).tobytes()  # as letters
IS_WHITESPACE = np.isin(np.arange(256), list(WHITESPACE))
# Highest share of unknown characters in proteins, given ENOUGH characters; 0.5 for fewer.
ENOUGH, MOST_UNKNOWN = 1000, 0.1
# Texts with a higher share of these letters are DNA or RNA. In 8,000 proteins of UniRef90 the share is 28 %.
NUCLEOTIDES, MOST_NUCLEOTIDES = b"ACGTUNacgtun", 0.9
SAMPLED = 1 << 16  # characters of each batch, to detect nucleotides
# Gaps a character: more than in any prose. Some tools write proteins with a space after each residue.
SPACED = 0.4


def clean(data: np.ndarray, offsets: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Texts without white space and without the stops at their ends.

    data: uint8, N texts end to end; offsets: int [N + 1] of the texts. Returns the cleaned characters uint8 [C] and
    offsets from 0; views if nothing was removed. A text may become empty. UserError, which begins with `where`, for
    words: white space at more than a tenth of the positions, but not between single letters.
    """
    data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    if not len(data):
        return data, offsets
    _warn_of_nucleotides(where, data)
    blank = data <= ord(" ")
    if blank.any():
        blank &= IS_WHITESPACE[data]
        kept = np.flatnonzero(~blank)
        data, offsets = _without(data, offsets, blank)
        gap_before = np.diff(kept, prepend=-1) > 1
        gap_before[offsets[:-1][offsets[:-1] < len(data)]] = False  # nor white space before a text
        _check_words(where, np.count_nonzero(gap_before), len(data))
    filled = np.flatnonzero(np.diff(offsets))
    last = offsets[filled + 1] - 1
    stopped = data[last] == STOP
    if not stopped.any():
        return data, offsets
    is_stop = np.zeros(len(data), bool)
    is_stop[last[stopped]] = True
    # More than one stop is rare: handled one text at a time.
    for text in filled[stopped][data[np.maximum(last[stopped] - 1, 0)] == STOP].tolist():
        begin, end = int(offsets[text]), int(offsets[text + 1])
        is_stop[begin + len(data[begin:end].tobytes().rstrip(b"*")) : end] = True
    return _without(data, offsets, is_stop)


def _without(data: np.ndarray, offsets: np.ndarray, dropped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove the characters where `dropped`, bool [C]; offsets int64 [N + 1], from 0."""
    kept = np.append(0, np.cumsum(~dropped))
    return data[~dropped], kept[offsets]


def _check_words(where: str, gaps: int, characters: int) -> None:
    if gaps + characters >= ENOUGH and MOST_UNKNOWN * (gaps + characters) < gaps < SPACED * characters:
        raise UserError(
            f"{where}: {gaps / (gaps + characters):.0%} of the characters are blanks between words: are these "
            "proteins? (a column of names or descriptions is not)"
        )


_warned: list[str] = []  # about nucleotides: once a process


def _warn_of_nucleotides(where: str, data: np.ndarray) -> None:
    if len(data) < ENOUGH or _warned:
        return
    data = data[:SAMPLED]
    share = 1 - len(data.tobytes().translate(None, NUCLEOTIDES)) / len(data)
    if share > MOST_NUCLEOTIDES:
        _warned.append(where)
        logger.warning(
            "%s: %.0f%% of the characters are A, C, G, T, U or N: this looks like DNA or RNA, not protein: translate "
            "it first",
            where,
            100 * share,
        )


def check_residues(where: str, unknown: int, characters: int) -> None:
    """UserError if the share of `unknown` characters is that of names, prose or numbers, not of proteins."""
    if unknown > (MOST_UNKNOWN if characters >= ENOUGH else 0.5) * characters:
        raise UserError(
            f"{where}: {unknown / characters:.0%} of the characters are not residues: are these proteins? "
            "(a column of names or numbers is not)"
        )


def count_unknown(data: np.ndarray) -> int:
    """Number of characters, uint8 [C], that are not residues."""
    return len(data.tobytes().translate(None, RESIDUES))
