"""Proteins packed on the fly from files nobody prepared: S streams (`stream_order`), each exactly resumable.

A stream takes its next few thousand proteins at
a time, a window, or fewer where they are long, and shuffles, crops and packs it as a batch plan does. Only what the
crops leave of a protein is held. Its position is (epoch, unit, row, packs taken of the window that begins there):
nothing else need be kept to go on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.cli import UserError
from common.data.crops import Pack, Window, crop, plan_window
from common.distributed.world import Mesh
from common.files.hashing import BLOCK_ORDER, derive_key, hash_counters
from common.models.esm2.alphabet import encode_many
from extras.sources.dataset import File
from extras.sources.sequence_files import ROW_BITS, Unit, read_sequences, units_of

# Files nobody prepared, dealt to S streams, of which each step takes one pack of each of G.
#
# The units of a source (files, or row groups) are dealt anew each epoch, by a hash of (seed, epoch, unit); where there
# are fewer units than streams, several streams share one, each taking every n-th of its rows. So every record belongs
# to one stream, and streams never speak to each other. What a stream makes of its records is its own affair: proteins
# are in `streams`, text in extras.text.streams.

LANES = (8, 4, 2, 1)


class Share(NamedTuple):
    """The rows of a unit that are a stream's own: those whose number leaves `part` when divided by `parts`."""

    unit: int  # its place in Dealt.units
    part: int
    parts: int


@dataclass(frozen=True)
class Dealt(ABC):
    """Which stream reads what."""

    units: list[Unit]
    num_streams: int
    seed: int

    @abstractmethod
    def stream(self, index: int, saved: Sequence[int] = ()) -> Iterator[tuple[Pack, np.ndarray, Sequence[int]]]:
        """A stream from a saved position on, [] for the beginning: without end, packs, their tokens and the position
        after each, plain numbers."""

    def shares(self, stream: int, epoch: int) -> list[Share]:
        """What a stream reads in an epoch, in order. The streams' shares of an epoch are all rows, each once."""
        keys = hash_counters(derive_key(self.seed, epoch, BLOCK_ORDER), np.arange(len(self.units)))
        order = np.argsort(keys, kind="stable").tolist()
        if len(order) >= self.num_streams:
            return [Share(unit, 0, 1) for unit in order[stream :: self.num_streams]]
        part, place = divmod(stream, len(order))
        return [Share(order[place], part, len(range(place, self.num_streams, len(order))))]


def deal(files: tuple[File, ...], packs_per_step: int) -> tuple[list[Unit], int]:
    """The units of some files, and how many streams read them for a global batch of G packs: as many lanes as there
    are units for."""
    units = units_of(files, wanted=LANES[0] * packs_per_step)
    lanes = next(n for n in LANES if n * packs_per_step <= len(units) or n == 1)
    return units, lanes * packs_per_step


class StreamedOrder:
    """Step k of a run takes one pack of each of G streams, those of lane k % lanes (a lane is G streams).

    So which packs make a step depends on G alone; rank r takes every dp_size-th of them. A lane is read by one worker
    only: lanes are there so that several workers can each have their own. A position names streams, as texts, and
    where they stand; a rank's own names at least those it has read.
    """

    def __init__(self, plan: Dealt, packs_per_step: int):
        assert plan.num_streams % packs_per_step == 0
        self.plan, self.packs_per_step = plan, packs_per_step
        self.lanes = plan.num_streams // packs_per_step

    def check_position(self, position: dict[str, list[int]]) -> None:
        if position and max(map(int, position)) >= self.plan.num_streams:
            raise UserError(
                f"the checkpoint stands in {max(map(int, position)) + 1} streams of the data, and there are "
                f"{self.plan.num_streams} now: go on with the --packs_per_step and the files it was made with"
            )

    def most_workers(self, wanted: int) -> int:
        """A worker more would share a lane with another one."""
        return max((n for n in LANES if n <= min(wanted, self.lanes)), default=0)

    def own(self, position: dict, mesh: Mesh) -> dict:
        mine = range(mesh.dp_rank, self.packs_per_step, mesh.dp_size)
        return {stream: at for stream, at in position.items() if int(stream) % self.packs_per_step in mine}

    def steps(self, mesh: Mesh, position: dict, first: int, numbers: Iterable[int], mine: Callable[[int], bool]):
        """As `common.data.loader.Order` has it."""
        streams: dict[int, Iterator] = {}
        for step in (first + number for number in numbers if mine(number)):
            lane = step % self.lanes * self.packs_per_step
            taken, moved = [], {}
            for number in range(lane + mesh.dp_rank, lane + self.packs_per_step, mesh.dp_size):
                if number not in streams:
                    streams[number] = self.plan.stream(number, position.get(str(number), ()))
                pack, ids, after = next(streams[number])
                taken.append((pack, ids))
                moved[str(number)] = list(after)
            yield step, taken, moved, None  # streams go round at a pace of their own: the run counts records


