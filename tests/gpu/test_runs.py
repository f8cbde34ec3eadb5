"""Whole runs on a GPU, as a user starts them: NCCL, both backends, checkpoints that move between them."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from tests.training_fixtures import final_weights, losses, rows, run_training, same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
BACKENDS = [
    "torch",
    pytest.param(
        "te",
        marks=pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not here"),
    ),
]
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
MEGATRON = pytest.mark.skipif(find_spec("megatron_fsdp") is None, reason="megatron-fsdp is not installed")
SCRIPTS = [
    *[("train_ddp.py", 1), ("train_fsdp2.py", 1), pytest.param("train_ddp_cp.py", 2, marks=TWO_GPUS)],
    pytest.param("train_mfsdp.py", 1, marks=MEGATRON),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("script", "nproc"), SCRIPTS)
def test_run_trains_saves_and_resumes(dataset, tmp_path, backend, script, nproc):
    flags = {"backend": backend, "bf16": True, "max_steps": 20, "save_steps": 10, "nproc": nproc}
    done = run_training(dataset, tmp_path / "a", script=script, **flags)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "a")[-1] < losses(tmp_path / "a")[0] - 0.1
    results = json.loads((tmp_path / "a" / "train_results.json").read_text())
    assert (results["backend"], results["gelu"]) == (backend, "tanh" if backend == "te" else "exact")
    for part in ({"stop_at_step": 10}, {}):
        done = run_training(dataset, tmp_path / "b", script=script, **flags | part)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=5e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_run_resumes_bit_exactly(dataset, tmp_path, backend):
    flags = {"backend": backend, "bf16": True, "deterministic": True, "max_steps": 12, "save_steps": 6}
    for where, until in (("a", 12), ("b", 6), ("b", 12)):
        done = run_training(dataset, tmp_path / where, stop_at_step=until, save_final_model=True, **flags)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert same_bits(final_weights(tmp_path / "b"), final_weights(tmp_path / "a"))


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
def test_checkpoint_resumes_with_the_other_backend(dataset, tmp_path):
    flags = {"bf16": True, "gelu": "tanh", "max_steps": 20, "save_steps": 5}
    for backend, until in (("te", 5), ("torch", 10), ("te", 15), ("torch", 20)):
        done = run_training(dataset, tmp_path, backend=backend, stop_at_step=until, **flags)
        assert done.returncode == 0, done.stderr
    alone = tmp_path / "alone"
    run_training(dataset, alone, backend="torch", **flags)
    assert losses(tmp_path) == pytest.approx(losses(alone), abs=0.02)


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="FP8 needs Hopper"
)
def test_fp8_run_resumes_with_its_scales(dataset, tmp_path):
    flags = {"backend": "te", "bf16": True, "fp8": True, "fp8_layers": "1", "max_steps": 12, "save_steps": 6}
    done = run_training(dataset, tmp_path / "a", **flags)
    assert done.returncode == 0, done.stderr
    for part in ({"stop_at_step": 6}, {}):
        done = run_training(dataset, tmp_path / "b", **flags | part)
        assert done.returncode == 0, done.stderr
        assert "start anew" not in done.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=5e-3)


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="FP8 needs Hopper"
)
def test_fp8_params_resume_evaluate_and_continue_in_bf16(dataset, tmp_path):
    flags = {"bf16": True, "max_steps": 12, "save_steps": 4, "do_eval": True, "gelu": "tanh"}
    fp8 = flags | {"backend": "te", "fp8": True, "fp8_params": True}
    done = run_training(dataset, tmp_path / "a", **fp8)
    assert done.returncode == 0, done.stderr
    assert all(weight.dtype == torch.float32 for weight in final_weights(tmp_path / "a").values())
    for part in ({"stop_at_step": 4}, {}):
        done = run_training(dataset, tmp_path / "b", **fp8 | part)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=5e-3)
    for part in (fp8 | {"stop_at_step": 8}, flags | {"backend": "torch"}):
        done = run_training(dataset, tmp_path / "c", **part)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "c") == pytest.approx(losses(tmp_path / "a"), abs=0.05)


def test_cpu_offload_trains(dataset, tmp_path):
    flags = {"bf16": True, "max_steps": 5, "backend": "torch", "script": "train_fsdp2.py"}
    for where, offload in (("a", False), ("b", True)):
        done = run_training(dataset, tmp_path / where, cpu_offload=offload, **flags)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=5e-3)


def test_triton_adamw_takes_the_steps_of_torch(dataset, tmp_path):
    flags = {"bf16": True, "max_steps": 5, "backend": "torch"}
    for where, fused in (("a", False), ("b", True)):
        done = run_training(dataset, tmp_path / where, triton_adamw=fused, **flags)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=5e-3)


@MEGATRON
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=TWO_GPUS)])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"zero_dp_strategy": "optim_grads", "activation_checkpointing": "full"},
        {"zero_dp_strategy": "optim", "calculate_per_token_loss": True, "init_model_with_meta_device": False},
        {"zero_dp_strategy": "no_shard"},
    ],
    ids=["optim_grads_params", "optim_grads", "optim", "no_shard"],
)
def test_megatron_fsdp_equals_fsdp2(dataset, tmp_path, nproc, flags):
    """fp32 with accumulation and clipping, evaluations in between; resumes a checkpoint of FSDP2."""
    run = {"backend": "torch", "max_steps": 12, "packs_per_step": 4, "save_steps": 6, "do_eval": True, "eval_steps": 4}
    other = {"script": "train_fsdp2.py"}
    legs = {"fsdp2": [other], "mfsdp": [flags], "both": [other | {"stop_at_step": 6}, flags]}
    for name, parts in legs.items():
        for part in parts:
            done = run_training(dataset, tmp_path / name, nproc, **{"script": "train_mfsdp.py"} | run | part)
            assert done.returncode == 0, done.stderr
    for name in ("mfsdp", "both"):
        for key in ("loss", "grad_norm"):
            found, expected = ([row[key] for row in rows(tmp_path / out) if key in row] for out in (name, "fsdp2"))
            assert found == pytest.approx(expected, rel=1e-4), key  # kernels that add in any order


@MEGATRON
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=TWO_GPUS)])
def test_megatron_fsdp_in_bf16_equals_fsdp2(dataset, tmp_path, nproc):
    flags = {"bf16": True, "backend": "torch", "max_steps": 12, "packs_per_step": 4}
    for script in ("train_fsdp2.py", "train_mfsdp.py"):
        done = run_training(dataset, tmp_path / script, nproc, script=script, **flags)
        assert done.returncode == 0, done.stderr
    ours, theirs = (rows(tmp_path / script) for script in ("train_mfsdp.py", "train_fsdp2.py"))
    for key, close in (("loss", 1e-3), ("grad_norm", 2e-2)):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=close), key
