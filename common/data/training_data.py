"""The data of a run: batches from a position on, the number of steps, the identity of the data, held-out proteins.

`PreparedData` reads the splits that step 1 wrote (`--dataset_dir`). Files given as they are (`--dataset`,
`--eval_dataset`) are extras.prepare.sources.streamed_data, imported where one of these flags is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.cli import UserError
from common.data import TokenSet
from common.data.clusters import cluster_numbers, clusters_to_draw
from common.data.collators import Collator, FillingCollator, MaskingCollator, MaskRates
from common.data.flags import BatchFlags, DataFlags, ProteinFlags
from common.data.loader import Order, PlannedOrder, ProteinStore, Store, evaluation_batches
from common.data.packing import BatchPlan, Position
from common.data.packs_per_step import PacksPerStep, uneven
from common.data.token_store import TokenStore, open_for_model
from common.distributed.world import Mesh, World
from common.hooks import extra
from common.shape_buckets import most_predicted, sequences_of_packs

logger = logging.getLogger(__name__)
MOST_ABOVE = 1.25  # tokens of a step, of --tokens_per_step, before that is warned of

EVAL_SEED = 0  # evaluation masks depend neither on --seed nor on the step


class TrainingData(Protocol):
    """What a run needs of its data, prepared or streamed."""

    identity: dict  # of the data and their order: a checkpoint's position is valid only for the same identity
    extends: tuple[str, ...]  # identities ("dataset") of earlier data whose records these begin with
    end: Position | None  # where the run ends; None: after --max_steps
    sources: Sequence[str]  # of a mixture, else empty
    row_fields: Sequence[Any]  # of a mixture: `Field`s of the logged row

    @property
    def num_examples(self) -> int | None:
        """Examples in an epoch; None for streams."""

    def total_steps(self, packs_per_step: PacksPerStep, step: int, position: dict) -> int:
        """Optimiser steps of the whole run, of which `step` led to `position`."""

    def finished(self, step: int, position: dict) -> bool:
        """Whether a run at this step and position has nothing left to do."""

    def check_packs(self, saved: PacksPerStep, packs_per_step: PacksPerStep) -> None:
        """UserError if a checkpoint written with `saved` packs a step cannot resume with these."""

    def check_ranks(self, packs_per_step: PacksPerStep, dp_size: int) -> None:
        """UserError, or a warning, if the ranks cannot share each step's packs evenly."""

    def order(self, packs_per_step: PacksPerStep) -> Order:
        """The packs of the run, `packs_per_step` a step."""

    def held_out(self, split: str) -> Store | None:
        """The store of "validation", "test" or a set of --eval_dataset; None if it is absent or empty."""

    def epochs(self, sequences: int) -> float:
        """Epochs after this many sequences, of all ranks and since the run began."""


class ProteinData(TrainingData, Protocol):
    """Data of proteins. flags: their `eval_sets` are evaluated."""

    flags: ProteinFlags

    def held_out(self, split: str) -> ProteinStore | None:
        """The proteins of "validation", "test" or a set of --eval_dataset; None if there are none."""

    def clusters(self, split: str) -> np.ndarray | None:
        """The cluster of each held-out protein, int64 [n]; None where the data have none."""

    def sample(self) -> ProteinStore:
        """Training proteins that the baselines are fitted on."""


class PlannedData:
    """Data in the order of a batch plan. Subclasses set these."""

    sources: Sequence[str] = ()
    row_fields: Sequence[Any] = ()

    max_steps: int
    plan: BatchPlan
    num_examples: int  # of an epoch
    end: Position | None  # None: after --max_steps
    extends: tuple[str, ...] = ()

    def total_steps(self, packs_per_step: PacksPerStep, step: int, position: dict) -> int:
        """See BatchPlan.count for what is exact: the run ends where its data do (`finished`), which may be a few
        steps off for more than 192 windows."""
        if self.end is None:
            return self.max_steps
        return step + packs_per_step.steps_for(self.plan.count(Position(**position), self.end), step)

    def finished(self, step: int, position: dict) -> bool:
        return step >= self.max_steps if self.end is None else Position(**position) >= self.end

    def check_packs(self, saved: PacksPerStep, packs_per_step: PacksPerStep) -> None:
        """Any number: a position in a batch plan does not depend on it."""

    def check_ranks(self, packs_per_step: PacksPerStep, dp_size: int) -> None:
        """Any number: ranks without a pack in a step get an empty one."""
        if warning := uneven(packs_per_step, dp_size):
            logger.warning("%s", warning)

    def epochs(self, sequences: int) -> float:
        return sequences / self.num_examples


