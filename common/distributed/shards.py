"""Shards of parameters: which rows of a parameter this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local_shard(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's rows of a parameter (writable) and the index of the first. A plain tensor is not sharded.

    `fully_shard` splits dimension 0 as torch.chunk does: equal chunks, the last one shorter or empty. Parameters that
    are split otherwise have a `first_row`.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    if (first := getattr(parameter, "first_row", None)) is not None:
        return parameter.to_local(), first
    rows = parameter.shape[0]
    first = 0
    for dimension, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "only rows are sharded"
            mesh = parameter.device_mesh
            first = min(rows, -(-rows // mesh.size(dimension)) * mesh.get_local_rank(dimension))
    return parameter.to_local(), first


@torch.no_grad()
def copy_to_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor into a parameter."""
    local, first = local_shard(parameter)
    local.copy_(full[first : first + len(local)])
