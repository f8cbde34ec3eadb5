"""Context parallelism of batches: a rank's slices of the sequences of a pack.

The ranks of a group build the same batch and each keeps its slices of it: no communication.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.data.collators import IGNORE, Batch, Collator
from common.data.crops import Pack
from common.data.flags import BatchFlags
from common.data.training_data import filled
from common.distributed.world import Mesh
from common.shape_buckets import predicted_positions, sequences_of_packs
from extras.speed.context_parallel import CpPack, CpSplit

ON_HOST = ("bounds", "real")  # of a CpPack: the host reads them


def cp_pack(batch: Batch, device: torch.device) -> CpPack:
    """The `CpPack` of a rank's slices, for the model."""
    tables: Any = batch
    values: dict[str, Tensor] = {field.name: tables[f"cp_{field.name}"] for field in fields(CpPack)}
    moved = {name: value.to(device, non_blocking=True) for name, value in values.items() if name not in ON_HOST}
    return CpPack(**values | moved)


def cp_batches(
    collator: Collator, flags: BatchFlags, mesh: Mesh, pad: int, mask: int, filled_to: int, predicted: float
) -> Collator:
    """A collator of this rank's slices of the batches of `collator`.

    pad, mask: ids of tokens, mask -1 if there is none; filled_to: the tokens of a whole pack, of which a fraction
    `predicted` at most is predicted, to fill all batches up to one shape; 0: they are as long as their data.
    """
    multiple = 1  # a contiguous share is not padded
    if flags.cp_layout == "dual_chunk":
        multiple = flags.pad_sequences_to_be_divisible_by or 2 * mesh.cp_size
    collator = SlicingCollator(collator, mesh, flags.cp_layout, multiple, pad, mask)
    if not filled_to:
        return collator
    sequences = sequences_of_packs(filled_to, flags.max_seq_length)
    # A contiguous share is rounded up, a sequence in chunks is padded by less than the multiple.
    more = mesh.cp_size if flags.cp_layout == "contiguous" else multiple - 1
    tokens = -(-(filled_to + sequences * more) // mesh.cp_size)
    return FilledSlices(filled(collator, flags, pad, tokens, predicted, sequences))


class SlicingCollator:
    """One rank's slices of the batches of `collator` (context parallelism).

    layout, multiple: of `CpSplit`; pad: token id of the filler; mask: of `<mask>`, which is counted by sequence, -1
    for a model without one. A rank without a token of a pack gets a `<pad>` that belongs to no sequence. Sums of the
    counts over all ranks count a pack once: a rank counts its own tokens, the first rank of a group the sequences.
    """

    def __init__(self, collator: Collator, mesh: Mesh, layout: str, multiple: int, pad: int, mask: int = -1):
        self.collator, self.mesh, self.layout, self.multiple = collator, mesh, layout, multiple
        self.pad, self.mask = pad, mask

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        batch, rank = self.collator(pack, ids, step), self.mesh.cp_rank
        starts = batch["cu_seqlens"].numpy().astype(np.int64)
        lengths = np.diff(starts)
        slices = CpSplit(lengths, self.mesh.cp_size, self.layout, self.multiple)
        positions, sequences, bounds = slices.positions(rank), slices.sequences(rank), slices.bounds()
        real = positions < lengths[sequences]
        places = (starts[sequences] + positions)[real]
        tokens = max(1, len(positions))

        def slice_of(values: Tensor, filler: int) -> Tensor:
            sliced = np.full(tokens, filler, dtype=values.numpy().dtype)
            sliced[: len(real)][real] = values.numpy()[places]
            return torch.from_numpy(sliced)

        labels = slice_of(batch["labels"], IGNORE)
        of_sequences = np.append(bounds[rank], tokens) if tokens > len(positions) else bounds[rank]
        masks = np.add.reduceat(batch["input_ids"].numpy() == self.mask, starts[:-1], dtype=np.int64)
        first = rank == 0
        sliced: Any = {
            "input_ids": slice_of(batch["input_ids"], self.pad),
            "labels": labels,
            "cu_seqlens": torch.from_numpy(of_sequences.astype(np.int32)),
            "max_seqlen": batch["max_seqlen"],
            "num_targets": int((labels != IGNORE).sum()),
            "num_tokens": len(places) if batch["num_tokens"] else 0,
            "sum_squared_lengths": batch["sum_squared_lengths"] * first,
            "num_sequences": batch["num_sequences"] * first,
            "num_unknown": batch["num_unknown"] * first,
            "cp_positions": torch.from_numpy(np.pad(positions, (0, tokens - len(positions)))),
            "cp_bounds": torch.from_numpy(bounds),
            "cp_real": torch.from_numpy(slices.real()),
            "cp_lengths": torch.from_numpy(lengths),
            "cp_masks": torch.from_numpy(masks),
            "cp_targets": batch["num_targets"],
        }
        if "predicted" in batch:
            sliced["predicted"] = predicted_positions(labels)
        if "weights" in batch:
            sliced["weights"] = slice_of(batch["weights"], 0)
            sliced["num_targets"] = int(sliced["weights"].count_nonzero())
        of_whole: Any = {name: batch.get(name) for name in ("mask_ratio", "source", "records") if name in batch}
        return sliced | of_whole


@dataclass(frozen=True)
class FilledSlices:
    """Fills the tables of `collator`'s batches, a `FillingCollator`'s, up to the batches' shape: the fillers are this
    rank's own, and in no shared sequence."""

    collator: Collator

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        full: Any = self.collator(pack, ids, step)
        fillers = len(full["input_ids"]) - len(full["cp_positions"])
        empty = len(full["cu_seqlens"]) - 1 - len(full["cp_lengths"])
        last = full["cp_bounds"][:, -1:].expand(-1, empty)
        full["cp_positions"] = F.pad(full["cp_positions"], (0, fillers))
        full["cp_bounds"] = torch.cat((full["cp_bounds"], last), 1)
        for name in ("cp_real", "cp_lengths", "cp_masks"):
            full[name] = F.pad(full[name], (0, empty))
        return full
