"""Plan one window of records: crop them, fill packs with them, put the packs in order.

A pack is a list of sequence crops of at most `tokens_per_pack` tokens (packed batches), or of `sequences_per_pack`
crops (padded batches). The plan is a function of the records, their lengths and the keys (seed, epoch, record or
window); the caller chooses the records (blocks of a batch plan, buffer of a stream).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.data.counter_rng import CROP, PACK_ORDER, RECORD_ORDER, derive_key, hash_counters, scale

LOOK_AHEAD = 512  # sequences among which the end of a pack is chosen


@dataclass(frozen=True)
class Pack:
    """n crops: record i has tokens [starts[i], starts[i] + lengths[i]), int64 [n] each; source: of a mixture; sets:
    int64 [S + 1], set s has crops [sets[s], sets[s + 1]), None without sets of homologs."""

    records: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    epoch: int
    source: int = 0
    sets: np.ndarray | None = None

    @classmethod
    def empty(cls, epoch: int = 0) -> Pack:
        """A pack without a sequence, for a rank without data in the last step."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, epoch)

    @classmethod
    def of_length(cls, tokens: int, longest: int) -> Pack:
        """A pack of `tokens` (at least 1) in sequences of length `longest`, the last one shorter."""
        lengths = np.full(-(-tokens // longest), longest, dtype=np.int64)
        lengths[-1] -= lengths.sum() - tokens
        return cls(np.arange(len(lengths)), np.zeros_like(lengths), lengths, 0)


@dataclass(frozen=True)
class Window:
    """A planned window: its crops in the order of the packs, int64 [n] each; pack p holds [bounds[p], bounds[p+1]).
    sets: int64, where each set of homologs begins and the last one ends, None without sets."""

    epoch: int
    records: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    bounds: np.ndarray
    sets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def pack(self, number: int) -> Pack:
        first, last = self.bounds[number : number + 2]
        here, sets = slice(first, last), None
        if self.sets is not None:
            begin, end = self.sets.searchsorted((first, last))
            sets = self.sets[begin : end + 1] - first
        return Pack(self.records[here], self.starts[here], self.lengths[here], self.epoch, sets=sets)


def plan_window(
    records: np.ndarray,
    lengths: np.ndarray,
    seed: int,
    epoch: int,
    number: int,
    max_seq_length: int,
    tokens_per_pack: int,
    sequences_per_pack: int,
    shuffle: bool,
) -> Window:
    """Crop n records to at most max_seq_length tokens at random places and distribute them over packs.

    records: int64 [n], the numbers by which crops (and order) are keyed; lengths: tokens int64 [n]; number: of the
    window in its epoch; tokens_per_pack or sequences_per_pack: the other is 0; shuffle: False keeps the order of
    the records. Records without a token are left out.
    """
    if shuffle:
        order = hash_order(derive_key(seed, epoch, RECORD_ORDER), records)
        records, lengths = records[order], lengths[order]
    starts, crops = crop(records, lengths, seed, epoch, max_seq_length)
    if sequences_per_pack:
        bounds = np.append(np.arange(0, len(records), sequences_per_pack), len(records))
        keep = crops > 0  # without empty records
        bounds = np.concatenate(([0], np.cumsum(keep)))[bounds]
        return Window(epoch, records[keep], starts[keep], crops[keep], bounds)
    order, bounds = packed(crops, tokens_per_pack, derive_key(seed, epoch, PACK_ORDER, number) if shuffle else None)
    return Window(epoch, records[order], starts[order], crops[order], bounds)


def hash_order(key: int, counters: np.ndarray) -> np.ndarray:
    """Indices int64 [n] that shuffle n counters by their hashes."""
    return np.argsort(hash_counters(key, counters), kind="stable")


def runs(bounds: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The members of the chosen groups, end to end, and where each group begins then.

    bounds: [groups + 1], group g has members [bounds[g], bounds[g + 1]); chosen: int64 [n]. Returns int64
    [members] and [n + 1].
    """
    begin = bounds[chosen].astype(np.int64)
    sizes = bounds[chosen + 1].astype(np.int64) - begin
    ends = np.append(0, np.cumsum(sizes))
    return np.repeat(begin - ends[:-1], sizes) + np.arange(ends[-1]), ends


def crop(
    records: np.ndarray, lengths: np.ndarray, seed: int, epoch: int, max_seq_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the crops of n records to at most max_seq_length tokens; all int64 [n]."""
    crops = np.minimum(lengths, max_seq_length)
    starts = np.zeros_like(crops)
    long = np.flatnonzero(lengths > crops)
    hashes = hash_counters(derive_key(seed, epoch, CROP), records[long])
    starts[long] = scale(hashes, lengths[long] - crops[long] + 1)
    return starts, crops


def packed(lengths: np.ndarray, capacity: int, key: int | None) -> tuple[np.ndarray, np.ndarray]:
    """As `fill_packs`, the packs in an order by hash. key: None leaves them as filled, the badly filled ones last."""
    order, bounds = fill_packs(lengths, capacity)
    if key is None:
        return order, bounds
    within, bounds = runs(bounds, hash_order(key, np.arange(len(bounds) - 1)))
    return order[within], bounds


def fill_packs(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute sequences over packs of at most `capacity` tokens.

    Every pack takes the sequences in the given order until the next one does not fit, then repeatedly the longest of
    the next 512 that still fits. So all but the last few sequences of a pack are a random sample of the lengths, and
    packs are nearly full.

    lengths: int64 [n], none above `capacity`; those of length 0 are left out. Returns the sequences' indices int64
    [m <= n] in the order of the packs, and bounds int64 [packs + 1]: pack p holds order[bounds[p] : bounds[p + 1]].
    """
    queue = np.flatnonzero(lengths)
    lengths = lengths[queue].astype(np.int32)  # kept in the order of the queue
    bounds, head, end = [0], 0, len(queue)
    usual = 2 * int(capacity // lengths.mean() + 1) if end else 0
    while head < end:
        total, count = lengths[head : head + usual].cumsum(), usual
        while total[-1] <= capacity and head + len(total) < end:
            count *= 2
            total = lengths[head : head + count].cumsum()
        taken = int(total.searchsorted(capacity, side="right"))
        free = capacity - int(total[taken - 1])
        head += taken
        candidates, chosen = lengths[head : head + LOOK_AHEAD].copy(), []
        while free > 0 and len(candidates):
            fitting = candidates * (candidates <= free)
            best = int(fitting.argmax())  # the first of the longest
            if not fitting[best]:
                break
            free -= int(fitting[best])
            candidates[best] = 0
            # Move it to the front, behind those chosen before, which may have shifted it.
            front, place = head + len(chosen), head + best + sum(other > best for other in chosen)
            for array in (queue, lengths):
                value = array[place]
                array[front + 1 : place + 1] = array[front:place]
                array[front] = value
            chosen.append(best)
        head += len(chosen)
        bounds.append(head)
    return queue, np.array(bounds, dtype=np.int64)
