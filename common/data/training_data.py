"""What a run trains on: a split that step 1 prepared (`--dataset_dir`), or files read as they are (`--dataset`).

Both kinds answer the trainer's questions alike: what is the identity that a position belongs to, how many steps are
there, the batches from a position on, and the held-out proteins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path

from common.cli import UserError
from common.data.collators import Collator
from common.data.flags import DataFlags, StepFlags
from common.data.loader import Order, PlannedOrder, evaluation_batches
from common.data.packing import BatchPlan, Position
from common.data.token_store import TokenStore, open_split
from common.distributed.world import Mesh, World
from extras.prepare.clusters import open_clusters
from extras.sources.dataset import (
    Content,
    File,
    Source,
    check_same_files,
    held_out_files,
    open_source,
    proteins,
    with_contents,
)
from extras.sources.stream_reader import MemoryStore, check_columns, count_records
from extras.sources.streams import LONG_PROTEIN, StreamedOrder, plan_streams

logger = logging.getLogger(__name__)

HELD_OUT_RECORDS = 10_000  # of a source that is not prepared: read into memory, unless --max_eval_samples says else
SAMPLE_RECORDS = 20_000  # of such a source, that the unigram predictor is fitted on
SAMPLE_TOKENS = SAMPLE_RECORDS * LONG_PROTEIN  # or fewer records: files may begin with the longest proteins
EVAL_SEED = 0  # masks of an evaluation never change: not with --seed, not between two evaluations


class FromPlan:
    """Data in the order of a plan: how a run of `flags` that ends at `end` (None: with a step) goes through `plan`."""

    flags: StepFlags
    plan: BatchPlan
    end: Position | None

    def total_steps(self, packs_per_step: int, step: int, position: dict) -> int:
        """Optimiser steps of the whole run, of which `step` led to `position`; see BatchPlan.count for what is exact.

        The run ends where its data do (`finished`), which beyond that may be a few steps off.
        """
        if self.end is None:
            return self.flags.max_steps
        return step - (-self.plan.count(Position(**position), self.end) // packs_per_step)

    def finished(self, step: int, position: dict) -> bool:
        """Whether a run that has taken so many steps and stands there has nothing left to do."""
        return step >= self.flags.max_steps if self.end is None else Position(**position) >= self.end

    def check_packs(self, saved: int, packs_per_step: int) -> None:
        """A position in a batch plan is one for any number of packs a step."""


class FromStreams:
    """Data in the order of streams, which nobody has counted: a run ends with its --max_steps."""

    num_examples = None
    end = None

    def __init__(self, flags: StepFlags):
        self.flags = flags

    def total_steps(self, packs_per_step: int, step: int, position: dict) -> int:
        return self.flags.max_steps

    def finished(self, step: int, position: dict) -> bool:
        return step >= self.flags.max_steps

    def check_packs(self, saved: int, packs_per_step: int) -> None:
        """UserError where a checkpoint's position, of `saved` packs a step, is none for so many."""
        if saved != packs_per_step:
            raise UserError(
                f"--packs_per_step {packs_per_step}: the checkpoint stands in streams of the data for {saved} packs a "
                "step, of which another number would skip or repeat some: drop the flag, or give that number"
            )


