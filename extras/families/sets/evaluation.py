"""Held-out losses of proteins that follow homologs of their own cluster, beside those of the same proteins alone.

Each protein is the last sequence of a set. Its predecessors are shown as they are, and not asked; of the protein the
same residues are hidden as in the evaluation alone, so that the two are paired. A cluster's members are put on a ring
in an order by hash; the predecessors of one are those behind it. Members that equal the protein, are a part of it or
contain it would show the answer: they are left out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from common.cli import UserError
from common.data import TokenSet
from common.data.alphabet import Alphabet
from common.data.collators import IGNORE, Batch, Collator
from common.data.counter_rng import SET_ORDER, derive_key, hash_counters
from common.data.crops import Pack, Window, crop
from common.data.flags import DataFlags
from common.data.loader import ProteinStore, evaluation_batches
from common.data.packing import BatchPlan
from common.data.training_data import EVAL_SEED, held_out_masks, rank_batches
from common.distributed.world import World
from common.models.family import encoder_family
from common.models.layers.config_base import TRAINED_SETS
from common.shape_buckets import predicted_positions
from common.training.evaluation import held_out_results
from common.training.masked_lm import MaskedLM, SelectedSums
from common.training.protein_losses import ProteinLosses, mean_and_error
from extras.prepare.sources.copies import shows
from extras.prepare.sources.sets import SetCollator, SetTokens, pack_sets

logger = logging.getLogger(__name__)
GROUPS = {"1": (1, 1), "2_3": (2, 3), "4_7": (4, 7), "8_up": (8, 1 << 62)}  # of numbers of predecessors: first, last


@dataclass(frozen=True)
class HeldOutSets:
    """Proteins and their predecessors. Of protein n, proteins[n], the set is records[bounds[n] : bounds[n + 1]], in
    whose order it is the last; all int64. copies: members that were left out as they show a protein's residues."""

    proteins: np.ndarray
    records: np.ndarray
    bounds: np.ndarray
    copies: int = 0

    @classmethod
    def of(cls, sets: dict[int, list[int]], copies: int = 0) -> HeldOutSets:
        """From the predecessors of each protein."""
        records = [record for protein, before in sets.items() for record in (*before, protein)]
        sizes = [len(before) + 1 for before in sets.values()]
        return cls(np.array([*sets], np.int64), np.array(records, np.int64), np.append(0, np.cumsum(sizes)), copies)

    @property
    def numbers(self) -> np.ndarray:
        """Predecessors of each protein, int64 [n]."""
        return np.diff(self.bounds) - 1

    def with_at_least(self, least: int, only: int | None = None) -> HeldOutSets:
        """The proteins that have at least so many predecessors; only: with their last `only` of them."""
        sets = {}
        for number in np.flatnonzero(self.numbers >= least):
            before = self.records[self.bounds[number] : self.bounds[number + 1] - 1].tolist()
            sets[int(self.proteins[number])] = before if only is None else before[len(before) - only :]
        return HeldOutSets.of(sets, self.copies)


def held_out_sets(
    store: ProteinStore, clusters: np.ndarray, set_size: int, tokens: int, max_seq_length: int, alphabet: Alphabet
) -> HeldOutSets:
    """Each protein of a store behind up to set_size - 1 others of its cluster.

    clusters: int64 [n], of each protein; tokens: most of a set, the protein's own, cropped to max_seq_length, among
    them; alphabet: of the store.
    """
    every = np.arange(len(store))
    starts, lengths = crop(every, store.lengths(every), EVAL_SEED, 0, max_seq_length)
    whole = residues_of(store, np.zeros_like(every), store.lengths(every), alphabet)
    asked = residues_of(store, starts, lengths, alphabet)
    unknown = bytes([alphabet.letters.index("X")])

    def is_copy(member: int, protein: int) -> bool:
        return any(shows(whole[member], text, unknown) for text in {whole[protein], asked[protein]})

    order = np.lexsort((hash_counters(derive_key(EVAL_SEED, 0, SET_ORDER), every), clusters))
    sets, copies = {}, 0
    for ring in np.split(order, np.flatnonzero(np.diff(clusters[order])) + 1):
        for place, protein in enumerate(ring.tolist()):
            before, free = [], tokens - int(lengths[protein])
            for member in (*ring[place + 1 :], *ring[:place]):
                if is_copy(member, protein):
                    copies += 1
                elif len(before) == set_size - 1 or (free := free - int(lengths[member])) < 0:
                    break
                else:
                    before.append(int(member))
            sets[protein] = before[::-1]
    return HeldOutSets.of(sets, copies)


