"""The plan of contexts over prepared text: one global order of packs, in which any place is found at once.

All documents of a split, end to end, are rotated by a hash of (seed, epoch) and cut into contexts of L tokens; a keyed
bijection of (seed, epoch) permutes the contexts, and a pack is the next few of them. What is left
after the last cut, less than a context, is left out of the epoch; rotated, it is other text in each. Without `shuffle`
(evaluation) nothing is rotated, permuted or left out: the last context is shorter.

The interface is that of `packing.BatchPlan`, with one window an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from common.batches.packing import Position
from common.batches.windows import Pack
from common.cli import UserError
from common.files.hashing import RECORD_ORDER, ROTATION, Permutation, derive_key
from common.text.memory import TextMemory
from common.text.pieces import Pieces
from common.text.store import TextStore


class ContextPlan:
    """The order of packs; see the module's docstring.

    store: the tokens; seed: any integer; context: tokens of one; contexts_per_pack: the last pack of an epoch may have
    fewer; most_contexts: of an epoch (evaluation). UserError where there is no context to train on.
    """

    def __init__(
        self,
        store: TextStore | TextMemory,
        seed: int,
        context: int,
        contexts_per_pack: int,
        shuffle: bool = True,
        most_contexts: int | None = None,
    ):
        self.store, self.seed, self.context, self.contexts_per_pack = store, seed, context, contexts_per_pack
        self.shuffle = shuffle
        found = store.num_tokens // context if shuffle else -(-store.num_tokens // context)
        self.num_contexts = min(found, most_contexts or found)
        if self.num_contexts == 0:
            raise UserError(
                f"{store.num_tokens:,} tokens of text do not fill one context of --max_seq_length {context}: give "
                "more text, or a shorter context"
            )
        self.packs_per_epoch = -(-self.num_contexts // contexts_per_pack)

    def places(self, position: Position, end: Position | None = None) -> Iterator[tuple[int, int, int, EpochOfText]]:
        """As `BatchPlan.places`."""
        position = self.position_after(position, 0)
        while end is None or position < end:
            window = self._epoch(position.epoch)
            in_last = end is not None and position.epoch == end.epoch
            for number in range(position.pack_in_window, end.pack_in_window if in_last else len(window)):
                yield position.epoch, 0, number, window
            position = Position(position.epoch + 1)

    def windows(self, epoch: int) -> Iterator[EpochOfText]:
        """As `BatchPlan.windows`."""
        yield self._epoch(epoch)

    def position_after(self, position: Position, num_packs: int) -> Position:
        """The position of the pack `num_packs` after the one at `position`; UserError where there is none."""
        epoch, window, pack = position.epoch, position.window, position.pack_in_window
        if epoch < 0 or window != 0 or not 0 <= pack <= self.packs_per_epoch:
            raise UserError(
                f"{position} does not exist in this data: it belongs to other data or other batch arguments"
            )
        epochs, pack = divmod(pack + num_packs, self.packs_per_epoch)
        return Position(epoch + epochs, 0, pack)

    def epochs_before(self, position: Position) -> float:
        """Epochs the packs before `position` make, as a fraction."""
        return position.epoch + position.pack_in_window / self.packs_per_epoch

    def position_at(self, epochs: float) -> Position:
        """Where so many epochs end, to half a pack; at least one pack is before it."""
        return self.position_after(Position(), max(1, round(epochs * self.packs_per_epoch)))

    def count(self, start: Position, end: Position) -> int:
        """Packs from one position up to another."""
        packs = (end.epoch - start.epoch) * self.packs_per_epoch + end.pack_in_window - start.pack_in_window
        return max(0, packs)

    def _epoch(self, epoch: int) -> EpochOfText:
        shift = derive_key(self.seed, epoch, ROTATION) % self.store.num_tokens if self.shuffle else 0
        return EpochOfText(self, epoch, shift)


@dataclass(frozen=True)
class EpochOfText:
    """One epoch of a plan, in the part of a window: its packs by their numbers. shift: the place it begins at."""

    plan: ContextPlan
    epoch: int
    shift: int

    def __len__(self) -> int:
        return self.plan.packs_per_epoch

    def pack(self, number: int) -> Pack:
        plan = self.plan
        first = number * plan.contexts_per_pack
        contexts = np.arange(first, min(first + plan.contexts_per_pack, plan.num_contexts))
        if plan.shuffle:
            contexts = Permutation(plan.num_contexts, derive_key(plan.seed, self.epoch, RECORD_ORDER))(contexts)
        pieces = [part for context in contexts.tolist() for part in self._pieces(context)]
        return Pack(*Pieces.together(pieces), self.epoch)

    def _pieces(self, context: int) -> Iterator[Pieces]:
        """Those of one context, which may go over the end of the text to its beginning."""
        total = self.plan.store.num_tokens
        begin = context * self.plan.context + self.shift
        end = begin + self.plan.context if self.plan.shuffle else min(begin + self.plan.context, total)
        for low, high in ((begin, min(end, total)), (max(begin, total), end)):
            if low < high:
                yield self.plan.store.pieces(low % total, (high - 1) % total + 1)
