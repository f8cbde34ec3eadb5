"""Replicas of the weights that have gone apart end the run, and are named."""

from __future__ import annotations

import re
import socket

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.training.step_monitor import digest, outliers
from tests.live_runs import newest_step
from tests.training_fixtures import _main, flags_of, on_ranks

HYBRID = {"script": "train_fsdp2.py", "sharding_strategy": "hybrid", "hsdp_shard_size": 2}
REPLICATED = {"script": "train_mfsdp.py", "zero_dp_strategy": "no_shard"}
FLAGS = {"max_steps": 8, "save_final_model": False}


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((64, 48), (64, 48), (48,), (3, 5, 7))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return [*tensors, tensors[0].bfloat16(), tensors[2].double()]


def test_digest_changes_with_every_bit_and_position():
    before = digest(weights())
    assert before == digest(weights())
    assert before.keys() == {""}
    for number, tensor in enumerate(weights()):
        integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        for element in (0, tensor.numel() // 2, tensor.numel() - 1):
            for bit in (0, 3, 8 * tensor.element_size() - 2):
                changed = weights()
                changed[number].view(integer).flatten()[element] ^= 1 << bit
                assert digest(changed) != before, (number, element, bit)
    exchanged = weights()
    exchanged[0], exchanged[1] = exchanged[1], exchanged[0]
    assert digest(exchanged) != before
    turned = weights()
    turned[2] = turned[2].flip(0)
    assert digest(turned) != before
    up_and_down = weights()  # one element up by a bit, its neighbour down: the sum of all bits is the same
    up_and_down[2].view(torch.int32)[:2] += torch.tensor([1, -1], dtype=torch.int32)
    assert digest(up_and_down) != before


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([{"": 1}, {"": 1}, {"": 1}], []),
        ([{"": 1}, {"": 2}, {"": 1}], [1]),
        ([{"": 2}, {"": 1}], [0, 1]),
        ([{"0:0": 1}, {"0:1": 2}], []),  # each holds other rows
        ([{"0:0": 1}, {"0:1": 2}, {"0:0": 1}, {"0:1": 3}], [1, 3]),
        ([{"": 7, "0:0": 1}, {"": 7, "0:1": 2}, {"": 8, "0:0": 1}], [2]),
    ],
)
def test_outliers_of_digests(digests, odd):
    assert outliers(digests) == odd


def _main_with_a_flipped_bit(argv: list[str], script: str, step: int, rank: int) -> None:
    """After a step, one bit of one weight is another on one rank: none that the next update may round away."""
    steps = 0

    def flip(optimizer, *_) -> None:
        nonlocal steps
        steps += 1
        if steps == step and torch.distributed.get_rank() == rank:
            weight = optimizer.param_groups[0]["params"][1].detach()
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.view(torch.int32)[0, 0] ^= 1 << 20

    register_optimizer_step_post_hook(flip)
    _main(argv, script)


@pytest.mark.parametrize(
    ("nproc", "rank", "named", "flags"),
    [
        (2, 1, [0, 1], {}),
        (3, 2, [2], {}),
        pytest.param(4, 2, [0, 2], HYBRID, marks=pytest.mark.slow),
        pytest.param(2, 1, [0, 1], REPLICATED, marks=pytest.mark.slow),
    ],
    ids=["ddp", "ddp-3", "hsdp", "mfsdp"],
)
def test_replicas_check_names_ranks_that_diverge(dataset, tmp_path, nproc, rank, named, flags):
    """Found at the comparison of the ranks, and before a checkpoint: none is saved of them."""
    flags = dict(flags)
    script = flags.pop("script", "train_ddp.py")
    for found_at, often in ((4, {"straggler_every": 4}), (6, {"straggler_every": 0, "save_steps": 6})):
        out = tmp_path / str(found_at)
        argv = flags_of(dataset, out, packs_per_step=12, per_device_train_batch_size=1, **FLAGS | flags | often)
        codes, said = on_ranks(nproc, _main_with_a_flipped_bit, argv, script, 3, rank)
        assert codes == [1] * nproc, said
        (error,) = [line for text in said for line in text.splitlines() if line.startswith("error: ")]
        assert f"after step {found_at} the weights of " in error
        assert re.findall(r"rank (\d+) \(host", error) == [str(rank) for rank in named]
        assert f"(host {socket.gethostname()})" in error
        assert not any("Traceback" in text for text in said)
        assert newest_step(out) == 0
