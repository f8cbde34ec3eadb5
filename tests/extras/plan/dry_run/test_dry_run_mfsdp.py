"""train_mfsdp.py --dry_run: held to what torch's allocator held in runs of the real library on CPU ranks.

Both run behind stand-ins for CUDA and NCCL (tests/megatron_on_cpu.py; extras/speed/megatron.py), so what a GPU
holds beside tensors is in neither.
"""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.allocator_peak import PLAIN, run_measured
from common.cli import UserError
from extras.plan.dry_run.memory_estimate import MemoryEstimate
from extras.speed.megatron import fake_cuda
from tests.decoder_fixtures import decoder_flags, write_text
from tests.extras.plan.dry_run.test_dry_run import DEEPER, LLAMA, PROTEINS, predicted
from tests.forked import run_script
from tests.training_fixtures import flags_of, on_ranks

library = pytest.importorskip("megatron_fsdp.param_and_grad_buffer", reason="megatron-fsdp is not installed")
MFSDP = "train_mfsdp.py"
TINY = ["--config_name=facebook/esm2_t6_8M_UR50D", "--config_overrides=num_hidden_layers=2", "--tokens_per_pack=1024"]
HYBRID = {"hsdp_shard_size": 2, "bf16": True}
PACKS = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("nproc", "model", "flags"),
    [
        pytest.param(1, DEEPER, {}, marks=pytest.mark.slow),
        pytest.param(2, DEEPER, PACKS | {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param(
            2,
            DEEPER,
            PACKS | {"zero_dp_strategy": "optim", "activation_checkpointing": "selective"},
            marks=pytest.mark.slow,
        ),
        (4, DEEPER, HYBRID | {"zero_dp_strategy": "optim_grads"}),
        pytest.param(
            2, None, {"zero_dp_strategy": "no_shard", "activation_checkpointing": "none"}, marks=pytest.mark.slow
        ),
        pytest.param(4, None, {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
    ],
    ids=["one", "optim_grads_params", "optim", "hybrid", "no_shard", "llama"],
)
def test_dry_run_peak_is_that_of_a_real_run(dataset, tmp_path, nproc, model, flags):
    if model:
        argv = flags_of(dataset, tmp_path / "out", config_overrides=model, **PROTEINS | PLAIN | flags)
    else:
        argv = decoder_flags(write_text(tmp_path / "text"), tmp_path / "out", **LLAMA | PLAIN | flags)
    codes, said = on_ranks(nproc, run_measured, MFSDP, argv, str(tmp_path / "peak"))
    assert codes == [0] * nproc, "\n".join(said)
    peak = max(int((tmp_path / f"peak.{rank}").read_text()) for rank in range(nproc))
    # The rest is gloo's copy of the weights it gathers, one bucket at a time
    assert predicted(MFSDP, nproc, argv, "--use_cpu").peak == pytest.approx(peak, rel=0.05)


@functools.cache
def on_one_rank() -> MemoryEstimate:
    return predicted(MFSDP, 1, TINY, "--bf16", "--zero_dp_strategy=no_shard")


@pytest.mark.parametrize(
    ("strategy", "weights", "moments", "gradients"),
    [
        pytest.param("no_shard", 4, 8, 4, marks=pytest.mark.slow),
        pytest.param("optim", 4 / 16, 8 / 16, 4, marks=pytest.mark.slow),
        pytest.param("optim_grads", 4 / 16, 8 / 16, 4 / 16, marks=pytest.mark.slow),
        ("optim_grads_params", 4 / 16, 8 / 16, 4 / 16),
    ],
)
def test_dry_run_bytes_per_parameter_are_the_documented_ones(strategy, weights, moments, gradients):
    """As in docs/distributed.md, except bf16 weights: they count as gathered or rounded weights."""
    way = f"--zero_dp_strategy={strategy}"
    held = predicted(MFSDP, 16, TINY, "--bf16", way, "--activation_checkpointing=full")
    alone = on_one_rank()
    parameters = alone.kinds["weights"] / 4
    assert alone.kinds["gathered"] == pytest.approx(2 * parameters, rel=0.01)
    for kind, expected in (("weights", weights), ("optimizer", moments), ("gradients", gradients)):
        assert held.kinds[kind] / parameters == pytest.approx(expected, rel=0.05), kind  # buckets are padded
    # Replicas share the copying by whole tensors, so not quite evenly.
    assert held.checkpoint_copy / parameters == pytest.approx(12 / 16, rel=0.15 if strategy == "no_shard" else 0.05)


def test_dry_run_checkpoint_copy_excludes_unsharded_fp32_buffers():
    """Without masters the optimiser updates rows of the whole weights."""
    held = predicted(MFSDP, 16, TINY, "--zero_dp_strategy=optim")
    alone = predicted(MFSDP, 1, TINY, "--zero_dp_strategy=no_shard")
    assert held.kinds["weights"] == pytest.approx(alone.kinds["weights"], rel=0.05)
    assert held.checkpoint_copy == pytest.approx(3 * alone.kinds["weights"] / 16, rel=0.05)


def test_dry_run_restores_patched_functions_after_an_error():
    def calls():
        cuda = [getattr(torch.cuda, name) for name in ("Stream", "stream", "current_stream", "current_device")]
        return [*cuda, library._coalescing_manager, library.gradient_reduce_preprocessing, library.check_gpu_memory]

    before = calls()
    predicted(MFSDP, 2, TINY)
    assert calls() == before
    with pytest.raises(UserError, match="--hsdp_shard_size 3 does not divide 4 ranks"):
        predicted(MFSDP, 4, TINY, "--hsdp_shard_size=3")
    assert calls() == before
    with fake_cuda():
        assert not {id(call) for call in calls()} & {id(call) for call in before}


@pytest.mark.slow
def test_dry_run_prints_modes_and_largest_pack(tmp_path):
    flags = [*TINY, "--dry_run", "--world_size=4", "--activation_checkpointing=full", "--device_memory=5.5"]
    done = run_script(MFSDP, *flags, f"--output_dir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("Peak by storage of activations (--activation_checkpointing), GiB:\n")[2]
    ways = [line.split() for line in table.partition("\n\n")[0].splitlines()]
    assert [" ".join(way[1:]) for way in ways] == ["none", "selective", "full (as configured)"]
    peaks = [float(way[0]) for way in ways]
    assert peaks == sorted(peaks, reverse=True)
    assert "It fits: " in done.stdout
    assert "CUDA" not in done.stderr
    assert not (tmp_path / "out").exists()
