"""One process in the place of rank 0 of many: its mesh and groups are those of the run, and nothing is exchanged.

With tensors that have no values (common.training.live_bytes) a strategy deals a model out as it would, on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks.world import World


class RehearsedWorld(World):
    """Rank 0 of `size`, which agrees with itself: the others would say the same.

    lent: what is entered there (stand-ins for a device, say) is left as the rehearsal ends.
    """

    rehearsed = True
    lent: ExitStack

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
        with ExitStack() as world.lent:
            world.share_packs(cp_size)
            yield world
    finally:
        dist.destroy_process_group()
