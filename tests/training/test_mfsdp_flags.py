"""Flags of train_mfsdp.py that are refused, each with what would happen."""

from __future__ import annotations

import pytest
import torch

from common.cli import UserError
from tests.data_fixtures import load_script
from tests.forked import run_script
from tests.training_fixtures import environment, flags_of, train

pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
MFSDP = "train_mfsdp.py"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"zero_dp_strategy": "zero3"},
            "--zero_dp_strategy zero3: choose no_shard, optim, optim_grads, optim_grads_p",
        ),
        ({"activation_checkpointing": "some"}, "--activation_checkpointing some: choose none, selective, full"),
        (
            {"preserve_fp32_weights": False},
            "missing: --bf16 (--preserve_fp32_weights False is about bf16 weights and gradients",
        ),
        (
            {"grad_reduce_in_fp32": False},
            "missing: --bf16 (--grad_reduce_in_fp32 False is about bf16 weights and gradients",
        ),
        ({"overlap_grad_reduce": False}, "--overlap_grad_reduce False: gives wrong gradients with optim"),
        (
            {"overlap_param_gather": False},
            "--overlap_param_gather False: computes with the previous step's weights, except with optim_grads_par",
        ),
        ({"average_in_collective": True}, "--average_in_collective: crashes without expert parallelism"),
        ({"check_for_nan_in_grad": False}, "--check_for_nan_in_grad False: the norm is always checked"),
        (
            {"zero_dp_strategy": "no_shard", "init_model_with_meta_device": True},
            "--init_model_with_meta_device: no_shard needs the whole model",
        ),
        ({"zero_dp_strategy": "no_shard", "hsdp_shard_size": 2}, "--hsdp_shard_size: no_shard shards nothing"),
        ({"hsdp_shard_size": 1}, "--hsdp_shard_size 1: shards nothing"),
        (
            {"zero_dp_strategy": "optim", "sync_model_each_microbatch": True},
            "--sync_model_each_microbatch: sums gradients twice",
        ),
        (
            {"hsdp_shard_size": 2, "sync_model_each_microbatch": True},
            "--sync_model_each_microbatch: sums gradients twice",
        ),
    ],
)
def test_mfsdp_refuses_bad_flags(dataset, tmp_path, flags, message):
    script = load_script(MFSDP)
    with pytest.raises(UserError) as error:
        script.parse_run("", script.MegatronFlags, flags_of(dataset, tmp_path, **flags))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_mfsdp_shard_size_not_dividing_ranks_is_refused(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", 2, expect=2, script=MFSDP, hsdp_shard_size=3)
    assert "--hsdp_shard_size 3 does not divide 2 ranks: choose 1, 2" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_mfsdp_without_gpu_is_one_line(dataset, tmp_path):
    done = run_script(MFSDP, *flags_of(dataset, tmp_path / "out"), env=environment())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: train_mfsdp.py needs an NVIDIA GPU")
    assert "train_fsdp2.py" in line
    assert not (tmp_path / "out").exists()
