"""From the flags to batches: the stores of a dataset directory, their plans, collators and loaders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from common.cli import UserError
from common.collators import PackedCollator, PaddedCollator
from common.distributed import World
from common.loader import EvalLoader, TrainLoader, check_divisible
from common.packing import BatchPlan, Position
from common.token_store import TokenStore, open_split

EVAL_SEED = 0  # masks of an evaluation never change: not with --seed, not between two evaluations


@dataclass
class TrainData:
    """The training split and its plan. `identity` is what a position in the plan is only valid for."""

    store: TokenStore
    plan: BatchPlan
    identity: dict


def open_training(args) -> TrainData:
    store = open_split(args.dataset_dir, "train", args.max_train_samples)
    size = _pack_size(args, args.per_device_train_batch_size)
    plan = BatchPlan(store.lengths, len(store), args.seed, args.max_seq_length, **size)
    identity = {"dataset": store.fingerprint, "seed": args.seed, "max_seq_length": args.max_seq_length, **size}
    return TrainData(store, plan, identity)


def total_steps(args, plan: BatchPlan, packs_per_step: int) -> int:
    """Optimiser steps of the whole run. Exact up to a million proteins, estimated from 64 windows beyond."""
    if args.max_steps > 0:
        return args.max_steps
    return max(1, -(-int(args.num_train_epochs * plan.packs_per_epoch()) // packs_per_step))


def packs_per_step(args, world: World, saved: int | None) -> int:
    """Packs of a global step: the flag, else what the run was started with, else what the ranks take at once."""
    packs = args.packs_per_step or saved or world.size * args.gradient_accumulation_steps
    check_divisible(packs, world.size)
    return packs


def training_loader(
    args, data: TrainData, world: World, packs: int, step: int, position: Position, last_step: int
) -> TrainLoader:
    return TrainLoader(
        data.store,
        data.plan,
        _collator(args, args.seed),
        packs,
        dp_rank=world.rank,
        dp_size=world.size,
        start=(step, position),
        num_steps=max(0, last_step - step),
        num_workers=args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        pin_memory=args.dataloader_pin_memory and world.device.type == "cuda",
    )


def require_validation(args) -> None:
    """UserError unless there is a validation split with a protein in it."""
    if not (Path(args.dataset_dir) / "validation").is_dir():
        raise UserError(f"{args.dataset_dir}: no validation split to evaluate on: drop --do_eval")
    open_split(args.dataset_dir, "validation", args.max_eval_samples)


def evaluation_loader(args, split: str, world: World) -> tuple[EvalLoader, int] | None:
    """(loader, number of proteins), or None when the split is empty or absent."""
    if not (Path(args.dataset_dir) / split).is_dir():
        return None
    try:
        store = open_split(args.dataset_dir, split, args.max_eval_samples)
    except UserError as error:
        if "empty" in str(error):
            return None
        raise
    size = {"sequences_per_pack": args.per_device_eval_batch_size}
    if args.packing:  # nothing of the result depends on the size
        size = {"tokens_per_pack": args.per_device_eval_batch_size * args.max_seq_length}
    plan = BatchPlan(store.lengths, len(store), EVAL_SEED, args.max_seq_length, **size, shuffle=False)
    loader = EvalLoader(store, plan, _collator(args, EVAL_SEED), dp_rank=world.rank, dp_size=world.size)
    return loader, len(store)


def to_device(batch: dict, device: torch.device) -> dict:
    """The model's inputs of a batch, on the device; counts stay behind. On the CPU nothing is copied."""
    names = ("input_ids", "labels", "attention_mask", "cu_seqlens", "max_seqlen")
    return {
        name: batch[name].to(device, non_blocking=True) if isinstance(batch[name], torch.Tensor) else batch[name]
        for name in names
        if name in batch
    }


def _pack_size(args, sequences: int) -> dict:
    if not args.packing:
        return {"sequences_per_pack": sequences}
    return {"tokens_per_pack": args.tokens_per_pack}


def _collator(args, seed: int) -> PackedCollator | PaddedCollator:
    if args.packing:
        return PackedCollator(seed, args.max_seq_length, args.mlm_probability)
    return PaddedCollator(seed, args.max_seq_length, args.mlm_probability, pad_to_max_length=args.pad_to_max_length)
