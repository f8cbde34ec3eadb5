"""Parameters that may be sharded: which rows are here, and the whole of one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter, to be written to, and the number of the first. A plain tensor is all here.

    `fully_shard` deals dimension 0 in chunks of equal size, the last one shorter (torch.chunk); a rank may get none.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    rows = parameter.shape[0]
    first = 0
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "only rows are dealt"
            size = parameter.device_mesh.size(dimension)
            first = min(rows, -(-rows // size) * parameter.device_mesh.get_coordinate()[dimension])
    return parameter.to_local(), first


@torch.no_grad()
def copy_rows(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter to a value, of which this rank takes its own rows."""
    local, first = local_rows(parameter)
    local.copy_(whole[first : first + len(local)])


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, gathered from the ranks (all call together) where it is sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
