"""Pack text on the fly from files as they are: S streams (extras.prepare.sources.streams), each exactly resumable.

A stream reads a window of documents: successive rows of one unit, about a megabyte of text. It tokenises them, adds
the end-of-text token to each, shuffles them by a hash of (seed, epoch, record) and concatenates them. Packs are cut
from that, window after window and epoch after epoch; the rest of a window begins the next pack. A position is (epoch,
unit, row, taken): `taken` tokens are used of the window that begins at `row` of the stream's `unit`-th unit. A window
depends only on its position, so there is no other state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.data.counter_rng import RECORD_ORDER, derive_key, hash_counters
from common.data.crops import Pack
from extras.families.text.tokenizers import Pieces, Tokenizer, tokenize
from extras.prepare.sources.find_files import File
from extras.prepare.sources.sequence_files import ROW_BITS, Unit, read_rows
from extras.prepare.sources.streams import StreamAssignment, UnitShare, assign_units

WINDOW_BYTES = 1 << 20  # of text: a window ends with the document that reaches it
WINDOW_DOCUMENTS = 8192  # or after so many


class TextPosition(NamedTuple):
    """`taken` tokens are used of the window that begins at `row` of the stream's `unit`-th unit."""

    epoch: int = 0
    unit: int = 0
    row: int = 0
    taken: int = 0


@dataclass(frozen=True)
class TextStreams(StreamAssignment):
    """Streams of text. context: its number of tokens."""

    context: int
    contexts_per_pack: int
    tokenizer: Tokenizer

    def stream(self, index: int, saved: Sequence[int] = ()) -> TextStream:
        return TextStream(self, index, TextPosition(*saved))


class _Window(NamedTuple):
    records: np.ndarray  # int64 [n]
    bounds: np.ndarray  # int64 [n + 1], offsets of the documents in `ids`
    ids: np.ndarray
    following: TextPosition


class TextStream:
    """One stream from a position on: an endless iterator of (pack, its tokens, the position after it)."""

    def __init__(self, plan: TextStreams, index: int, position: TextPosition | None = None):
        self.plan, self.index, self.position = plan, index, position or TextPosition()
        self._window: _Window | None = None  # the current window
        self._next_windows: Iterator[_Window] | None = None  # the rest of the epoch after it

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> tuple[Pack, np.ndarray, TextPosition]:
        missing = self.plan.context * self.plan.contexts_per_pack
        pieces, ids, epoch = [], [], None
        while missing:
            window = self._filled_window()
            begin = self.position.taken
            end = min(begin + missing, len(window.ids))
            epoch = self.position.epoch if epoch is None else epoch
            pieces.append(Pieces.between(window.records, window.bounds, begin, end))
            ids.append(window.ids[begin:end])
            missing -= end - begin
            if end < len(window.ids):
                self.position = self.position._replace(taken=end)
            else:
                self.position, self._window = window.following, None
        pack = Pack(*Pieces.concat(pieces).cut(self.plan.context), epoch)
        return pack, np.concatenate(ids), self.position

    def _filled_window(self) -> _Window:
        """The current window; the position moves to the next window with a token, in this epoch or the next."""
        ended = 0  # epochs
        while self._window is None or not len(self._window.ids):
            if self._window is not None:
                self.position = self._window.following
            if self._next_windows is None:
                self._next_windows = self._windows(self.position)
            self._window = next(self._next_windows, None)
            if self._window is None:
                self._next_windows, self.position, ended = None, TextPosition(self.position.epoch + 1), ended + 1
            if ended > 1:
                raise UserError(
                    f"the data do not have a document for each of the {self.plan.num_streams} packs of a step: give "
                    "more data, or fewer --packs_per_step (ranks x --gradient_accumulation_steps)"
                )
        return self._window

    def _windows(self, start: TextPosition) -> Iterator[_Window]:
        """The windows of the stream in an epoch, from a position on."""
        shares = self.plan.shares(self.index, start.epoch)
        for number in range(start.unit, len(shares)):
            share = shares[number]
            first_row = start.row if number == start.unit else 0
            for rows, texts in _document_windows(self.plan.units[share.unit], share, first_row):
                following = TextPosition(start.epoch, number, int(rows[-1]) + 1)
                yield self._tokenized(start.epoch, (share.unit << ROW_BITS) + rows, texts, following)

    def _tokenized(self, epoch: int, records: np.ndarray, texts: pa.Array, following: TextPosition) -> _Window:
        hashes = hash_counters(derive_key(self.plan.seed, epoch, RECORD_ORDER), records)
        order = np.argsort(hashes, kind="stable")
        ids, bounds = tokenize(self.plan.tokenizer, texts.take(pa.array(order)))
        return _Window(records[order], bounds, ids, following)


def _document_windows(unit: Unit, share: UnitShare, first_row: int) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """The rows int64 [n] of a share from `first_row` on, and their texts, a window at a time. Windows do not depend on
    the blocks in which a file is read."""
    row = first_row
    rows, texts, size = [], [], 0  # of the current window
    for block in read_rows(unit, first_row):
        numbers = np.arange(row, row + len(block))
        row += len(block)
        own = np.flatnonzero(numbers % share.parts == share.part)
        block, numbers = block.take(pa.array(own)) if share.parts > 1 else block, numbers[own]
        sizes = np.cumsum(pc.binary_length(block).to_numpy(zero_copy_only=False).astype(np.int64))
        done, before = 0, 0  # rows and bytes of the block that are in windows
        while done < len(numbers):
            reaching = int(np.searchsorted(sizes, WINDOW_BYTES - size + before)) + 1
            end = min(reaching, done + WINDOW_DOCUMENTS - sum(map(len, rows)), len(numbers))
            rows.append(numbers[done:end])
            texts.append(block[done:end])
            size, done, before = size + int(sizes[end - 1]) - before, end, int(sizes[end - 1])
            if size >= WINDOW_BYTES or sum(map(len, rows)) == WINDOW_DOCUMENTS:
                yield np.concatenate(rows), pa.concat_arrays(texts)
                rows, texts, size = [], [], 0
    if rows:
        yield np.concatenate(rows), pa.concat_arrays(texts)


def plan_text_streams(files: tuple[File, ...], packs_per_step: int, **packing) -> TextStreams:
    """The streams of text for a global batch of G packs."""
    return TextStreams(*assign_units(files, packs_per_step), **packing)
