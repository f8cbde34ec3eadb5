"""FSDP2 (`fully_shard`): weights, gradients and optimiser state sharded by rows; and meshes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from common.cli import UserError
from common.compat import set_group_timeout
from common.distributed.strategy import Strategy
from common.distributed.world import World


class FullySharded(Strategy):
    """FSDP2. sync_each_batch: reduce-scatter gradients after every micro-batch; else each rank keeps full fp32
    gradients until a step's last one."""

    def __init__(self, model: nn.Module, sync_each_batch: bool = False):
        super().__init__(model)
        self.sync_each_batch = sync_each_batch
        parameter = next(model.parameters())
        assert isinstance(model, FSDPModule), "fully_shard comes first"
        assert isinstance(parameter, DTensor)
        self.sharded: FSDPModule = model
        mesh = parameter.device_mesh
        self.device, self.shard_group = mesh.device_type, mesh["shard"].get_group()
        if mesh.ndim > 1:
            self.replica_group = mesh["replicate"].get_group()

    def micro_batch(self, last: bool) -> AbstractContextManager:
        self.sharded.set_requires_gradient_sync(last or self.sync_each_batch)
        return nullcontext()

    def gradients(self) -> list[Tensor]:
        return [g.to_local() if isinstance(g, DTensor) else g for g in super().gradients()]

    def sum_over_shards(self, total: Tensor) -> Tensor:
        total = total.to(self.device)  # gradients may be on the host
        dist.all_reduce(total, group=self.shard_group)
        return total

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def default_sharding(world: World, state: int, memory: int | None) -> str:
    """`hybrid` where the ranks fill several nodes, each of which can hold a copy of the state; else `full`.

    state: bytes of all weights, gradients and moments, of which a GPU's share is to leave three quarters of its
    memory to activations; memory: bytes of this rank's GPU, if it has one. All ranks together. It rests on a model of
    the network (extras/plan/step_model/communication.py): no GPU has measured it.
    """
    nodes = world.gather((world.local_size, memory))
    node, memory = nodes[0]
    alike = all(other == nodes[0] for other in nodes) and world.size % node == 0
    fits = memory is not None and state / node <= memory / 4
    return "hybrid" if alike and fits and world.size > node and world.cp_size == 1 else "full"


def hsdp_shape(world: World, shard_size: int) -> tuple[int, int]:
    """(replicas, ranks that shard one copy: consecutive ranks). UserError if --hsdp_shard_size does not fit."""
    if shard_size < 1 or world.size % shard_size:
        fitting = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
        raise UserError(f"--hsdp_shard_size {shard_size} does not divide {world.size} ranks: choose {fitting}")
    return world.size // shard_size, shard_size


def init_mesh(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of all ranks, in order, whose groups have --ddp_timeout. A collective."""
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    set_group_timeouts(world, mesh)
    return mesh


def set_group_timeouts(world: World, mesh: DeviceMesh) -> None:
    """torch gives a mesh's groups its own timeout (10 minutes with NCCL, 30 with gloo) and takes no other."""
    if not world.is_dry_run:
        for group in mesh.get_all_groups():
            set_group_timeout(group, timedelta(seconds=world.timeout_s))
