"""Pack proteins on the fly from files as they are: S streams, each exactly resumable.

The units of a source (files, or row groups) are assigned to the streams anew each epoch, by a hash of (seed, epoch,
unit). With fewer units than streams, several streams share a unit and each takes every n-th row. So every record
belongs to one stream, and streams do not communicate. Each step takes one pack of each of G streams. Streams of text
(extras.families.text.streams) use the same assignment and order.

A stream of proteins reads a window of a few thousand proteins, fewer if they are long, and shuffles, crops and packs
it as a batch plan does. Only crops are kept in memory. Its position (epoch, unit, row, packs used of the window that
begins there) is enough to resume.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.data.counter_rng import BLOCK_ORDER, derive_key, hash_counters
from common.data.crops import Pack, Window, crop, plan_window
from common.data.packs_per_step import PacksPerStep, uneven
from common.distributed.world import Mesh
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.sources.find_files import File
from extras.prepare.sources.sequence_files import ROW_BITS, Unit, read_sequences, units_of
from extras.prepare.sources.streamed_clusters import StreamedClusters

WORKER_GROUPS = (8, 4, 2, 1)  # possible numbers of them; see StreamedOrder


class UnitShare(NamedTuple):
    """The rows of a unit that belong to a stream: row % parts == part."""

    unit: int  # index in StreamAssignment.units
    part: int
    parts: int


@dataclass(frozen=True)
class StreamAssignment(ABC):
    """The units that each stream reads."""

    units: list[Unit]
    num_streams: int
    seed: int

    @abstractmethod
    def stream(self, index: int, saved: Sequence[int] = ()) -> Iterator[tuple[Pack, np.ndarray, Sequence[int]]]:
        """An endless stream from a saved position on ([]: from the beginning): packs, their tokens and the position
        after each, plain numbers."""

    def shares(self, stream: int, epoch: int) -> list[UnitShare]:
        """What a stream reads in an epoch, in order. All streams together read each row once."""
        keys = hash_counters(derive_key(self.seed, epoch, BLOCK_ORDER), np.arange(len(self.units)))
        order = np.argsort(keys, kind="stable").tolist()
        if len(order) >= self.num_streams:
            return [UnitShare(unit, 0, 1) for unit in order[stream :: self.num_streams]]
        part, place = divmod(stream, len(order))
        return [UnitShare(order[place], part, len(range(place, self.num_streams, len(order))))]


def assign_units(files: tuple[File, ...], packs_per_step: int) -> tuple[list[Unit], int]:
    """The units of some files, and the number of streams for a global batch of at most G packs: G for each worker
    group, of which there are as many as the units allow."""
    units = units_of(files, wanted=WORKER_GROUPS[0] * packs_per_step)
    groups = next(n for n in WORKER_GROUPS if n * packs_per_step <= len(units) or n == 1)
    return units, groups * packs_per_step


def check_divisible(packs_per_step: PacksPerStep, dp_size: int) -> None:
    """UserError, with numbers that work, unless each step's packs divide evenly among the ranks."""
    if problem := uneven(packs_per_step, dp_size):
        raise UserError(f"{problem}; prepared data (--dataset_dir) take any number")


