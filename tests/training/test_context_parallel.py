"""Runs whose ranks share packs are the run of one process: train_ddp_cp.py, and train_fsdp2.py with --cp_size."""

from __future__ import annotations

import json

import pytest
import torch

from tests.live_runs import outcome, trajectory
from tests.training_fixtures import train

CP, FSDP2 = "train_ddp_cp.py", "train_fsdp2.py"
RUN = {"max_steps": 30, "packs_per_step": 4, "save_steps": 10, "do_eval": True, "eval_steps": 15}
HELD_OUT = ("eval_loss", "eval_accuracy", "eval_masked_tokens", "eval_samples", "eval_unigram_loss")
# Of sums in another order, over 30 steps; and of Adam, which turns gradients that are rounding alone into steps.
CLOSE = {"rel": 2e-4}


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, 1, **RUN)
    return out


@pytest.mark.parametrize(
    ("script", "nproc", "flags"),
    [
        (CP, 2, {}),
        (CP, 4, {"cp_comm_type": "all_gather", "pad_sequences_to_be_divisible_by": 16, "dataloader_num_workers": 1}),
        (CP, 4, {"cp_size": 4, "cp_layout": "contiguous"}),
        (FSDP2, 2, {"cp_size": 2}),
        (FSDP2, 4, {"cp_size": 2, "sharding_strategy": "hybrid", "hsdp_shard_size": 2}),
    ],
    ids=["ddp", "dp-x-cp", "contiguous", "fsdp2", "hybrid"],
)
def test_thirty_steps_are_those_of_one_process(dataset, alone, tmp_path, script, nproc, flags):
    train(dataset, tmp_path / "out", nproc, script=script, **RUN | flags)
    expected, found = trajectory(alone), trajectory(tmp_path / "out")
    assert len(found) == len(expected) == 30
    for one, other in zip(found, expected, strict=True):
        assert {k: one[k] for k in ("step", "tokens", "epoch")} == {k: other[k] for k in ("step", "tokens", "epoch")}
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], **CLOSE)
    results = [json.loads((out / "all_results.json").read_text()) for out in (tmp_path / "out", alone)]
    for key in HELD_OUT:
        assert results[0][key] == pytest.approx(results[1][key], **CLOSE), key
    state, reference = (outcome(out, 30, tmp_path) for out in (tmp_path / "out", alone))
    assert state.keys() == reference.keys()
    moved = [name for name in state if name.startswith("model/") and not _close(state[name], reference[name])]
    assert not moved


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 2e-3 * b.norm())
