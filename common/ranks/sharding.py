"""Models and parameters that may be sharded or replicated: what is asked of them in one way whatever they are."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
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


def gradient_sync(model: nn.Module, last: bool):
    """A context for one micro-batch: gradients are exchanged with the last one of a step only.

    Until then a sharded model holds whole gradients in fp32; those of one with `sync_each_batch` stay sharded.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or model.sync_each_batch)
        return nullcontext()
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward pass: what was gathered for it is let go."""
    if isinstance(model, FSDPModule):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