class PreparedData(FromPlan):
    """The splits of a --dataset_dir, in the order of a batch plan.

    validation: files to evaluate on in place of the validation split (--eval_dataset).
    """

    def __init__(self, flags: DataFlags, validation: tuple[File, ...] = ()):
        self.flags = flags
        self._files = HeldOutFiles({"validation": validation} if validation else {}, flags.max_eval_samples)
        self.store = open_split(flags.dataset_dir, "train", flags.max_train_samples)
        self.identity = {
            "dataset": self.store.fingerprint,
            "seed": flags.seed,
            "max_seq_length": flags.max_seq_length,
            **flags.pack_size,
        }
        clusters = None
        if flags.sample_clusters:
            clusters = open_clusters(Path(flags.dataset_dir) / "train", len(self.store))
            self.identity["sample_clusters"] = clusters.content[:16]
        self.plan = BatchPlan(
            self.store.lengths, len(self.store), flags.seed, flags.max_seq_length, **flags.pack_size, clusters=clusters
        )
        self.num_examples = self.plan.num_drawn  # of an epoch
        # Where the run ends; None: with a step, wherever that stands.
        self.end = None if flags.max_steps > 0 else self.plan.position_at(flags.num_train_epochs)

    def earlier_identity(self) -> dict:
        """As in the checkpoints of earlier versions."""
        return {"dataset": self.store.earlier_fingerprint, "sample_clusters": True}

    def order(self, packs_per_step: int) -> Order:
        """The packs of the run, so many a step."""
        return PlannedOrder(self.store, self.plan, packs_per_step, self.end)

    def held_out(self, split: str) -> TokenStore | MemoryStore | None:
        """The store of "validation" or "test"; None where the split is absent or empty."""
        if split in self._files:
            return self._files.read(split)
        if not (Path(self.flags.dataset_dir) / split).is_dir():
            return None
        try:
            return open_split(self.flags.dataset_dir, split, self.flags.max_eval_samples)
        except UserError as error:
            if "empty" in str(error):
                return None
            raise

    def sample(self) -> TokenStore:
        """Training proteins to fit residue frequencies on."""
        return self.store


class HeldOutFiles:
    """Files that nobody prepared, by split; of each the first proteins are read into memory, once."""

    def __init__(self, splits: dict[str, tuple[File, ...]], max_records: int | None):
        self.splits, self.max_records = splits, max_records or HELD_OUT_RECORDS
        self._stores: dict[str, MemoryStore | None] = {}

    def __contains__(self, split: str) -> bool:
        return split in self.splits

    def read(self, split: str) -> MemoryStore | None:
        """None where the split is absent or has no protein."""
        if split not in self._stores:
            files = self.splits.get(split)
            store = MemoryStore.read(files, self.max_records) if files else None
            self._stores[split] = store if store is not None and len(store) else None
            if store is not None and (unknown := store.unknown())[0]:
                logger.warning(
                    "%s: %s characters in %s records are no residues: <unk>", split, *(f"{n:,}" for n in unknown)
                )
        return self._stores[split]


class StreamedData(FromStreams):
    """A source that nobody prepared, in the order of its streams.

    records: in an epoch, about (`count_records`).
    """

    def __init__(self, flags: DataFlags, source: Source, records: int):
        super().__init__(flags)
        self.source, self.records = source, max(1, records)
        self.packing = {**flags.pack_size, "seed": flags.seed, "max_seq_length": flags.max_seq_length}
        self.identity = {"dataset": source.identity("train")} | self.packing
        self._files = HeldOutFiles(source.splits, flags.max_eval_samples)

    def epochs(self, sequences: int) -> float:
        """Epochs that so many proteins, of all ranks and since the run began, make."""
        return sequences / self.records

    def earlier_identity(self) -> dict:
        """As in the checkpoints of earlier versions."""
        return {"dataset": self.source.earlier_identity("train")[:16]}

    def order(self, packs_per_step: int) -> Order:
        plan = plan_streams(self.source.splits["train"], packs_per_step, **self.packing)
        counts = (self.source.name, len(plan.units), plan.num_streams)
        logger.info("Streaming %s: files or row groups: %d, streams: %d", *counts)
        return StreamedOrder(plan, packs_per_step)

    def held_out(self, split: str) -> MemoryStore | None:
        return self._files.read(split)

    def sample(self) -> MemoryStore:
        return MemoryStore.read(self.source.splits["train"], SAMPLE_RECORDS, SAMPLE_TOKENS)


TrainingData = PreparedData | StreamedData
Makers = dict[str, Callable[[], Path]]  # a --dataset that is no path, and what writes its files and says where