class StreamedOrder:
    """Step k takes packs of worker group k % groups, one of each of its G streams.

    If the number of packs changes, G is the largest, and a smaller step takes the next of the G streams in turn; each
    stage begins with the first. So the packs of a step depend on the number of packs alone; rank r takes every
    dp_size-th of them, always of the same streams. A worker group is read by one worker of each rank. A position maps
    stream numbers, as strings, to stream positions; a rank's own position has at least the streams that it has read.
    """

    def __init__(self, plan: StreamAssignment, packs_per_step: int | PacksPerStep):
        self.plan, self.packs_per_step = plan, PacksPerStep.of(packs_per_step)
        self.of_group = self.packs_per_step.most
        self.groups, rest = divmod(plan.num_streams, self.of_group)
        assert rest == 0

    def check_position(self, position: dict[str, list[int]]) -> None:
        if position and max(map(int, position)) >= self.plan.num_streams:
            raise UserError(
                f"the checkpoint has positions in {max(map(int, position)) + 1} streams of the data, and there are "
                f"{self.plan.num_streams} now: resume with the --packs_per_step and the files of the checkpoint"
            )

    def most_workers(self, wanted: int) -> int:
        """Not more than there are worker groups."""
        return max((n for n in WORKER_GROUPS if n <= min(wanted, self.groups)), default=0)

    def own(self, position: dict, mesh: Mesh) -> dict:
        check_divisible(self.packs_per_step, mesh.dp_size)
        own = range(mesh.dp_rank, self.of_group, mesh.dp_size)
        return {stream: place for stream, place in position.items() if int(stream) % self.of_group in own}

    def steps(self, mesh: Mesh, position: dict, first: int, numbers: Iterable[int], is_mine: Callable[[int], bool]):
        """For each of `numbers`, counted from step `first`, that `is_mine`: the step, a data rank's packs and their
        tokens, what changes in its position, and the epochs done after it."""
        streams: dict[int, Iterator] = {}
        for step in (first + number for number in numbers if is_mine(number)):
            begin, packs = self.packs_per_step.stage(step)
            used = (step - begin) // self.groups * packs  # of the group, in earlier steps of the stage
            taken, moved = [], {}
            for number in range(used + mesh.dp_rank, used + packs, mesh.dp_size):
                number = step % self.groups * self.of_group + number % self.of_group
                if number not in streams:
                    streams[number] = self.plan.stream(number, position.get(str(number), ()))
                pack, ids, after = next(streams[number])
                taken.append((pack, ids))
                moved[str(number)] = list(after)
            yield step, taken, moved, None  # streams end their epochs at different steps: the run counts records


