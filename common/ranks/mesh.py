"""How ranks lie on a mesh when weights are dealt out to them."""

from __future__ import annotations

from common.cli import UserError
from common.ranks.world import World


def replicas_and_shards(world: World, shard_size: int) -> tuple[int, int]:
    """(groups that replicate each other, ranks that share one copy), the latter neighbours in rank. UserError where
    `shard_size` (--hsdp_shard_size) does not divide the ranks."""
    if shard_size < 1 or world.size % shard_size:
        fitting = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
        raise UserError(f"--hsdp_shard_size {shard_size} does not divide {world.size} ranks: choose {fitting}")
    return world.size // shard_size, shard_size
