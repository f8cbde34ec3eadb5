"""What strategies choose for the machines that they find: sharding by nodes, the size of DDP's buckets."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from common.distributed.fsdp import default_sharding
from common.distributed.strategy import default_bucket_mb
from extras.plan.dry_run.memory_estimate import FakeWorld

GB = 10**9


@pytest.mark.parametrize(
    ("ranks", "node", "state", "memory", "strategy"),
    [
        (16, 8, 160 * GB, 80 * GB, "hybrid"),  # 20 GB a GPU
        (16, 8, 161 * GB, 80 * GB, "full"),
        (8, 8, 10 * GB, 80 * GB, "full"),  # one node
        (16, 8, 10 * GB, None, "full"),  # CPUs
        (12, 8, 10 * GB, 80 * GB, "full"),  # nodes that are not alike
        (16, 1, 20 * GB, 80 * GB, "hybrid"),
    ],
)
def test_default_sharding_is_hybrid_where_a_node_holds_the_state(ranks, node, state, memory, strategy):
    world = FakeWorld(0, 0, ranks, torch.device("cpu"), local_size=node)
    assert default_sharding(world, state, memory) == strategy


def test_default_sharding_is_full_on_nodes_of_different_gpus():
    world = FakeWorld(0, 0, 16, torch.device("cpu"), local_size=8)
    for other in ((8, 40 * GB), (4, 80 * GB)):
        with patch.object(FakeWorld, "gather", lambda self, value, other=other: [value] * 8 + [other] * 8):
            assert default_sharding(world, 10 * GB, 80 * GB) == "full"


def test_default_bucket_grows_with_the_ranks():
    assert [default_bucket_mb(ranks) for ranks in (1, 8, 16, 32, 512)] == [25, 25, 50, 100, 100]
