"""Sets of homologs: what a context of a training pack holds, as a function of (seed, epoch, cluster).

The unit of a window of the batch plan is the cluster, each once an epoch. Its members are ordered by a hash. The first
of them are its set: a random number, log-uniform from 1 to `set_size`, or as many as the budget of tokens holds. Sets
lie end to end in packs and are never split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.cli import UserError
from common.data.clusters import Clusters, open_clusters
from common.data.collators import Batch, Collator
from common.data.counter_rng import PACK_ORDER, RECORD_ORDER, SET_ORDER, SET_SIZE, derive_key, hash_counters
from common.data.crops import Pack, Window, crop, hash_order, packed, runs
from common.data.flags import DataFlags
from common.data.loader import ProteinStore
from common.data.packing import BatchPlan, Position
from common.files.safe_files import shorten
from common.models.family import Family, encoders, family_of

PAIR = r"[0-9]{1,6}(\.[0-9]{1,6})?:[1-9][0-9]{0,8}"
SCHEDULE = re.compile(rf"{PAIR}(,{PAIR}){{0,99}}")
ROUNDING = 1e-9  # of epochs


@dataclass(frozen=True)
class SetTokens:
    """Most tokens of a set, over a run. stages: (epochs done at its begin, tokens) of each; the first begins at 0."""

    stages: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, text: str) -> SetTokens:
        """From a number, or from a schedule "0:2048,0.5:8192". UserError for any other text."""
        schedule, stages = text if ":" in text else f"0:{text}", []
        if SCHEDULE.fullmatch(schedule):
            pairs = (pair.split(":") for pair in schedule.split(","))
            stages = [(float(epochs), int(tokens)) for epochs, tokens in pairs]
        begins = [epochs for epochs, _ in stages]
        if begins[:1] != [0] or any(a >= b for a, b in zip(begins, begins[1:], strict=False)):
            wanted = "a number, or at most 100 epochs:tokens pairs, the epochs rising from 0, such as 0:2048,0.5:8192"
            raise UserError(f"--set_tokens {shorten(text)}: expected {wanted}")
        return cls(tuple(stages))

    def at(self, epochs: float) -> int:
        """Most tokens of the sets that are drawn after so many epochs."""
        return [tokens for begin, tokens in self.stages if begin <= epochs + ROUNDING][-1]

    @property
    def fewest(self) -> int:
        return min(tokens for _, tokens in self.stages)

    @property
    def most(self) -> int:
        return max(tokens for _, tokens in self.stages)


class SetPlan(BatchPlan):
    """A batch plan of sets of homologs; see the module's docstring.

    lengths_of, seed, max_seq_length, tokens_per_pack: as `BatchPlan`; set_tokens: most tokens of a set, by the epochs
    done where its window begins; set_size: most members of a set. UserError for sizes that cannot work.
    """

    def __init__(
        self,
        lengths_of: Callable[[np.ndarray], np.ndarray],
        clusters: Clusters,
        seed: int,
        max_seq_length: int,
        tokens_per_pack: int,
        set_tokens: SetTokens,
        set_size: int,
    ):
        super().__init__(
            lengths_of, clusters.num_records, seed, max_seq_length, tokens_per_pack=tokens_per_pack, clusters=clusters
        )
        check_sizes(set_tokens, max_seq_length, tokens_per_pack)
        self.homologs, self.set_tokens, self.set_size = clusters, set_tokens, set_size

    def count(self, start: Position, end: Position) -> int:
        """As `BatchPlan.count`, for each stage of the budget: the packs of an epoch follow from it."""
        if len(self.set_tokens.stages) == 1:
            return super().count(start, end)
        total = 0
        begins = [self._first_window(epochs) for epochs, _ in self.set_tokens.stages] + [end]
        for (_, tokens), first, last in zip(self.set_tokens.stages, begins, begins[1:], strict=False):
            size = self.max_seq_length, self.tokens_per_pack, SetTokens(((0, tokens),)), self.set_size
            stage = SetPlan(self.lengths_of, self.homologs, self.seed, *size)
            total += stage.count(max(first, start), min(last, end))
        return total

    def _first_window(self, epochs: float) -> Position:
        """The first window that begins after so many epochs."""
        return Position(*divmod(math.ceil((epochs - ROUNDING) * self.num_windows), self.num_windows))

    def _plan_window(self, epoch: int, number: int, as_stored: bool = False) -> Window:
        clusters = np.arange(*self._window_range(number)) if as_stored else self._window_order(epoch, number)
        clusters = clusters[hash_order(derive_key(self.seed, epoch, RECORD_ORDER), clusters)]
        records, bounds = draw_sets(self.homologs, clusters, self.seed, epoch, self.set_size)
        starts, crops = crop(records, self.lengths_of(records), self.seed, epoch, self.max_seq_length)
        keep, bounds = within_budget(crops, bounds, self.set_tokens.at(epoch + number / self.num_windows))
        key = derive_key(self.seed, epoch, PACK_ORDER, number)
        return pack_sets(records[keep], starts[keep], crops[keep], bounds, epoch, self.tokens_per_pack, key)


def draw_sets(
    clusters: Clusters, chosen: np.ndarray, seed: int, epoch: int, set_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The sets of n clusters int64 [n], without a budget: records int64 [m], set after set, and bounds int64 [n + 1].

    The order of members is a hash of (seed, epoch, member), the size one of (seed, epoch, cluster): log-uniform, k
    with probability log((k + 1) / k) / log(set_size + 1), at most the members there are.
    """
    members, bounds = runs(clusters.offsets, chosen)
    records = clusters.members[members].astype(np.int64)
    numbers = np.repeat(np.arange(len(chosen)), np.diff(bounds))
    records = records[np.lexsort((hash_counters(derive_key(seed, epoch, SET_ORDER), records), numbers))]
    limits = np.rint(np.log(np.arange(2, set_size + 1)) / np.log(set_size + 1) * 2**32).astype(np.uint64)
    hashes = hash_counters(derive_key(seed, epoch, SET_SIZE), chosen) >> np.uint64(32)
    sizes = 1 + limits.searchsorted(hashes, side="right")
    keep = np.arange(len(records)) - bounds[numbers] < sizes[numbers]
    return records[keep], np.append(0, np.cumsum(np.minimum(sizes, np.diff(bounds))))


