"""Causal language modelling on prepared text: the plan of contexts, and batches in which each token predicts the next.

The plan is one global order of packs with random access. All documents of a split, end to end, are rotated by a hash
of (seed, epoch) and cut into contexts of L tokens; a keyed bijection of (seed, epoch) permutes the contexts, and a
pack is the next few of them. The remainder, less than a context, is dropped; because of the rotation it is other text
in each epoch. Without `shuffle` (evaluation) nothing is rotated, permuted or dropped: the last context is shorter. The
interface is that of `BatchPlan`, with one window an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from common.cli import UserError
from common.data.collators import IGNORE, Batch, Collator
from common.data.counter_rng import RECORD_ORDER, ROTATION, Permutation, derive_key
from common.data.crops import Pack
from common.data.packing import Position
from common.data.training_data import rank_batches
from common.distributed.world import Mesh
from extras.families.text.flags import TextFlags
from extras.families.text.store import TextMemory, TextStore
from extras.families.text.tokenizers import Pieces


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
        contexts = store.num_tokens // context if shuffle else -(-store.num_tokens // context)
        self.num_contexts = min(contexts, most_contexts or contexts)
        if self.num_contexts == 0:
            raise UserError(
                f"{store.num_tokens:,} tokens of text do not fill one context of --max_seq_length {context}: give "
                "more text, or a shorter context"
            )
        self.packs_per_epoch = -(-self.num_contexts // contexts_per_pack)

    def places(self, position: Position, end: Position | None = None) -> Iterator[tuple[int, int, int, EpochOfText]]:
        """(epoch, window 0, number, planned epoch) of all packs from a position up to `end` (None: without end)."""
        position = self.position_after(position, 0)
        while end is None or position < end:
            window = self._epoch(position.epoch)
            in_last = end is not None and position.epoch == end.epoch
            for number in range(position.pack_in_window, end.pack_in_window if in_last else len(window)):
                yield position.epoch, 0, number, window
            position = Position(position.epoch + 1)

    def windows(self, epoch: int) -> Iterator[EpochOfText]:
        """The one window of an epoch."""
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
    """The packs of one epoch, as a window of a BatchPlan. shift: of the rotation, in tokens."""

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
        return Pack(*Pieces.concat(pieces), self.epoch)

    def _pieces(self, context: int) -> Iterator[Pieces]:
        """The pieces of one context, which may continue from the end of the text to its beginning."""
        total = self.plan.store.num_tokens
        begin = context * self.plan.context + self.shift
        end = begin + self.plan.context if self.plan.shuffle else min(begin + self.plan.context, total)
        for low, high in ((begin, min(end, total)), (max(begin, total), end)):
            if low < high:
                yield self.plan.store.pieces(low % total, (high - 1) % total + 1)


FILLER = 1  # token id of a rank's slice that has no token; of no sequence, without a label


class CausalCollator:
    """Contexts of at most `context` tokens end to end, with the boundaries of attention (cu_seqlens).

    document_masks: boundaries of the documents' pieces in the contexts, else of the contexts.
    """

    def __init__(self, context: int, document_masks: bool = False):
        self.context, self.document_masks = context, document_masks

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """The batch of a pack whose tokens are `ids` [T], of any integer type; see extras.families.text.data.

        An empty pack gives one token without a label, and all counts zero: the rank can run its forward pass (sharded
        models need all ranks to) and adds nothing to any sum.
        """
        tokens = len(ids)
        begins = np.arange(0, max(tokens, 1), self.context)
        if tokens and self.document_masks:
            ends = np.cumsum(pack.lengths)
            begins = np.union1d(begins, ends[:-1])  # no piece of a pack crosses a context
        batch = next_token_batch(ids, np.diff(np.append(begins, max(tokens, 1))))
        batch["num_sequences"] = -(-tokens // self.context)
        return batch


def next_token_batch(ids: np.ndarray, lengths: np.ndarray) -> Batch:
    """Sequences end to end, in which each token predicts the next. ids: [T], of any integer type; lengths: int64 [n].

    Without a token: one without a label, and all counts zero.
    """
    tokens = len(ids)
    lengths = lengths if tokens else np.ones(1, np.int64)
    cu_seqlens = np.append(0, np.cumsum(lengths)).astype(np.int32)
    input_ids = np.zeros(max(tokens, 1), np.int64)
    labels = np.full(len(input_ids), IGNORE, np.int64)
    if tokens:
        input_ids[:] = ids
        labels[:-1] = input_ids[1:]
        labels[cu_seqlens[1:] - 1] = IGNORE
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "max_seqlen": int(lengths.max()),
        "num_targets": tokens - len(lengths) if tokens else 0,
        "num_tokens": tokens,
        "sum_squared_lengths": int((lengths**2).sum()) if tokens else 0,
        "num_sequences": len(lengths) if tokens else 0,
        "num_unknown": 0,
    }


def causal_batches(flags: TextFlags, mesh: Mesh, filled_to: int = 0) -> Collator:
    """The collator of a rank for text: of whole packs, or of its slices of them. filled_to: of `rank_batches`."""
    collator = CausalCollator(flags.max_seq_length, flags.document_masks)
    return rank_batches(collator, flags, mesh, FILLER, filled_to=filled_to)
