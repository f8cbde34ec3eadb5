"""One process in the place of rank 0 of many: its mesh and groups are those of the run, and nothing is exchanged.

With tensors that have no values (common.training.live_bytes) a strategy deals a model out as it would, on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.ranks.world import World


class RehearsedWorld(World):
    """Rank 0 of `size`, which agrees with itself: the others would say the same."""

    rehearsed = True

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def share(self, value):
        return value

    def gather(self, value, group: dist.ProcessGroup | None = None) -> list:
        return [value] * self.size

    def gather_to_main(self, value, group: dist.ProcessGroup | None = None) -> list:
        return [value] * self.size

    def end_together(self, failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
        if failure is not None:
            raise failure


@contextmanager
def rehearsal(size: int, cp_size: int = 1) -> Iterator[RehearsedWorld]:
    """The world of a run on `size` ranks, in this process alone. UserError as `World.share_packs`."""
    # Registers the backend "fake" (torch 2.11 to 2.13), whose collectives return at once.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = RehearsedWorld(0, 0, size, torch.device("cpu"), local_size=size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        world.share_packs(cp_size)
        yield world
    finally:
        dist.destroy_process_group()


def exchange_nothing(model: nn.Module) -> None:
    """Have replicas take their own gradients for the average: a collective without values has no result to await."""
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, _own)


def _own(_, bucket):  # torch looks at annotations, and wants them unquoted
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
