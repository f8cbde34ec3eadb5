"""How ranks lie on a mesh when weights are dealt out to them."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from common.cli import UserError
from common.ranks.world import World


def replicas_and_shards(world: World, shard_size: int) -> tuple[int, int]:
    """(groups that replicate each other, ranks that share one copy), the latter neighbours in rank. UserError where
    `shard_size` (--hsdp_shard_size) does not divide the ranks."""
    if shard_size < 1 or world.size % shard_size:
        fitting = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
        raise UserError(f"--hsdp_shard_size {shard_size} does not divide {world.size} ranks: choose {fitting}")
    return world.size // shard_size, shard_size


def mesh_of(world: World, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """All ranks, in order, in this shape; its groups wait for each other as long as --ddp_timeout says. All ranks
    together."""
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    wait_as_told(world, mesh)
    return mesh


def wait_as_told(world: World, mesh: DeviceMesh) -> None:
    """Torch gives the groups of a mesh a timeout of its own (ten minutes with NCCL, half an hour with gloo) and has no
    argument for another."""
    if not world.rehearsed:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timedelta(seconds=world.timeout_s), group)