def open_data(flags: DataFlags, world: World, evaluate: bool, makers: Makers | None = None) -> TrainingData:
    """The data of a run; all ranks call together. UserError if they cannot be trained, or `evaluate`d, on.

    One rank finds, or makes, the files of a --dataset for all: a Hub counts its requests.
    """
    source, records = None, 0
    with world.on_main_rank() as is_main:
        if is_main and (source := find_source(flags, makers)) and flags.dataset:
            records = count_records(source.splits["train"])
            source = with_contents(source, "train")
    source, records = world.broadcast_object((source and source.to_json(), records))
    source = source and Source.from_json(source)
    with world.raise_together():
        if source and world.local_rank == 0:
            check_same_files(source)
        data = open_training(flags, source, records)
        if evaluate:
            _check_held_out(flags, data, source)
    return data


def find_source(flags: DataFlags, makers: Makers | None = None) -> Source | None:
    """The files of --dataset, if given, and as its validation split those of --eval_dataset; None without both."""
    source, content = None, proteins(flags.max_record_length)
    if flags.dataset:
        source = _find_dataset(flags, makers or {}, content)
    if flags.eval_dataset:
        held_out = open_source(flags.eval_dataset, flags.streaming, "--eval_dataset", content).splits
        files = held_out.get("validation") or held_out.get("test") or held_out["train"]
        source = source or Source(flags.eval_dataset, {})
        source = Source(source.name, source.splits | {"validation": files}, source.revision)
    elif source and len(source.splits) > 1:
        logger.info("--dataset %s: held out by their names: %s", flags.dataset, held_out_files(source))
    # A file of the wrong kind is found before anything is written.
    for files in source.splits.values() if source else ():
        check_columns(files)
        if not flags.streaming:
            MemoryStore.read(files[:1], max_records=1)
    return source


def _find_dataset(flags: DataFlags, makers: Makers, content: Content) -> Source:
    dataset, make = flags.dataset, makers.get(flags.dataset)
    if make and Path(dataset).exists():
        raise UserError(f"--dataset {dataset}: built in, but ./{dataset} is here, too: rename it, or say ./{dataset}")
    return open_source(str(make()) if make else dataset, flags.streaming, content=content)


def open_training(flags: DataFlags, source: Source | None = None, records: int = 0) -> TrainingData:
    """The data to train on; `source` is what find_source gave, with so many records."""
    if flags.dataset:
        return StreamedData(flags, source, records)
    return PreparedData(flags, source.splits["validation"] if source else ())


def _check_held_out(flags: DataFlags, data: TrainingData, source: Source | None) -> None:
    if flags.eval_dataset:
        if data.held_out("validation") is None:
            raise UserError(f"--eval_dataset {flags.eval_dataset}: no protein in it")
    elif source is None:
        if not (Path(flags.dataset_dir) / "validation").is_dir():
            raise UserError(
                f"{flags.dataset_dir}: no validation split to evaluate on: give --eval_dataset, or drop --do_eval"
            )
        open_split(flags.dataset_dir, "validation", flags.max_eval_samples)  # says so if there is no protein in it
    elif "validation" not in source.splits:
        raise UserError(
            f"--dataset {flags.dataset}: no validation files in it: give --eval_dataset, or drop --do_eval"
        )


def packs_per_step(flags: StepFlags, mesh: Mesh, saved: int | None) -> int:
    """Packs of a global step: the flag, else what the run was started with, else what the ranks take at once.

    Whether the ranks can share them is a question for `check_divisible`, once there is a step to take.
    """
    return flags.packs_per_step or saved or mesh.dp_size * flags.gradient_accumulation_steps


def held_out_batches(flags: DataFlags, store, collator: Collator, world: World) -> Generator:
    """This rank's batches of all proteins of a held-out store."""
    size = {"sequences_per_pack": flags.per_device_eval_batch_size}
    if flags.packing:  # nothing of the result depends on the size
        size = {"tokens_per_pack": flags.per_device_eval_batch_size * flags.max_seq_length}
    plan = BatchPlan(store.lengths, len(store), EVAL_SEED, flags.max_seq_length, **size, shuffle=False)
    return evaluation_batches(store, plan, collator, world.mesh, **flags.loading(world.device))
