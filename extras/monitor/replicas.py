"""Do replicas of the weights still agree? A number of all their bits, compared over the ranks that hold the same rows.

Replicas take the same steps from the same sums, so they agree to the bit, or something has gone wrong without a word:
memory or a GPU that computes wrongly on one rank, or a gradient that was not exchanged.
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

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number: where its bits fit
_PLACE = 0x9E3779B97F4A7C15  # an odd number: multiplied by it, places differ in all their bits


class Replicas:
    """The weights of one rank; `model` as it is updated. Sharded over all ranks nothing is replicated."""

    def __init__(self, model: nn.Module, world: World):
        self.parameters, self.world, self.checked = [*model.parameters()], world, -1

    def check(self, step: int) -> None:
        """MachineFault, on all ranks together, if after `step` a rank's weights are not those of its replicas."""
        if self.world.size == 1 or step == self.checked:
            return
        self.checked = step
        everyone = self.world.gather((digest(self.parameters), socket.gethostname()))
        fault = None
        if odd := outliers([found for found, _ in everyone]):
            names = ", ".join(f"rank {rank} (host {everyone[rank][1]})" for rank in odd)
            fault = MachineFault(
                f"after step {step} the weights of {names} are not those of the ranks that hold the same ones: a "
                "fault of memory, GPU or network there; nothing is saved of it: the same command goes on from the "
                "last checkpoint, without that machine if it comes again"
            )
        self.world.raise_on_all(fault)


def outliers(digests: list[dict]) -> list[int]:
    """Ranks whose digest of some rows is not the one that most ranks have; of two that differ, both."""
    values = defaultdict(dict)
    for rank, found in enumerate(digests):
        for rows, value in found.items():
            values[rows][rank] = value
    odd = set()
    for of_rows in values.values():
        (usual, count), *others = Counter(of_rows.values()).most_common()
        tied = any(number == count for _, number in others)
        odd |= {rank for rank, value in of_rows.items() if others and (tied or value != usual)}
    return sorted(odd)


@torch.no_grad()
def digest(parameters: Iterable[Tensor]) -> dict[str, int]:
    """{rows: a number of 64 bits} of what this rank holds; equal weights give equal numbers on any device.

    rows: which part of the sharded dimensions ("1:3": part 3 of the mesh's dimension 1), "" of what is not sharded.
    One pass over the weights, one wait for the device.
    """
    keys, numbers = [], []
    for parameter in parameters:
        keys.append(_rows(parameter))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # Sums over columns first: a change is missed only where another one in the same column undoes it.
        bits = local.detach().contiguous().view(_INTEGERS[local.element_size()]).flatten(1 if local.dim() > 1 else 0)
        sums = bits.sum(0, dtype=torch.int64) if bits.dim() > 1 else bits.long()
        places = 2 * torch.arange(len(sums), device=sums.device) + 1  # none where a rank has no rows
        numbers.append((sums * (places * (_PLACE - (1 << 64)))).sum())
    found: dict[str, int] = defaultdict(int)
    for number, (key, value) in enumerate(zip(keys, torch.stack(numbers).tolist(), strict=True)):
        found[key] = (found[key] + value * (2 * number + 1)) % (1 << 64)
    return dict(found)


def _rows(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return ""
    where, mesh = parameter.placements, parameter.device_mesh.get_coordinate()
    return ",".join(f"{n}:{mesh[n]}" for n, placement in enumerate(where) if isinstance(placement, Shard))
