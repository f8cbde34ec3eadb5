"""From a pack and its tokens to a batch of tensors: sequences end to end, with their boundaries, no padding.

A batch carries the counts that the loss, the FLOPs and the log need, as Python integers (`Counts`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from common.batches.masking import IGNORE, mask_tokens
from common.batches.windows import Pack
from common.cli import UserError
from common.files.alphabet import PAD, UNK
from common.layers.shapes import predicted_positions
from common.ranks.slices import SharedPack

Batch = dict[str, torch.Tensor | int]
INPUTS = ("input_ids", "labels", "predicted", "attention_mask", "cu_seqlens", "max_seqlen", "pad_to")  # of a model
SHARED = {f"shared_{name}": name for name in SharedPack._fields}  # and of one that shares its packs


class Counts(NamedTuple):
    """What batches hold, by the batches' own keys."""

    num_masked: int  # labels that are not -100
    num_tokens: int
    sum_squared_lengths: int
    num_sequences: int
    num_unknown: int = 0  # tokens that stand for a character that is no residue

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> Counts:
        """Summed over batches."""
        batches = list(batches)
        return cls(*(sum(batch[key] for batch in batches) for key in cls._fields))


class MaskingCollator:
    """Masked language modelling: some residues hidden, which the labels ask for.

    seed, mlm_probability: of the masks; pad_to: tokens that the model is to compute at least, fillers included.
    """

    def __init__(self, seed: int, mlm_probability: float = 0.15, pad_to: int = 0):
        if not 0 <= mlm_probability <= 1:
            raise UserError(f"the masking probability lies between 0 and 1, not {mlm_probability}")
        self.seed, self.mlm_probability, self.pad_to = seed, mlm_probability, pad_to

    def __call__(self, pack: Pack, ids: np.ndarray) -> Batch:
        """The batch of a pack of B sequences whose tokens are `ids` uint8 [T].

        input_ids int64 [T], labels int64 [T], predicted int64 [P] (`predicted_positions` of them), cu_seqlens int32
        [B + 1], max_seqlen and pad_to int and the counts. A pack without a sequence gives one `<pad>`, with all counts
        zero and no label: every rank can run its forward pass (sharded models need all of them to) and it adds nothing
        to any sum.
        """
        input_ids, labels = mask_tokens(
            ids, pack.records, pack.starts, pack.lengths, self.seed, pack.epoch, self.mlm_probability
        )
        masked = int(np.count_nonzero(labels != IGNORE))
        unknown = int(np.count_nonzero(ids == UNK))
        counts = Counts(masked, len(ids), int((pack.lengths**2).sum()), len(pack.lengths), unknown)
        lengths = pack.lengths
        if len(ids) == 0:
            lengths = np.array([1])
            input_ids, labels = np.array([PAD]), np.array([IGNORE])
        cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu_seqlens[1:])
        labels = torch.from_numpy(labels)
        return {
            "input_ids": torch.from_numpy(input_ids.astype(np.int64)),
            "labels": labels,
            "predicted": predicted_positions(labels),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
            "max_seqlen": int(lengths.max()),
            "pad_to": self.pad_to,
            **counts._asdict(),
        }


def to_device(batch: Batch, device: torch.device) -> dict:
    """The model's inputs of a batch, on the device; counts stay behind. On the CPU nothing is copied."""

    def moved(name: str):
        value = batch[name]
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    inputs = {name: moved(name) for name in INPUTS if name in batch}
    if all(key in batch for key in SHARED):
        on_host = ("bounds", "real")  # where they are read
        inputs["shared"] = SharedPack(
            **{name: batch[key] if name in on_host else moved(key) for key, name in SHARED.items()}
        )
    return inputs