def residues_of(
    store: ProteinStore, starts: np.ndarray, lengths: np.ndarray, alphabet: Alphabet, block: int = 4096
) -> list[bytes]:
    """The ids of the residues in tokens [start, start + length) of every record of a store."""
    residues: list[bytes] = []
    for first in range(0, len(store), block):
        here = slice(first, first + block)
        ids, offsets = store.gather(np.arange(len(store))[here], starts[here], lengths[here])
        inner = ~np.isin(ids, alphabet.head + alphabet.tail)
        ids, offsets = ids[inner], np.append(0, np.cumsum(inner))[offsets]
        residues += [ids[a:b].tobytes() for a, b in pairwise(offsets.tolist())]
    return residues


class HeldOutPlan(BatchPlan):
    """Packs of whole `HeldOutSets`, in their order."""

    def __init__(self, store: ProteinStore, sets: HeldOutSets, max_seq_length: int, tokens_per_pack: int):
        sizes = max_seq_length, tokens_per_pack
        super().__init__(store.lengths, len(sets.proteins), EVAL_SEED, *sizes, shuffle=False)
        self.sets = sets

    def _plan_window(self, epoch: int, number: int, as_stored: bool = False) -> Window:
        first, last = self._window_range(number)
        bounds = self.sets.bounds[first : last + 1]
        records = self.sets.records[bounds[0] : bounds[-1]]
        starts, crops = crop(records, self.lengths_of(records), self.seed, epoch, self.max_seq_length)
        return pack_sets(records, starts, crops, bounds - bounds[0], epoch, self.tokens_per_pack, None)


@dataclass(frozen=True)
class LastCollator:
    """Of each set only the last sequence is asked, and masked; those before it are shown as they are."""

    collator: Collator

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        batch = self.collator(pack, ids, step)
        if pack.sets is None:
            return batch
        is_last = np.zeros(len(pack.lengths), bool)
        is_last[pack.sets[1:] - 1] = True
        asked = torch.from_numpy(np.repeat(is_last, pack.lengths))
        batch["input_ids"] = torch.where(asked, batch["input_ids"], torch.from_numpy(ids.astype(np.int64)))
        batch["labels"] = batch["labels"].masked_fill(~asked, IGNORE)
        batch["predicted"] = predicted_positions(batch["labels"])
        batch["num_targets"] = int((batch["labels"] != IGNORE).sum())
        return batch


def losses_with_homologs(
    model: nn.Module,
    store: ProteinStore,
    sets: HeldOutSets,
    tokens: TokenSet,
    flags: DataFlags,
    world: World,
    step: int = 0,
    bf16: bool = False,
    static_shape: bool = False,
) -> ProteinLosses | None:
    """The losses of the hidden residues of the sets' proteins, of a store of n: rows of others are 0. All ranks
    together; None if the run was stopped meanwhile. There must be a set."""
    lengths = np.minimum(store.lengths(sets.records), flags.max_seq_length)
    of_sets = np.diff(np.append(0, np.cumsum(lengths))[sets.bounds])
    capacity = max(flags.held_out_tokens, int(of_sets.max()))
    masks = LastCollator(held_out_masks(flags, tokens))
    filled_to = capacity if static_shape else 0
    collator = rank_batches(masks, flags, world.mesh, tokens.pad, tokens.mask, filled_to, flags.eval_mlm_probability)
    plan = HeldOutPlan(store, sets, flags.max_seq_length, capacity)
    batches = evaluation_batches(store, plan, SetCollator(collator), world.mesh, **flags.loading(world))
    also = SelectedSums(len(store), tokens, world.device)
    return held_out_results(model, batches, world, "homologs", step, bf16, "selected_tokens", also).losses


def losses_by_number(
    model: nn.Module,
    store: ProteinStore,
    clusters: np.ndarray,
    tokens: Alphabet,
    flags: DataFlags,
    world: World,
    numbers: tuple[int, ...] = (0, 1, 2, 4, 8),
    set_tokens: int = 8192,
    bf16: bool = False,
    static_shape: bool = False,
) -> dict[int, ProteinLosses]:
    """{k: losses with exactly k predecessors} of the same proteins: those that have the most of `numbers`.

    set_tokens: most tokens of a set. The nearest k on the ring precede. UserError if no protein has so many.
    """
    sets = held_out_sets(store, clusters, max(numbers) + 1, set_tokens, flags.max_seq_length, tokens)
    of_numbers = {}
    for number in numbers:
        chosen = sets.with_at_least(max(numbers), only=number)
        if not len(chosen.proteins):
            raise UserError(f"no held-out protein has {max(numbers)} others of its cluster in {set_tokens} tokens")
        args = model, store, chosen, tokens, flags, world, 0, bf16, static_shape
        if (losses := losses_with_homologs(*args)) is not None:
            of_numbers[number] = ProteinLosses(losses.loss_sum, losses.masked, clusters)
    return of_numbers


