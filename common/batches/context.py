"""Packs that ranks share: each builds the same pack and keeps its slices of the sequences. Nothing is handed out."""

from __future__ import annotations

import numpy as np
import torch

from common.batches.collators import SHARED, Batch, MaskingCollator
from common.batches.flags import DataFlags
from common.batches.loader import Collator
from common.batches.masking import IGNORE
from common.batches.step_flags import StepFlags
from common.batches.windows import Pack
from common.files.alphabet import MASK, PAD
from common.layers.shapes import predicted_positions
from common.ranks.slices import SharedPack, Slices
from common.ranks.world import Mesh


class SlicingCollator:
    """One rank's slices of the batches that `collator` makes.

    mesh: whose; layout, multiple: of `Slices`. A rank that has no token of a pack gets a `<pad>`, which is of no
    sequence. Counts are the rank's own, so that their sums over all ranks count a pack once: tokens are those that it
    has, and the first rank of a group counts the sequences.
    """

    def __init__(self, collator: Collator, mesh: Mesh, layout: str, multiple: int):
        self.collator, self.mesh, self.layout, self.multiple = collator, mesh, layout, multiple

    def __call__(self, pack: Pack, ids: np.ndarray) -> Batch:
        batch, rank = self.collator(pack, ids), self.mesh.cp_rank
        starts = batch["cu_seqlens"].numpy().astype(np.int64)
        lengths = np.diff(starts)
        slices = Slices(lengths, self.mesh.cp_size, self.layout, self.multiple)
        positions, sequences, bounds = slices.positions(rank), slices.sequences(rank), slices.bounds()
        real = positions < lengths[sequences]
        places = (starts[sequences] + positions)[real]
        tokens = max(1, len(positions))

        def own(values: torch.Tensor, filler: int) -> np.ndarray:
            mine = np.full(tokens, filler, dtype=np.int64)
            mine[: len(real)][real] = values.numpy()[places]
            return mine

        input_ids, labels = own(batch["input_ids"], PAD), torch.from_numpy(own(batch["labels"], IGNORE))
        predicted = {"predicted": predicted_positions(labels)} if "predicted" in batch else {}
        of_sequences = np.append(bounds[rank], tokens) if tokens > len(positions) else bounds[rank]
        first = rank == 0
        masks = np.add.reduceat(batch["input_ids"].numpy() == MASK, starts[:-1], dtype=np.int64)
        shared = SharedPack(np.pad(positions, (0, tokens - len(positions))), bounds, slices.real(), lengths, masks)
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": labels,
            **predicted,
            "cu_seqlens": torch.from_numpy(of_sequences.astype(np.int32)),
            "max_seqlen": batch["max_seqlen"],
            "num_masked": int((labels != IGNORE).sum()),
            "num_tokens": len(places) if batch["num_tokens"] else 0,
            "sum_squared_lengths": batch["sum_squared_lengths"] * first,
            "num_sequences": batch["num_sequences"] * first,
            "num_unknown": batch["num_unknown"] * first,
            **{key: torch.from_numpy(getattr(shared, name)) for key, name in SHARED.items()},
        }


def masked_batches(flags: DataFlags, seed: int, mesh: Mesh, pad_to: int = 0) -> Collator:
    """What makes a rank's batches for masked language modelling: whole packs, or its slices of them.

    pad_to: of `MaskingCollator`; slices, whose sum it would not be, are not filled up to it.
    """
    return shared_batches(MaskingCollator(seed, flags.mlm_probability, pad_to), flags, mesh)


def shared_batches(collator: Collator, flags: StepFlags, mesh: Mesh) -> Collator:
    """`collator` itself where a rank has packs of its own, else what makes its slices of the batches."""
    if mesh.cp_size == 1:
        return collator
    multiple = 1 if flags.cp_layout == "contiguous" else flags.pad_sequences_to_be_divisible_by or 2 * mesh.cp_size
    return SlicingCollator(collator, mesh, flags.cp_layout, multiple)
