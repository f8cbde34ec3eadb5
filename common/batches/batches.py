"""From the flags to batches: sizes of packs, collators, evaluation batches, the way to the device."""

from __future__ import annotations

import torch

from common.batches.collators import PackedCollator, PaddedCollator
from common.batches.loader import EvalLoader, check_divisible
from common.batches.packing import BatchPlan
from common.ranks.world import World

EVAL_SEED = 0  # masks of an evaluation never change: not with --seed, not between two evaluations


def pack_size(args, sequences: int) -> dict:
    """The size of a pack of training, as BatchPlan and StreamPlan take it."""
    if not args.packing:
        return {"sequences_per_pack": sequences}
    return {"tokens_per_pack": args.tokens_per_pack}


def packs_per_step(args, world: World, saved: int | None) -> int:
    """Packs of a global step: the flag, else what the run was started with, else what the ranks take at once."""
    packs = args.packs_per_step or saved or world.size * args.gradient_accumulation_steps
    check_divisible(packs, world.size)
    return packs


def collator(args, seed: int) -> PackedCollator | PaddedCollator:
    if args.packing:
        return PackedCollator(seed, args.max_seq_length, args.mlm_probability)
    return PaddedCollator(seed, args.max_seq_length, args.mlm_probability, pad_to_max_length=args.pad_to_max_length)


def evaluation_loader(args, store, world: World) -> EvalLoader:
    """This rank's batches of all proteins of a held-out store."""
    size = {"sequences_per_pack": args.per_device_eval_batch_size}
    if args.packing:  # nothing of the result depends on the size
        size = {"tokens_per_pack": args.per_device_eval_batch_size * args.max_seq_length}
    plan = BatchPlan(store.lengths, len(store), EVAL_SEED, args.max_seq_length, **size, shuffle=False)
    return EvalLoader(store, plan, collator(args, EVAL_SEED), dp_rank=world.rank, dp_size=world.size)


def to_device(batch: dict, device: torch.device) -> dict:
    """The model's inputs of a batch, on the device; counts stay behind. On the CPU nothing is copied."""
    names = ("input_ids", "labels", "attention_mask", "cu_seqlens", "max_seqlen")
    return {
        name: batch[name].to(device, non_blocking=True) if isinstance(batch[name], torch.Tensor) else batch[name]
        for name in names
        if name in batch
    }
