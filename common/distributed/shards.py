"""Shards of parameters: which rows of a parameter this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def local_shard(parameter: Any) -> tuple[Tensor, int]:
    """This rank's rows of a parameter (writable) and the index of the first. A tensor that is no DTensor is whole.

    `fully_shard` splits dimension 0 as torch.chunk does: equal chunks, the last one shorter or empty. Parameters that
    are split otherwise have a `first_row`.
    """
    if not hasattr(parameter, "placements"):  # DTensor's own module takes longer to import than a small model to run
        return parameter, 0
    if (first := getattr(parameter, "first_row", None)) is not None:
        return parameter.to_local(), first
    rows, mesh, first = parameter.shape[0], parameter.device_mesh, 0
    for dimension, placement in enumerate(parameter.placements):
        if placement.is_shard():
            assert placement.dim == 0, "only rows are sharded"
            first = min(rows, -(-rows // mesh.size(dimension)) * mesh.get_local_rank(dimension))
    return parameter.to_local(), first


@torch.no_grad()
def copy_to_shard(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of a full tensor into a parameter."""
    local, first = local_shard(parameter)
    local.copy_(full[first : first + len(local)])
