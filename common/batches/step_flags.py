"""The flags by which data of any kind become steps: how much a step takes, how many there are, who prepares them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.cli import Flags, UserError, flag


@dataclass
class StepFlags(Flags):
    group = "batches"
    rarely = ("cp_layout", "pad_sequences_to_be_divisible_by", "dataloader_prefetch_factor", "dataloader_pin_memory")

    cp_layout: str = flag(
        "dual_chunk",
        "With --cp_size: each rank has two chunks of a sequence (dual_chunk), or one run of it, without padding "
        "(contiguous; torch backend).",
    )
    pad_sequences_to_be_divisible_by: int | None = flag(
        None, "With dual_chunk: pad each sequence to a multiple of this. Default: 2 x --cp_size."
    )
    dataloader_num_workers: int = flag(
        1, "Processes that prepare batches, an evaluation's too; the batches do not depend on it."
    )
    dataloader_prefetch_factor: int = flag(4, "Steps that each worker prepares ahead.")
    dataloader_pin_memory: bool = flag(True, "Pinned host memory for faster copies to the GPU.")

    seed: int = flag(42, "Everything random follows from it: weights, order, crops, masks.")
    num_train_epochs: float = flag(3.0, "Passes over the training split.")
    max_steps: int = flag(-1, "Optimiser steps; overrides --num_train_epochs.")
    per_device_train_batch_size: int = flag(8, "Sequences in a batch; scales a pack when packing.")
    per_device_eval_batch_size: int = flag(8, "The same for evaluation.")
    gradient_accumulation_steps: int = flag(1, "Packs (batches) a rank adds up before an optimiser step.")
    packs_per_step: int | None = flag(
        None, "Packs (batches) in a global step. Default: ranks x --gradient_accumulation_steps. Kept on resume."
    )

    instead_of = {"num_train_epochs": ("max_steps",)}

    def loading(self, device: torch.device) -> dict[str, int | bool]:
        """Who prepares batches for this device, and how far ahead: what loaders of any data are told."""
        return {
            "num_workers": self.dataloader_num_workers,
            "prefetch_factor": self.dataloader_prefetch_factor,
            "pin_memory": self.dataloader_pin_memory and device.type == "cuda",
        }

    def check(self) -> None:
        self.require_at_least(0, "dataloader_num_workers")
        self.require_at_least(
            1,
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("packs_per_step", "dataloader_prefetch_factor"),
        )
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise UserError("nothing to train: --max_steps and --num_train_epochs are both zero or below")
