"""Loader workers forked beside a model on the GPU, under DDP and FSDP2 over NCCL: five starts and ends."""

from __future__ import annotations

import pytest
import torch

from tests.data.test_workers import fork_beside_models
from tests.training_fixtures import on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_worker_destroys_nothing_that_it_inherits(sharded):
    codes, said = on_ranks(1, fork_beside_models, sharded, "cuda", 5)
    assert codes == [0], "\n".join(said)