class PreparedData(PlannedData):
    """The splits of a --dataset_dir.

    read: opens the proteins of a set of --eval_dataset.
    """

    def __init__(
        self, flags: ProteinFlags, tokens: TokenSet, read: Callable[[str], ProteinStore | None] | None = None
    ):
        self.flags, self.tokens, self._read = flags, tokens, read
        assert flags.dataset_dir is not None  # the flags say so, without --dataset
        self.directory = Path(flags.dataset_dir)
        self.store = open_for_model(self.directory, "train", tokens, flags.max_train_samples)
        self.extends = self.store.extends
        self.identity = {
            "dataset": self.store.fingerprint,
            "seed": flags.seed,
            "max_seq_length": flags.max_seq_length,
            **flags.pack_size,
        }
        self.plan, self.sampling = self._plan_packs(self.directory / "train")
        self.num_examples, self.max_steps = self.plan.num_drawn, flags.max_steps
        self.end = None if flags.max_steps > 0 else self.plan.position_at(flags.num_train_epochs)

    def _plan_packs(self, train: Path) -> tuple[BatchPlan, str]:
        """The plan, and a line about what it draws. Adds that to `identity`."""
        flags = self.flags
        if flags.set_tokens is not None:
            plan, of_sets, sampling = extra().set_plan(flags, self.store, train)
            self.identity |= of_sets
            return plan, sampling
        clusters, sampling = clusters_to_draw(train, len(self.store), flags.sample_clusters)
        if clusters and flags.sample_clusters_exponent:
            clusters, sampling = extra().weighted_clusters(clusters, flags.sample_clusters_exponent)
        if clusters:
            self.identity["sample_clusters"] = clusters.content[:16]
        sizes = flags.seed, flags.max_seq_length
        return BatchPlan(self.store.lengths, len(self.store), *sizes, **flags.pack_size, clusters=clusters), sampling

    def order(self, packs_per_step: PacksPerStep) -> Order:
        logger.info("Sampling %s", self.sampling)
        return PlannedOrder(self.store, self.plan, packs_per_step, self.end)

    def held_out(self, split: str) -> ProteinStore | None:
        if split in self.flags.eval_sets and self._read:
            return self._read(split)
        if not (self.directory / split).is_dir():
            return None
        try:
            return open_for_model(self.directory, split, self.tokens, self.flags.max_eval_samples)
        except UserError as error:
            if "empty" in str(error):
                return None
            raise

    def clusters(self, split: str) -> np.ndarray | None:
        store = self.held_out(split)
        if split in self.flags.eval_sets or store is None:
            return None
        return cluster_numbers(self.directory / split, len(store))

    def check_validation(self) -> None:
        """UserError unless there are proteins to evaluate on."""
        if self.flags.eval_sets:
            check_eval_sets(self, self.flags)
        elif not (self.directory / "validation").is_dir():
            raise UserError(
                f"{self.directory}: no validation split to evaluate on: give --eval_dataset, or drop --do_eval"
            )
        else:  # raises if the split is empty
            open_for_model(self.directory, "validation", self.tokens, self.flags.max_eval_samples)

    def sample(self) -> TokenStore:
        return self.store


def check_eval_sets(data: ProteinData, flags: ProteinFlags) -> None:
    """UserError unless each set of --eval_dataset has a protein."""
    for name, proteins in flags.eval_sets.items():
        if data.held_out(name) is None:
            raise UserError(f"--eval_dataset {proteins}: no protein in it")


Makers = dict[str, Callable[[], Path]]  # built-in names of --dataset, and what writes their files


def open_data(
    flags: ProteinFlags, tokens: TokenSet, world: World, evaluate: bool, makers: Makers | None = None
) -> ProteinData:
    """The data of a run; collective. UserError if they cannot be trained on or, with `evaluate`, evaluated on."""
    if flags.dataset or flags.eval_dataset or flags.dataset_mix:
        return extra().open_files(flags, tokens, world, evaluate, makers or {})
    with world.raise_together():
        data = PreparedData(flags, tokens)
        if evaluate:
            data.check_validation()
    return data