# What a stream has read: blocks of rows, of each protein its crop alone; and the window it takes packs of.


class Block(NamedTuple):
    """Some rows of a unit, those of other streams left out."""

    unit_index: int  # among the stream's units of the epoch
    unit: int
    rows: np.ndarray  # int64 [n], row numbers in the unit
    ids: np.ndarray  # uint8 [T], of each record its crop
    offsets: np.ndarray  # int64 [n + 1], from 0
    lengths: np.ndarray  # int64 [n], of the whole records
    starts: np.ndarray  # int64 [n], of the crops
    end: int  # the row to go on from

    @classmethod
    def encode(cls, index: int, share: Share, first: int, characters: np.ndarray, offsets: np.ndarray) -> Block:
        ids, offsets = encode_many(characters, offsets)
        rows = np.arange(first, first + len(offsets) - 1)
        if share.parts > 1:
            mine, lengths = rows % share.parts == share.part, np.diff(offsets)
            ids, rows = ids[np.repeat(mine, lengths)], rows[mine]
            offsets = np.append(0, np.cumsum(lengths[mine]))
        end = first + len(mine) if share.parts > 1 else first + len(rows)
        return cls(index, share.unit, rows, ids, offsets, np.diff(offsets), np.zeros_like(rows), end)

    def cropped(self, seed: int, epoch: int, max_seq_length: int) -> Block:
        """With no more of each record than its crop, which a window's plan will choose again."""
        if not (self.lengths > max_seq_length).any():
            return self
        starts, crops = crop(self.records, self.lengths, seed, epoch, max_seq_length)
        begins = self.offsets[:-1] + starts
        pieces = [self.ids[a:b] for a, b in zip(begins.tolist(), (begins + crops).tolist(), strict=True)]
        return self._replace(ids=np.concatenate(pieces), offsets=np.append(0, np.cumsum(crops)), starts=starts)

    @property
    def records(self) -> np.ndarray:
        return (self.unit << ROW_BITS) + self.rows

    def split(self, count: int) -> tuple[Block, Block | None]:
        """The first `count` rows and the rest."""
        if count >= len(self.rows):
            return self, None
        cut = int(self.offsets[count])
        now = self._replace(
            rows=self.rows[:count],
            ids=self.ids[:cut],
            offsets=self.offsets[: count + 1],
            lengths=self.lengths[:count],
            starts=self.starts[:count],
            end=int(self.rows[count - 1]) + 1,
        )
        rest = self._replace(
            rows=self.rows[count:],
            ids=self.ids[cut:],
            offsets=self.offsets[count:] - cut,
            lengths=self.lengths[count:],
            starts=self.starts[count:],
        )
        return now, rest


class Buffer:
    """A planned window and the tokens of its records."""

    def __init__(self, window: Window, records: np.ndarray, begins: np.ndarray, ids: np.ndarray, following):
        """begins: where in `ids` each record would begin, int64 [n]; of a crop, only its own part is there."""
        self.window, self.ids, self.following = window, ids, following
        self._begins, self._sorter = begins, np.argsort(records)
        self._records = records[self._sorter]

    def gather(self, pack: Pack) -> np.ndarray:
        """The pack's tokens uint8 [T]."""
        begin = self._begins[self._sorter[np.searchsorted(self._records, pack.records)]] + pack.starts
        pieces = [self.ids[a:b] for a, b in zip(begin.tolist(), (begin + pack.lengths).tolist(), strict=True)]
        return np.concatenate(pieces or [self.ids[:0]])


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