def within_budget(lengths: np.ndarray, bounds: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of m sequences stay where a set ends before the first that exceeds `tokens`, bool [m], and the bounds of
    what is left. lengths: int64 [m], in sets [bounds[s], bounds[s + 1]). Sequences without a token are left out."""
    ends = np.append(0, np.cumsum(lengths))
    before = np.repeat(ends[bounds[:-1]], np.diff(bounds))
    keep = (ends[1:] - before <= tokens) & (lengths > 0)
    return keep, np.append(0, np.cumsum(keep))[bounds]


def pack_sets(
    records: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    bounds: np.ndarray,
    epoch: int,
    tokens_per_pack: int,
    key: int | None,
) -> Window:
    """A window whose packs hold whole sets. Set s has the crops [bounds[s], bounds[s + 1]) of int64 [m]; key: as
    `packed`. Empty sets are left out."""
    totals = np.diff(np.append(0, np.cumsum(lengths))[bounds])
    order, packs = packed(totals, tokens_per_pack, key)
    crops, sets = runs(bounds, order)
    return Window(epoch, records[crops], starts[crops], lengths[crops], sets[packs], sets)


@dataclass(frozen=True)
class SetCollator:
    """Adds the sets of a pack to the batches of `collator`, the outermost but for this one.

    sets: int32 [2, B + 1], B being the sequences of cu_seqlens. Row 0: boundaries of the sequences in tokens, with
    context parallelism those of the whole sequences. Row 1: boundaries of the sets in sequences; fillers, and the
    sequences of a pack without sets, are sets of their own; then B to the end.
    """

    collator: Collator

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """set_pairs: pairs of tokens in block-causal attention, counted by one rank of those that share a pack."""
        batch: Any = self.collator(pack, ids, step)
        tokens = batch["cu_seqlens"]
        count = len(tokens) - 1
        if "cp_lengths" in batch:
            tokens = F.pad(batch["cp_lengths"].cumsum(0), (1, 0))
            tokens = F.pad(tokens, (0, count + 1 - len(tokens)), value=int(tokens[-1]))
        sets = np.arange(len(pack.lengths) + 1) if pack.sets is None else pack.sets
        bounds = np.full(count + 1, count)
        fillers = np.arange(len(pack.lengths) + 1, count + 1)
        bounds[: len(sets) + len(fillers)] = np.append(sets, fillers)
        batch["sets"] = torch.stack((tokens.int(), torch.from_numpy(bounds).int()))
        batch["set_pairs"] = set_pairs(pack.lengths, sets) if batch["num_sequences"] else 0
        return batch


def set_pairs(lengths: np.ndarray, sets: np.ndarray) -> int:
    """Pairs of tokens where a sequence attends to itself and to those before it in its set: the sum over sets of
    (S^2 + sum L^2) / 2, S being a set's tokens and L a sequence's."""
    tokens = np.diff(np.append(0, np.cumsum(lengths))[sets])
    return int((tokens**2).sum() + (lengths**2).sum()) // 2


# ---- a run ----


def check_sizes(set_tokens: SetTokens, max_seq_length: int, tokens_per_pack: int | None) -> None:
    """UserError unless a protein fits a set, and a set a pack. tokens_per_pack: None if it is not known yet."""
    if set_tokens.fewest < max_seq_length:
        raise UserError(
            f"--set_tokens {set_tokens.fewest} is less than one sequence of --max_seq_length {max_seq_length}: raise "
            "the one or lower the other"
        )
    if tokens_per_pack is not None and set_tokens.most > tokens_per_pack:
        raise UserError(
            f"--set_tokens {set_tokens.most}: packs of {tokens_per_pack} tokens do not hold one set: raise "
            "--tokens_per_pack or lower --set_tokens"
        )


def check_flags(flags: DataFlags, family: Family) -> None:
    """UserError for --set_tokens with what cannot have sets."""
    set_tokens = SetTokens.of(str(flags.set_tokens))
    given = f"--set_tokens {flags.set_tokens}"
    if not family.reads_sets:
        readers = [kind for kind in encoders() if family_of(kind).reads_sets]
        raise UserError(
            f"{given}: {family.title} reads no sets of homologs: choose --model_type {' or '.join(readers)}"
        )
    if flags.dataset or flags.dataset_mix:
        other = "--dataset" if flags.dataset else "--dataset_mix"
        raise UserError(f"{given}: needs --dataset_dir, prepared with clusters by step 1; drop {other}")
    if not flags.packing:
        raise UserError(f"{given}: needs packs of tokens: drop --pad_to_max_length or --sequence_packing False")
    if not flags.sample_clusters or flags.sample_clusters_exponent:
        other = "sample_clusters_exponent" if flags.sample_clusters_exponent else "--sample_clusters False"
        raise UserError(f"{given}: draws each cluster once an epoch: drop {other}")
    flags.require_at_least(1, "set_size")
    check_sizes(set_tokens, flags.max_seq_length, None if flags.tokens_per_pack == "auto" else flags.pack_tokens)


def set_plan(flags: DataFlags, store: ProteinStore, directory: Path) -> tuple[SetPlan, dict[str, Any], str]:
    """The plan of a training split, what it adds to the identity of the data, and a line about what is drawn."""
    clusters = open_clusters(directory, len(store), "--set_tokens")
    sizes = flags.max_seq_length, flags.pack_tokens, SetTokens.of(str(flags.set_tokens)), flags.set_size
    identity = {
        "sample_clusters": clusters.content[:16],
        "set_tokens": flags.set_tokens,
        "set_size": flags.set_size,
    }
    about = (
        f"sets: 1 to {flags.set_size} members of each of {len(clusters):,} clusters of {len(store):,} proteins, at "
        f"most {flags.set_tokens} tokens"
    )
    return SetPlan(store.lengths, clusters, flags.seed, *sizes), identity, about
