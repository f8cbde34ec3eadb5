"""Check that replicas of the weights are still equal: compare a checksum over the ranks that hold the same shard.

Replicas take the same steps from the same all-reduced gradients, so they are bit-identical unless something failed
silently: faulty memory or a faulty GPU on one rank, or a gradient that was not all-reduced.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from common.cli import MachineFault
from common.distributed.world import World

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
_MIX = 0x9E3779B97F4A7C15  # an odd factor, so that positions differ in all bits


class Replicas:
    """model: the weights that the optimiser updates; shards that only one rank holds have nothing to compare with."""

    def __init__(self, model: nn.Module, world: World):
        self.parameters, self.world, self.checked = [*model.parameters()], world, -1

    def check(self, step: int) -> None:
        """MachineFault on all ranks if a rank's weights differ from its replicas'. All ranks together."""
        if self.world.size == 1 or step == self.checked:
            return
        self.checked = step
        digests = self.world.gather((digest(self.parameters), socket.gethostname()))
        fault = None
        if suspects := outliers([sums for sums, _ in digests]):
            names = ", ".join(f"rank {rank} (host {digests[rank][1]})" for rank in suspects)
            fault = MachineFault(
                f"after step {step} the weights of {names} differ from those of their replicas: a fault of memory, "
                "GPU or network there; this state is not saved: run the same command again to resume from the last "
                "checkpoint, without that machine if it happens again"
            )
        self.world.raise_on_all(fault)


def outliers(digests: list[dict]) -> list[int]:
    """Ranks whose digest of a shard differs from the majority's; all of them in a tie."""
    values = defaultdict(dict)
    for rank, sums in enumerate(digests):
        for rows, value in sums.items():
            values[rows][rank] = value
    ranks = set()
    for by_rank in values.values():
        (majority, count), *others = Counter(by_rank.values()).most_common()
        tied = any(number == count for _, number in others)
        ranks |= {rank for rank, value in by_rank.items() if others and (tied or value != majority)}
    return sorted(ranks)


@torch.no_grad()
def digest(parameters: Iterable[Tensor]) -> dict[str, int]:
    """{rows: 64-bit checksum} of this rank's weights, the same on any device.

    rows: the rank's part of the sharded mesh dimensions ("1:3": part 3 of dimension 1), "" if not sharded. One pass
    over the weights, one device synchronisation.
    """
    keys, numbers = [], []
    for parameter in parameters:
        keys.append(_rows(parameter))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # Sum over columns first: a change is missed only if another in the same column cancels it.
        bits = local.detach().contiguous().view(_INTEGERS[local.element_size()]).flatten(1 if local.dim() > 1 else 0)
        sums = bits.sum(0, dtype=torch.int64) if bits.dim() > 1 else bits.long()
        places = 2 * torch.arange(len(sums), device=sums.device) + 1  # empty if the rank has no rows
        numbers.append((sums * (places * (_MIX - (1 << 64)))).sum())
    checksums: dict[str, int] = defaultdict(int)
    for number, (key, value) in enumerate(zip(keys, torch.stack(numbers).tolist(), strict=True)):
        checksums[key] = (checksums[key] + value * (2 * number + 1)) % (1 << 64)
    return dict(checksums)


def _rows(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return ""
    where, mesh = parameter.placements, parameter.device_mesh.get_coordinate()
    return ",".join(f"{n}:{mesh[n]}" for n, placement in enumerate(where) if isinstance(placement, Shard))
