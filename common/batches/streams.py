"""Proteins packed on the fly from files nobody prepared: S streams (`stream_order`), each exactly resumable.

A stream takes its next few thousand proteins at
a time, a window, or fewer where they are long, and shuffles, crops and packs it as a batch plan does. Only what the
crops leave of a protein is held. Its position is (epoch, unit, row, packs taken of the window that begins there):
nothing else need be kept to go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.batches.stream_blocks import Block, Buffer
from common.batches.stream_order import Dealt, deal
from common.batches.windows import Pack, plan_window
from common.cli import UserError
from common.sources.dataset import File
from common.sources.stream_reader import read_sequences

WINDOW_TOKENS = 1 << 20  # about: of a usual protein length; the window's last pack is badly filled
USUAL_PROTEIN = 256
LONG_PROTEIN = 2048  # tokens, after cropping: a window of the usual number of proteins holds no more than of these
PACKS_PER_WINDOW = 128


class StreamPosition(NamedTuple):
    """Where a stream stands: `pack` packs are taken of the window that begins at `row` of its `unit`-th unit.

    whole: that window ends after so many proteins, however long, as all did once.
    """

    epoch: int = 0
    unit: int = 0
    row: int = 0
    pack: int = 0
    whole: bool = False

    @classmethod
    def of(cls, saved: Sequence[int]) -> StreamPosition:
        """As a checkpoint has it: [] at the beginning; four numbers from the time when windows were whole."""
        return cls(*saved) if len(saved) != 4 else cls(*saved, whole=saved[3] > 0)


@dataclass(frozen=True)
class StreamPlan(Dealt):
    """Streams of proteins, and how they are packed; sizes as in BatchPlan."""

    max_seq_length: int
    tokens_per_pack: int | None = None
    sequences_per_pack: int | None = None

    @property
    def window_records(self) -> int:
        batch = self.sequences_per_pack or 1
        tokens = self.tokens_per_pack or batch * self.max_seq_length
        return max(1, max(WINDOW_TOKENS, PACKS_PER_WINDOW * tokens) // USUAL_PROTEIN // batch) * batch

    @property
    def window_tokens(self) -> int:
        return self.window_records * LONG_PROTEIN

    def stream(self, index: int, saved: Sequence[int] = ()) -> Stream:
        return Stream(self, index, StreamPosition.of(saved))


class Stream:
    """One stream from a position on: an endless iterator of (pack, its tokens uint8, the position after it)."""

    def __init__(self, plan: StreamPlan, index: int, position: StreamPosition | None = None):
        self.plan, self.index, self.position = plan, index, position or StreamPosition()
        self._buffer: Buffer | None = None  # of the window the position is in
        self._blocks: Iterator[Block] | None = None  # what is left of the epoch after it
        self._left: Block | None = None  # of the block that the window's end cut in two

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[Pack, np.ndarray, StreamPosition]:
        barren_epochs = 0
        while self._buffer is None or self.position.pack >= len(self._buffer.window):
            if self._buffer is not None:
                self.position = self._buffer.following
            self._buffer = self._next_window()
            barren_epochs += self._buffer.following.epoch > self.position.epoch and not len(self._buffer.window)
            if barren_epochs > 1:
                raise UserError(
                    f"the data do not hold a protein for each of the {self.plan.num_streams} packs of a step: give "
                    "more data, or fewer --packs_per_step (ranks x --gradient_accumulation_steps)"
                )
        pack = self._buffer.window.pack(self.position.pack)
        self.position = self.position._replace(pack=self.position.pack + 1)
        return pack, self._buffer.gather(pack), self.position

    def _next_window(self) -> Buffer:
        """Read the window that begins at the position."""
        start = self.position
        if self._blocks is None:
            self._blocks, self._left = self._read(start.epoch, start.unit, start.row), None
        missing, taken, end = self.plan.window_records, [], None
        room = math.inf if start.whole else self.plan.window_tokens
        while missing and (block := self._left or next(self._blocks, None)):
            count = min(missing, int(np.searchsorted(block.offsets[1:], room, side="right")))
            if missing == self.plan.window_records:
                count = max(count, 1)  # even if that is longer than a window should be
            if count == 0 and len(block.rows):
                self._left = block
                break
            now, self._left = block.split(count)
            taken.append(now)
            missing, room = missing - len(now.rows), room - int(now.offsets[-1])
            end = StreamPosition(start.epoch, now.unit_index, now.end)
            if self._left is not None:
                break
        else:
            if missing:
                self._blocks, end = None, StreamPosition(start.epoch + 1)
        records = np.concatenate([block.records for block in taken] or [np.zeros(0, np.int64)])
        lengths = np.concatenate([block.lengths for block in taken] or [np.zeros(0, np.int64)])
        held = np.concatenate([np.diff(block.offsets) for block in taken] or [np.zeros(0, np.int64)])
        starts = np.concatenate([block.starts for block in taken] or [np.zeros(0, np.int64)])
        ids = np.concatenate([block.ids for block in taken] or [np.zeros(0, np.uint8)])
        plan = self.plan
        # By the number of its first row: unique in the epoch, and known wherever one starts.
        number = int(records[0]) if len(records) else 0
        window = plan_window(
            records,
            np.where(lengths > 2, lengths, 0),  # no protein is only <cls> and <eos>: an empty row
            plan.seed,
            start.epoch,
            number,
            plan.max_seq_length,
            plan.tokens_per_pack,
            plan.sequences_per_pack,
            shuffle=True,
        )
        return Buffer(window, records, np.append(0, np.cumsum(held))[:-1] - starts, ids, end)

    def _read(self, epoch: int, first_unit: int, first_row: int) -> Iterator[Block]:
        """The stream's rows of one epoch."""
        plan = self.plan
        for index, share in enumerate(plan.shares(self.index, epoch)):
            if index < first_unit:
                continue
            row = first_row if index == first_unit else 0
            for characters, offsets in read_sequences(plan.units[share.unit], row):
                block = Block.encode(index, share, row, characters, offsets)
                yield block.cropped(plan.seed, epoch, plan.max_seq_length)
                row += len(offsets) - 1


def plan_streams(files: tuple[File, ...], packs_per_step: int, **packing) -> StreamPlan:
    """The streams of proteins for a global batch of G packs."""
    return StreamPlan(*deal(files, packs_per_step), **packing)
