"""The flags of a dry run: what a run on so many ranks would hold, without a GPU and without data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.cli import Flags, Missing, flag


@dataclass
class DryRunFlags(Flags):
    group = "dry run"
    rarely = ("device_reserve",)

    dry_run: bool = flag(
        False, "Train nothing: print what each of --world_size ranks would hold in memory, without GPUs or data."
    )
    world_size: int | None = flag(None, "With --dry_run: the number of ranks. Default: 1.")
    device_memory: float | None = flag(
        None, "With --dry_run: GiB of memory of a device (H100: 80). Does it fit, and how large a pack would?"
    )
    device_reserve: float = flag(
        5.0, "GiB of --device_memory that are left to the CUDA context, NCCL and the allocator's gaps."
    )

    @property
    def does_without(self) -> tuple[str, ...]:
        return ("--dataset_dir", "--dataset", "--max_steps", "--output_dir") if self.dry_run else ()

    @property
    def state_on_host(self) -> bool:
        """Whether weights, gradients and moments are kept in host memory: a strategy's flags may say so."""
        return False

    def missing(self) -> Iterator[Missing]:
        if not self.dry_run and (self.world_size or self.device_memory):
            yield Missing("--dry_run", "--world_size and --device_memory go with it: torchrun starts real ranks")

    def check(self) -> None:
        self.require_at_least(1, "world_size")
        self.require_above(0, "device_memory")
        self.require_at_least(0, "device_reserve")
