"""What a run trains on: a split that step 1 prepared (`--dataset_dir`), or files read as they are (`--dataset`).

Both kinds answer the trainer's questions alike: what is the identity that a position belongs to, how many steps are
there, the batches from a position on, what a checkpoint must keep, and the held-out proteins.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from common.batches.batches import collator, pack_size
from common.batches.loader import TrainLoader, TrainStep
from common.batches.packing import BatchPlan, Position
from common.batches.stream_loader import StreamLoader, merge_positions, plan_streams
from common.cli import UserError
from common.files.clusters import open_clusters
from common.files.sources import Source, open_source
from common.files.stream_reader import MemoryStore
from common.files.token_store import TokenStore, open_split
from common.ranks.world import World

logger = logging.getLogger(__name__)

HELD_OUT_RECORDS = 10_000  # of a source that is not prepared: read into memory, unless --max_eval_samples says else
SAMPLE_RECORDS = 20_000  # of such a source, that the unigram predictor is fitted on


class PreparedData:
    """The splits of a --dataset_dir, in the order of a batch plan."""

    def __init__(self, args):
        self.args = args
        self.store = open_split(args.dataset_dir, "train", args.max_train_samples)
        size = pack_size(args, args.per_device_train_batch_size)
        self.identity = {"dataset": self.store.fingerprint, "seed": args.seed, "max_seq_length": args.max_seq_length}
        self.identity |= size
        clusters = None
        if args.sample_clusters:
            clusters = open_clusters(Path(args.dataset_dir) / "train", len(self.store))
            self.identity["sample_clusters"] = True
        self.plan = BatchPlan(
            self.store.lengths, len(self.store), args.seed, args.max_seq_length, **size, clusters=clusters
        )
        self.num_examples = len(self.store)

    def total_steps(self, packs_per_step: int) -> int:
        """Optimiser steps of the whole run. Exact up to a million proteins, estimated from 64 windows beyond."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return max(1, -(-int(self.args.num_train_epochs * self.plan.packs_per_epoch()) // packs_per_step))

    def steps(self, world: World, packs: int, step: int, position: dict, last_step: int) -> Iterator[TrainStep]:
        """This rank's share of the steps from number `step` on, which begins at `position`, up to `last_step`."""
        start = (step, Position(**position))
        where = {"dp_rank": world.rank, "dp_size": world.size, "start": start}
        common = _loading(self.args, world, step, last_step)
        return TrainLoader(self.store, self.plan, collator(self.args, self.args.seed), packs, **where, **common)

    @staticmethod
    def position_after(share: TrainStep) -> dict:
        """What the trainer's state keeps of a step, as plain values."""
        return asdict(share.position)

    @staticmethod
    def position_of_all(position: dict, world: World) -> dict:
        """The position for a checkpoint; all ranks call together."""
        return position

    def held_out(self, split: str) -> TokenStore | None:
        """The store of "validation" or "test"; None where the split is absent or empty."""
        if not (Path(self.args.dataset_dir) / split).is_dir():
            return None
        try:
            return open_split(self.args.dataset_dir, split, self.args.max_eval_samples)
        except UserError as error:
            if "empty" in str(error):
                return None
            raise

    def sample(self) -> TokenStore:
        """Training proteins to fit residue frequencies on."""
        return self.store


class StreamedData:
    """A source that nobody prepared, in the order of its streams."""

    num_examples = None  # nobody has counted

    def __init__(self, args, source: Source):
        if args.max_steps <= 0:
            raise UserError("--max_steps is missing: a --dataset has no length known beforehand")
        self.args, self.source = args, source
        self.packing = pack_size(args, args.per_device_train_batch_size)
        self.packing |= {"seed": args.seed, "max_seq_length": args.max_seq_length}
        listing = repr(source.identity("train")).encode()
        self.identity = {"dataset": hashlib.sha256(listing).hexdigest()[:16]} | self.packing
        self._held_out: dict[str, MemoryStore | None] = {}

    def total_steps(self, packs_per_step: int) -> int:
        return self.args.max_steps

    def steps(self, world: World, packs: int, step: int, position: dict, last_step: int) -> Iterator[TrainStep]:
        plan = plan_streams(self.source.splits["train"], packs, **self.packing)
        counts = (self.source.name, len(plan.units), plan.num_streams)
        logger.info("Streaming %s: files or row groups: %d, streams: %d", *counts)
        where = {"dp_rank": world.rank, "dp_size": world.size, "first_step": step, "position": position}
        common = _loading(self.args, world, step, last_step)
        return StreamLoader(plan, collator(self.args, self.args.seed), packs, **where, **common)

    @staticmethod
    def position_after(share: TrainStep) -> dict:
        return share.position

    @staticmethod
    def position_of_all(position: dict, world: World) -> dict:
        if world.size == 1:
            return position
        gathered: list[dict] = [{}] * world.size
        dist.all_gather_object(gathered, position)
        return merge_positions(gathered)

    def held_out(self, split: str) -> MemoryStore | None:
        if split not in self._held_out:
            files = self.source.splits.get(split)
            store = MemoryStore.read(files, self.args.max_eval_samples or HELD_OUT_RECORDS) if files else None
            self._held_out[split] = store if store is not None and len(store) else None
        return self._held_out[split]

    def sample(self) -> MemoryStore:
        return MemoryStore.read(self.source.splits["train"], SAMPLE_RECORDS)


TrainingData = PreparedData | StreamedData


def find_source(args) -> Source | None:
    """The files of --dataset and, in place of its own validation split, those of --eval_dataset; None without."""
    if not args.dataset:
        return None
    source = open_source(args.dataset, args.streaming)
    if args.eval_dataset:
        held_out = open_source(args.eval_dataset, args.streaming)
        files = held_out.splits.get("validation") or held_out.splits["train"]
        source = Source(source.name, source.splits | {"validation": files}, source.revision)
    for files in source.splits.values():
        if not args.streaming:
            MemoryStore.read(files[:1], max_records=1)  # a file of the wrong kind is found before anything is written
    return source


def open_training(args, source: Source | None = None) -> TrainingData:
    """The data of a run; `source` is what find_source gave, on one rank for all (a Hub counts its requests).

    UserError if they cannot be trained on, or not be evaluated on with --do_eval.
    """
    data = PreparedData(args) if source is None else StreamedData(args, source)
    if args.do_eval and source is None:
        if not (Path(args.dataset_dir) / "validation").is_dir():
            raise UserError(f"{args.dataset_dir}: no validation split to evaluate on: drop --do_eval")
        open_split(args.dataset_dir, "validation", args.max_eval_samples)  # says so if there is no protein in it
    if args.do_eval and source is not None and "validation" not in source.splits:
        raise UserError(f"--dataset {args.dataset}: no validation files in it: give --eval_dataset, or drop --do_eval")
    return data


def _loading(args, world: World, step: int, last_step: int) -> dict:
    return {
        "num_steps": max(0, last_step - step),
        "num_workers": args.dataloader_num_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "pin_memory": args.dataloader_pin_memory and world.device.type == "cuda",
    }