def record_sets(others: dict[str, Any], given: str | None, set_tokens: str | None) -> None:
    """Record the tokens of the longest sets trained on, by this run or its starting weights before; nothing for
    published weights that read sets, of which that is unknown. others: of the configuration; given: the starting
    weights."""
    before = others.pop(TRAINED_SETS, None)
    if type(before) is int or not (given and encoder_family(given).reads_sets):
        others[TRAINED_SETS] = max(SetTokens.of(str(set_tokens)).most, before if type(before) is int else 0)


class WithHomologs:
    """The evaluations of a run with homologs. task: its held-out data have clusters, and its family reads sets."""

    def __init__(self, task: MaskedLM):
        self.task = task
        record_sets(task.built.config.others, task.flags.model.model_name_or_path, task.flags.data.set_tokens)
        self._sets: dict[str, HeldOutSets] = {}  # of splits

    def evaluate(
        self, model: nn.Module, split: str, prefix: str, step: int, alone: ProteinLosses
    ) -> dict[str, Any] | None:
        """Results of the proteins of a split that have a predecessor; {} if none has. All ranks together; None if the
        run was stopped meanwhile. alone: their losses, with clusters."""
        task, flags = self.task, self.task.flags.data
        with task.world.raise_together():
            store = task.data.held_out(split)
            sets = self._sets.get(split) or self._of_split(split, store, alone)
        if not len(sets.proteins):
            return {}
        settings = step, task.bf16, task.built.static_shape
        losses = losses_with_homologs(model, store, sets, task.tokens, flags, task.world, *settings)
        if losses is None:
            return None
        results = gains(sets, alone, losses, prefix)
        logger.info("%s", summary(results, prefix))
        return results

    def _of_split(self, split: str, store: ProteinStore, alone: ProteinLosses) -> HeldOutSets:
        flags = self.task.flags.data
        tokens = SetTokens.of(str(flags.set_tokens)).most
        limits, alphabet = (flags.set_size, tokens, flags.max_seq_length), self.task.tokens
        assert isinstance(alphabet, Alphabet), "a family of proteins as text"
        sets = held_out_sets(store, alone.clusters, *limits, alphabet)
        kept = self._sets[split] = sets.with_at_least(1)
        logger.info(
            "Held-out sets (%s): %s of %s proteins have others of their cluster before them; left out as they are, "
            "are a part of or contain the protein itself: %s",
            *(split, f"{len(kept.proteins):,}", f"{len(store):,}", f"{sets.copies:,}"),
        )
        return kept


def gains(sets: HeldOutSets, alone: ProteinLosses, losses: ProteinLosses, prefix: str) -> dict[str, Any]:
    """Losses of the hidden residues with homologs and alone, and the difference with its standard error over clusters:
    of all proteins of the sets, and by their numbers of predecessors."""
    results: dict[str, Any] = {}
    every = f"{prefix}_loss_masked_with_homologs", f"{prefix}_loss_masked_without_homologs", f"{prefix}_homologs"
    groups = [(1, GROUPS["8_up"][1], every)]
    for name, (first, last) in GROUPS.items():
        part = f"{prefix}_predecessors_{name}"
        groups.append((first, last, (f"{part}_loss_masked", f"{part}_alone_loss_masked", part)))
    for first, last, (with_homologs, without, part) in groups:
        chosen = sets.proteins[(sets.numbers >= first) & (sets.numbers <= last)]
        chosen = chosen[losses.masked[chosen] > 0]
        if not len(chosen):
            continue
        masked = losses.masked[chosen]
        sums = alone.loss_sum[chosen], losses.loss_sum[chosen]
        clusters = None if alone.clusters is None else alone.clusters[chosen]
        gain, error = mean_and_error(sums[0] - sums[1], masked, clusters)
        results |= {with_homologs: float(sums[1].sum() / masked.sum()), without: float(sums[0].sum() / masked.sum())}
        results |= {f"{part}_gain_masked": gain, f"{part}_gain_masked_stderr": error, f"{part}_samples": len(chosen)}
    return {name: value for name, value in results.items() if np.isfinite(value)}


def summary(results: dict[str, Any], prefix: str) -> str:
    """The results of `gains` in a line."""
    parts = []
    for name in GROUPS:
        if (loss := results.get(f"{prefix}_predecessors_{name}_loss_masked")) is not None:
            alone = results[f"{prefix}_predecessors_{name}_alone_loss_masked"]
            parts.append(f"{name.replace('_up', ' and more').replace('_', '-')}: {loss:.4f} ({alone:.4f})")
    if not parts:
        return "No hidden residue in held-out proteins that have homologs before them: no loss"
    return (
        f"Held-out loss behind homologs {results[f'{prefix}_loss_masked_with_homologs']:.4f} (of the same proteins "
        f"alone {results[f'{prefix}_loss_masked_without_homologs']:.4f}); by number of predecessors {', '.join(parts)}"
    )