def packs_per_step(flags: BatchFlags, mesh: Mesh, pack_tokens: int, saved: int | str | None = None) -> PacksPerStep:
    """Packs in a global step: the flag, else what the checkpoint has, else as many as each rank accumulates.

    pack_tokens: of a pack, for --tokens_per_step. `TrainingData.check_ranks` checks that the ranks can share them.
    """
    if packs := flags.packs_per_step_schedule or flags.packs_per_step or saved:
        return PacksPerStep.of(packs)
    if flags.tokens_per_step is None:
        return PacksPerStep.of(mesh.dp_size * flags.gradient_accumulation_steps)
    packs = mesh.dp_size * max(1, round(flags.tokens_per_step / (mesh.dp_size * pack_tokens)))
    if packs * pack_tokens > MOST_ABOVE * flags.tokens_per_step:
        _warn_of_large_steps(packs * pack_tokens, flags.tokens_per_step, flags.tokens_per_step // mesh.dp_size)
    return PacksPerStep.of(packs)


@cache
def _warn_of_large_steps(tokens: int, asked: int, share: int) -> None:
    logger.warning(
        "A step has %s tokens, not the %s of --tokens_per_step: as many ranks need packs of %s (--tokens_per_pack)",
        *(f"{number:,}" for number in (tokens, asked, share)),
    )


def masked_batches(
    flags: DataFlags, tokens: TokenSet, mesh: Mesh, total_steps: int = 1, static_shape: bool = False
) -> Collator:
    """The collator of a rank for masked language modelling: of whole packs, or of its slices of them.

    total_steps: of the run; static_shape: fills all batches up to the same shape (`FillingCollator`).
    """
    if flags.objective == "mdlm":
        return extra().diffusion_batches(flags, tokens, mesh, static_shape)
    replaced = flags.mask_replace_prob, flags.random_replace_prob
    rates = MaskRates(flags.mlm_probability, *replaced, flags.mlm_probability_end, total_steps)
    collator = with_linkers(MaskingCollator(tokens, flags.seed, rates), tokens)
    filled_to = flags.pack_tokens if static_shape else 0
    collator = rank_batches(collator, flags, mesh, tokens.pad, tokens.mask, filled_to, flags.mlm_probability)
    return extra().set_batches(collator) if flags.set_tokens is not None else collator


def with_linkers(collator: MaskingCollator, tokens: TokenSet) -> MaskingCollator:
    """The collator, for records with linkers where a model's chains have them."""
    return extra().chains().LinkedBatches(collator, tokens) if tokens.chains == "linker" else collator


def held_out_masks(flags: DataFlags, tokens: TokenSet) -> MaskingCollator:
    """The masks of evaluations: the same residues whatever a run trains with. Of those that are predicted but not
    hidden, half are replaced and half stay, as in BERT."""
    hidden = flags.eval_mask_replace_prob
    rates = MaskRates(flags.eval_mlm_probability, hidden, (1 - hidden) / 2)
    return with_linkers(MaskingCollator(tokens, EVAL_SEED, rates), tokens)


def evaluation_masks(flags: DataFlags, tokens: TokenSet, mesh: Mesh, static_shape: bool = False) -> Collator:
    """Fixed seed and rate: every evaluation masks the same residues."""
    filled_to = flags.held_out_tokens if static_shape else 0
    asked = held_out_masks(flags, tokens)
    return rank_batches(asked, flags, mesh, tokens.pad, tokens.mask, filled_to, flags.eval_mlm_probability)


def rank_batches(
    collator: Collator,
    flags: BatchFlags,
    mesh: Mesh,
    pad: int,
    mask: int = -1,
    filled_to: int = 0,
    predicted: float = 0.0,
) -> Collator:
    """`collator` if a rank has packs of its own, else the collator of its slices. pad, mask: ids of tokens, mask -1 if
    there is none.

    filled_to: the tokens of a pack, of which a fraction `predicted` at most is predicted, to fill all batches up to
    one shape; 0: they are as long as their data.
    """
    if mesh.cp_size > 1:
        return extra().cp_batches(collator, flags, mesh, pad, mask, filled_to, predicted)
    return filled(collator, flags, pad, filled_to, predicted) if filled_to else collator


def filled(
    collator: Collator, flags: BatchFlags, pad: int, tokens: int, predicted: float, sequences: int | None = None
) -> FillingCollator:
    """Fills all batches up to one shape. tokens, predicted: as `rank_batches`; sequences: in a batch, default: as many
    as packs of so many tokens have."""
    sequences = sequences or sequences_of_packs(tokens, flags.max_seq_length)
    most_positions = most_predicted(tokens, predicted)
    return FillingCollator(collator, tokens, sequences, flags.max_seq_length, most_positions, pad)


def held_out_batches(flags: ProteinFlags, store: ProteinStore, collator: Collator, world: World) -> Generator:
    """This rank's batches of all proteins of a held-out store."""
    size: dict[str, Any] = {"sequences_per_pack": flags.per_device_eval_batch_size}
    if flags.packing:  # results do not depend on the size
        size = {"tokens_per_pack": flags.held_out_tokens}
    plan = BatchPlan(store.lengths, len(store), EVAL_SEED, flags.max_seq_length, **size, shuffle=False)
    return evaluation_batches(store, plan, collator, world.mesh, **flags.loading(world))
