"""The batch plan: one global order of packs, the same on any number of ranks, workers and restarts.

A pack is a list of sequence crops of at most `tokens_per_pack` tokens (packed batches), or of `sequences_per_pack`
crops (padded batches). The packs of epoch 0, 1, 2, … follow each other without a gap and are numbered 0, 1, 2, …;
a step takes the next G of them, whoever computes it. An epoch is planned in windows of about 16,000 records:

- the records, rotated by a random shift, are cut into blocks of 256; a keyed bijection permutes the blocks; a window
  is the next 64 or so (blocks keep a shared filesystem at sequential reads: the store is globally shuffled on disk);
- within the window the records are shuffled, cropped to `max_seq_length` at a random place, packed and the packs
  shuffled, all by hashes keyed with (seed, epoch, record or pack).

With `clusters`, clusters take the place of records: an epoch has one member of each, drawn by a hash of
(seed, epoch, cluster).

Windows are planned independently, so a position (epoch, window, pack) is enough to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from common.cli import UserError
from common.data.counter_rng import BLOCK_ORDER, MEMBER, ROTATION, Permutation, derive_key
from common.data.crops import Pack, Window, plan_window

RECORDS_PER_BLOCK = 256
BLOCKS_PER_WINDOW = 64
USUAL_TOKENS_PER_PACK = 16384
SAMPLED_WINDOWS = 64  # planned to estimate the number of packs of a larger epoch
COUNTED_WINDOWS = 192  # planned to count packs: seconds; three epochs of a million records


@dataclass(frozen=True, order=True)
class Position:
    """Position of a pack in the global order. `dataclasses.asdict` and `Position(**d)` convert to JSON and back."""

    epoch: int = 0
    window: int = 0
    pack_in_window: int = 0


@dataclass(frozen=True)
class PlanStatistics:
    """Packs and tokens of one epoch, fill (tokens / capacity), and whether every window was counted."""

    packs: int
    tokens: int
    fill: float
    is_exact: bool


class Clusters(Protocol):
    """Groups of records, of each of which an epoch has one member (common.data.clusters)."""

    @property
    def num_records(self) -> int: ...

    def __len__(self) -> int: ...

    def draw(self, clusters: np.ndarray, key: int) -> np.ndarray:
        """A member of each of the clusters int64 [n]: records int64 [n], a function of key and cluster."""


class BatchPlan:
    """The order of packs; see the module's docstring.

    lengths_of: tokens int64 [n] of records int64 [n] (`TokenStore.lengths`); seed: any integer; max_seq_length:
    longest crop in tokens, `<cls>` and `<eos>` included; tokens_per_pack or sequences_per_pack: one of them, the size
    of a packed or of a padded batch; shuffle: False keeps the store's order (evaluation); clusters: of the records, to
    draw by (`open_clusters`).
    Raises UserError for sizes that cannot work.
    """

    def __init__(
        self,
        lengths_of: Callable[[np.ndarray], np.ndarray],
        num_records: int,
        seed: int,
        max_seq_length: int,
        tokens_per_pack: int | None = None,
        sequences_per_pack: int | None = None,
        shuffle: bool = True,
        clusters: Clusters | None = None,
    ):
        assert clusters is None or clusters.num_records == num_records
        assert (tokens_per_pack is None) != (sequences_per_pack is None), "either packed or padded"
        if num_records < 1:
            raise UserError("no record to plan batches for")
        if max_seq_length < 1:
            raise UserError(f"max_seq_length must be at least 1, not {max_seq_length}")
        if sequences_per_pack is not None and sequences_per_pack < 1:
            raise UserError(f"a batch needs at least 1 sequence, not {sequences_per_pack}")
        if tokens_per_pack is not None and tokens_per_pack < max_seq_length:
            raise UserError(
                f"{tokens_per_pack} tokens a pack do not hold one sequence of max_seq_length {max_seq_length}"
            )
        self.lengths_of, self.seed, self.clusters = lengths_of, seed, clusters
        self.num_drawn = num_records if clusters is None else len(clusters)  # records of an epoch
        self.max_seq_length, self.shuffle = max_seq_length, shuffle
        self.tokens_per_pack, self.sequences_per_pack = tokens_per_pack or 0, sequences_per_pack or 0
        # Padded: a block is a multiple of the batch, so only the epoch's last batch is short.
        batch = sequences_per_pack or 1
        self.block = batch * -(-RECORDS_PER_BLOCK // batch)
        self.num_full_blocks, rest = divmod(self.num_drawn, self.block)
        self.num_blocks = self.num_full_blocks + (rest > 0)
        # A window ends in one badly filled pack, so it grows with the packs; windows of equal size, so that the last
        # one is no small one.
        records = BLOCKS_PER_WINDOW * RECORDS_PER_BLOCK * max(1, (tokens_per_pack or 0) // USUAL_TOKENS_PER_PACK)
        self.num_windows = max(1, round(self.num_blocks / max(1, records // self.block)))
        self._planned: dict[tuple[int, int], Window] = {}  # the last few windows
        self._counted: dict[int, PlanStatistics] = {}  # by epoch

    def packs(self, position: Position = Position()) -> Iterator[tuple[Position, Pack]]:
        """All packs from a position on, epoch after epoch, without end."""
        for *where, window in self.places(position):
            yield Position(*where), window.pack(where[-1])

    def places(self, position: Position, end: Position | None = None) -> Iterator[tuple[int, int, int, Window]]:
        """Epoch, window and number of all packs from a position up to `end` (None: without end), and the planned
        window: a process that skips a pack need not build it."""
        position = self.position_after(position, 0)
        while end is None or position < end:
            window = self._window(position.epoch, position.window)
            stop = len(window)
            if is_last := end is not None and (position.epoch, position.window) == (end.epoch, end.window):
                stop = end.pack_in_window
            for number in range(position.pack_in_window, stop):
                yield position.epoch, position.window, number, window
            if is_last:
                return
            position = self.position_after(Position(position.epoch, position.window, len(window)), 0)

    def windows(self, epoch: int) -> Iterator[Window]:
        """The windows of one epoch."""
        for number in range(self.num_windows):
            yield self._window(epoch, number)

    def position_after(self, position: Position, num_packs: int) -> Position:
        """The position of the pack `num_packs` after the one at `position`. Plans the windows between, none before.

        UserError for a position of other data or other arguments.
        """
        epoch, number, pack = position.epoch, position.window, position.pack_in_window
        if not (epoch >= 0 and 0 <= number < self.num_windows and 0 <= pack <= len(self._window(epoch, number))):
            raise UserError(
                f"{position} does not exist in this data: it belongs to other data or other batch arguments"
            )
        pack += num_packs
        empty_windows = 0
        while pack >= (size := len(self._window(epoch, number))):
            pack -= size
            empty_windows = 0 if size else empty_windows + 1
            if empty_windows > self.num_windows:
                raise UserError("every record of the dataset is empty")
            number += 1
            if number == self.num_windows:
                epoch, number = epoch + 1, 0
        return Position(epoch, number, pack)

    def epochs_before(self, position: Position) -> float:
        """Epochs done at `position`, a fraction: 1.5 in the middle of the second epoch."""
        if position.pack_in_window == 0:
            return position.epoch + position.window / self.num_windows
        within = position.pack_in_window / len(self._window(position.epoch, position.window))
        return position.epoch + (position.window + within) / self.num_windows

    def position_at(self, epochs: float) -> Position:
        """The first pack after this many epochs, at least one pack from the beginning. For a fraction the nearest
        pack: `epochs_before` it differs from `epochs` by at most half a pack."""
        epoch = int(epochs)
        window, within = divmod((epochs - epoch) * self.num_windows, 1)
        if window == within == 0:
            return Position(epoch)
        pack = round(within * len(self._window(epoch, int(window))))
        return max(self.position_after(Position(epoch, int(window), pack), 0), self.position_after(Position(), 1))

    def count(self, start: Position, end: Position) -> int:
        """Packs from one position up to another. Exact for padded batches, and where at most 192 windows lie between;
        beyond that from `packs_per_epoch`, with an error below 0.1 %: counting 70 million records takes half a minute
        or more, before the first step."""
        if end <= start:
            return 0
        if self.sequences_per_pack:
            return self._padded_before(end) - self._padded_before(start)
        first, last = (position.epoch * self.num_windows + position.window for position in (start, end))
        if last - first > COUNTED_WINDOWS:
            return round((self.epochs_before(end) - self.epochs_before(start)) * self.packs_per_epoch())
        windows = (self._window(*divmod(number, self.num_windows)) for number in range(first, last))
        return sum(map(len, windows)) - start.pack_in_window + end.pack_in_window

    def _padded_before(self, position: Position) -> int:
        """Padded batches before a position: those of a window follow from its records."""
        in_epoch = self._window_range(position.window)[0] // self.sequences_per_pack
        return position.epoch * self.packs_per_epoch() + in_epoch + position.pack_in_window

    def packs_per_epoch(self, epoch: int = 0) -> int:
        """Packs of one epoch. Exact up to 64 windows (a million records) and for padded batches; beyond that
        extrapolated from 64 evenly spaced windows (the same on every call and machine)."""
        if self.sequences_per_pack:
            return -(-self.num_drawn // self.sequences_per_pack)
        return self.statistics(epoch).packs

    def statistics(self, epoch: int = 0) -> PlanStatistics:
        """Packs, tokens and fill of one epoch: from all windows up to 64; beyond, extrapolated from 64 stretches of
        the store. (Shuffled windows read blocks all over it: 64 of them took half a minute on a disk.)"""
        if epoch not in self._counted:
            sampled = min(self.num_windows, SAMPLED_WINDOWS)
            numbers = [i * self.num_windows // sampled for i in range(sampled)]
            windows = [self._plan_window(epoch, number, self.num_windows > sampled) for number in numbers]
            packs, tokens = sum(map(len, windows)), sum(int(window.lengths.sum()) for window in windows)
            capacity = packs * (self.tokens_per_pack or self.sequences_per_pack * self.max_seq_length)
            # By records: the sizes of windows differ by a block.
            share = self.num_drawn / sum(last - first for first, last in map(self._window_range, numbers))
            self._counted[epoch] = PlanStatistics(
                round(packs * share), round(tokens * share), tokens / max(1, capacity), sampled == self.num_windows
            )
        return self._counted[epoch]

    def _window(self, epoch: int, number: int) -> Window:
        """The planned window; the last two stay in memory."""
        if (epoch, number) not in self._planned:
            while len(self._planned) > 1:
                del self._planned[next(iter(self._planned))]
            self._planned[epoch, number] = self._plan_window(epoch, number)
        return self._planned[epoch, number]

    def _window_range(self, number: int) -> tuple[int, int]:
        """First and one past the last record of a window, counted in the epoch's order of blocks."""
        first, last = (i * self.num_blocks // self.num_windows * self.block for i in (number, number + 1))
        return first, min(last, self.num_drawn)

    def _window_records(self, epoch: int, number: int, as_stored: bool = False) -> np.ndarray:
        """Records int64 [n] of a window, blocks in the epoch's order (or as stored) and in store order within each."""
        order = np.arange(*self._window_range(number)) if as_stored else self._window_order(epoch, number)
        return order if self.clusters is None else self.clusters.draw(order, derive_key(self.seed, epoch, MEMBER))

    def _window_order(self, epoch: int, number: int) -> np.ndarray:
        """Records, or clusters, int64 [n] of a window."""
        order = np.arange(*self._window_range(number))
        if not self.shuffle:
            return order
        block, within = np.divmod(order, self.block)
        # The one block that may be short stays last, so that every window knows its records without the others.
        full = block < self.num_full_blocks
        if full.any():
            permute = Permutation(self.num_full_blocks, derive_key(self.seed, epoch, BLOCK_ORDER))
            distinct, inverse = np.unique(block[full], return_inverse=True)
            block[full] = permute(distinct)[inverse]
        # Rotated, so that the blocks, in particular the last one, hold other records in every epoch.
        shift = derive_key(self.seed, epoch, ROTATION) % self.num_drawn
        return (block * self.block + within + shift) % self.num_drawn

    def _plan_window(self, epoch: int, number: int, as_stored: bool = False) -> Window:
        records = self._window_records(epoch, number, as_stored)
        lengths = self.lengths_of(records)  # in store order: the offsets are read sequentially
        size = (self.max_seq_length, self.tokens_per_pack, self.sequences_per_pack)
        return plan_window(records, lengths, self.seed, epoch, number, *size, self.shuffle)