class Block(NamedTuple):
    """A stream's rows of part of a unit."""

    unit_index: int  # index among the stream's units of the epoch
    unit: int
    rows: np.ndarray  # int64 [n], row numbers in the unit
    ids: np.ndarray  # uint8 [T], the crops of the records
    offsets: np.ndarray  # int64 [n + 1], from 0
    lengths: np.ndarray  # int64 [n], of the whole records
    starts: np.ndarray  # int64 [n], of the crops
    end: int  # the next row

    @classmethod
    def encode(
        cls,
        index: int,
        share: UnitShare,
        first: int,
        characters: np.ndarray,
        offsets: np.ndarray,
        alphabet: Alphabet,
    ) -> Block:
        ids, offsets = alphabet.encode_many(characters, offsets)
        rows = np.arange(first, first + len(offsets) - 1)
        if share.parts > 1:
            own, lengths = rows % share.parts == share.part, np.diff(offsets)
            ids, rows = ids[np.repeat(own, lengths)], rows[own]
            offsets = np.append(0, np.cumsum(lengths[own]))
        end = first + len(own) if share.parts > 1 else first + len(rows)
        return cls(index, share.unit, rows, ids, offsets, np.diff(offsets), np.zeros_like(rows), end)

    def cropped(self, seed: int, epoch: int, max_seq_length: int) -> Block:
        """Only the crops of the records: the same ones that the plan of the window will choose."""
        if not (self.lengths > max_seq_length).any():
            return self
        starts, crops = crop(self.records, self.lengths, seed, epoch, max_seq_length)
        begins = self.offsets[:-1] + starts
        pieces = [self.ids[a:b] for a, b in zip(begins.tolist(), (begins + crops).tolist(), strict=True)]
        return self._replace(ids=np.concatenate(pieces), offsets=np.append(0, np.cumsum(crops)), starts=starts)

    def only(self, kept: np.ndarray) -> Block:
        """Without the rows that are not kept, bool [n]."""
        lengths = np.diff(self.offsets)
        return self._replace(
            rows=self.rows[kept],
            ids=self.ids[np.repeat(kept, lengths)],
            offsets=np.append(0, np.cumsum(lengths[kept])),
            lengths=self.lengths[kept],
            starts=self.starts[kept],
        )

    @property
    def records(self) -> np.ndarray:
        return (self.unit << ROW_BITS) + self.rows

    def split(self, count: int) -> tuple[Block, Block | None]:
        """The first `count` rows and the rest."""
        if count >= len(self.rows):
            return self, None
        now, rest = self._part(0, count), self._part(count, len(self.rows))
        return now._replace(end=int(self.rows[count - 1]) + 1), rest

    def _part(self, begin: int, end: int) -> Block:
        offsets, part = self.offsets[begin : end + 1], slice(begin, end)
        return self._replace(
            rows=self.rows[part],
            ids=self.ids[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
            lengths=self.lengths[part],
            starts=self.starts[part],
        )


class Buffer:
    """A planned window and the tokens of its records."""

    def __init__(self, window: Window, records: np.ndarray, begins: np.ndarray, ids: np.ndarray, following):
        """begins: index in `ids` of each whole record's first token, int64 [n], of which `ids` has the crop only."""
        self.window, self.ids, self.following = window, ids, following
        self._begins, self._sorter = begins, np.argsort(records)
        self._records = records[self._sorter]

    def gather(self, pack: Pack) -> np.ndarray:
        """The pack's tokens uint8 [T]."""
        begin = self._begins[self._sorter[np.searchsorted(self._records, pack.records)]] + pack.starts
        pieces = [self.ids[a:b] for a, b in zip(begin.tolist(), (begin + pack.lengths).tolist(), strict=True)]
        return np.concatenate(pieces or [self.ids[:0]])


WINDOW_TOKENS = 1 << 20  # for proteins of the usual length; large, since a window's last pack is badly filled
USUAL_PROTEIN = 256
LONG_PROTEIN = 2048  # cropped tokens: a window has at most its number of records times this
PACKS_PER_WINDOW = 128


class StreamPosition(NamedTuple):
    """`pack` packs are used of the window that begins at `row` of the stream's `unit`-th unit.

    whole: that window ends after a number of proteins, however long, as in checkpoints of earlier versions.
    """

    epoch: int = 0
    unit: int = 0
    row: int = 0
    pack: int = 0
    whole: bool = False

    @classmethod
    def of(cls, saved: Sequence[int]) -> StreamPosition:
        """From a checkpoint: [] at the beginning; four numbers of an earlier version, where windows were whole."""
        return cls(*saved) if len(saved) != 4 else cls(*saved, whole=saved[3] > 0)


@dataclass(frozen=True)
class StreamPlan(StreamAssignment):
    """Streams of proteins, and how they are packed; sizes as in BatchPlan."""

    max_seq_length: int
    tokens_per_pack: int | None = None
    sequences_per_pack: int | None = None
    alphabet: Alphabet = ESM2_TOKENS
    clusters: StreamedClusters | None = None  # each epoch has a record of each

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
        self._buffer: Buffer | None = None  # the current window
        self._blocks: Iterator[Block] | None = None  # the rest of the epoch after it
        self._left: Block | None = None  # the rest of a block that the window's end split

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[Pack, np.ndarray, StreamPosition]:
        empty_epochs = 0
        while self._buffer is None or self.position.pack >= len(self._buffer.window):
            if self._buffer is not None:
                self.position = self._buffer.following
            self._buffer = self._next_window()
            empty_epochs += self._buffer.following.epoch > self.position.epoch and not len(self._buffer.window)
            if empty_epochs > 1:
                raise UserError(
                    f"the data do not have a protein for each of the {self.plan.num_streams} packs of a step: give "
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
        free = math.inf if start.whole else self.plan.window_tokens
        while missing and (block := self._left or next(self._blocks, None)):
            count = min(missing, int(np.searchsorted(block.offsets[1:], free, side="right")))
            if missing == self.plan.window_records:
                count = max(count, 1)  # even if it alone is longer than a window
            if count == 0 and len(block.rows):
                self._left = block
                break
            now, self._left = block.split(count)
            taken.append(now)
            missing, free = missing - len(now.rows), free - int(now.offsets[-1])
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
        # The window's number is that of its first row: unique in the epoch, and known after a resume.
        number = int(records[0]) if len(records) else 0
        window = plan_window(
            records,
            np.where(lengths > 2, lengths, 0),  # only <cls> and <eos>: an empty row
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
                block = Block.encode(index, share, row, characters, offsets, plan.alphabet)
                if plan.clusters:
                    block = block.only(plan.clusters.chosen(plan.units[share.unit], block.rows, plan.seed, epoch))
                yield block.cropped(plan.seed, epoch, plan.max_seq_length)
                row += len(offsets) - 1


def plan_streams(files: tuple[File, ...], packs_per_step: int, **packing) -> StreamPlan:
    """The streams of proteins for a global batch of G packs."""
    return StreamPlan(*assign_units(files, packs_per_step), **packing)
