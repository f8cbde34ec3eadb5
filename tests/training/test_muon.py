"""--optim muon: every strategy on any number of ranks takes the steps of one process, and resumes as it was."""

from __future__ import annotations

import signal

import pytest

from tests.live_runs import LiveRun, assert_same_run, newest_step, outcome
from tests.training_fixtures import final_weights, losses, relative_difference, rows, train

DDP, CP, FSDP2, MFSDP = "train_ddp.py", "train_ddp_cp.py", "train_fsdp2.py", "train_mfsdp.py"
STEPS = 20
RUN = {"optim": "muon", "max_steps": STEPS, "packs_per_step": 12, "tokens_per_pack": 128, "save_steps": 100}
LOSS, NORM, WEIGHTS = 1e-6, 2e-5, 3e-6  # as in test_mfsdp.py


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, **RUN)
    return out


def assert_same(out, alone) -> None:
    assert losses(out) == pytest.approx(losses(alone), rel=LOSS)
    norms = [[row["grad_norm"] for row in rows(run)] for run in (out, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=NORM)
    assert relative_difference(final_weights(out), final_weights(alone)) < WEIGHTS


HYBRID = {"hsdp_shard_size": 2}


@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, {"gradient_checkpointing": True}),
        (3, {}),
        (2, {"script": CP}),
        (2, {"script": FSDP2, "cpu_offload": True}),
        (3, {"script": FSDP2, "sharding_strategy": "grad_op"}),
        (4, {"script": FSDP2, "sharding_strategy": "hybrid"} | HYBRID),
        (3, {"script": MFSDP}),
        (2, {"script": MFSDP, "zero_dp_strategy": "optim_grads"}),
        (4, {"script": MFSDP, "zero_dp_strategy": "optim"} | HYBRID),
        (2, {"script": MFSDP, "zero_dp_strategy": "no_shard"}),
    ],
)
def test_muon_every_strategy_equals_one_process(dataset, tmp_path, alone, nproc, flags):
    train(dataset, tmp_path, nproc, **RUN | flags)
    assert_same(tmp_path, alone)
