"""Whole command lines with --backend te: every recipe, and every way of training, at least once.

The ranks take themselves for GPUs, and tensors of the CPU and of the GPU do not mix (tests/te_on_cpu/placement.py).
Losses are those of the torch backend in bf16 on a CPU, but for what the formats cost in three steps of a tiny model:
measured, 0.07 to 0.13 %, and 0.23 % with NVFP4.
"""

from __future__ import annotations

import shutil

import pytest

from common.files.json_files import read_json_lines
from tests.decoder_fixtures import train_decoder, write_text
from tests.te_on_cpu.boot import needs_site
from tests.te_on_cpu.runs import BLACKWELL, HOPPER, train_by_te, train_decoder_by_te
from tests.training_fixtures import losses, train

pytestmark = needs_site
FSDP2 = {"script": "train_fsdp2.py", "nproc": 2}
CASES = {
    "delayed, FSDP2, recomputed": {"fp8_recipe": "delayed", "activation_checkpointing": "full"} | FSDP2,
    "current, DDP, FP8 weights": {"fp8_recipe": "current", "fp8_params": True, "nproc": 2},
    "block, DDP": {"fp8_recipe": "block", "nproc": 2},
    "delayed, Megatron-FSDP": {"fp8_recipe": "delayed", "script": "train_mfsdp.py", "nproc": 2},
    "mxfp8, FSDP2": {"fp8_recipe": "mxfp8", "capability": BLACKWELL} | FSDP2,
    "nvfp4": {"fp4": True, "capability": BLACKWELL},
    "mxfp8 and nvfp4": {"fp8_recipe": "mxfp8", "fp8_layers": "1", "fp4": True, "capability": BLACKWELL},
}


@pytest.fixture(scope="module")
def in_bf16(dataset, tmp_path_factory):
    """The losses of the torch backend on so many ranks of a CPU."""
    found = {}
    for nproc in (1, 2):
        out = tmp_path_factory.mktemp("bf16") / "out"
        train(dataset, out, nproc, bf16=True, gelu="tanh", backend="torch", max_steps=3)
        found[nproc] = losses(out)
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_in_bf16_but_for_the_formats(case, dataset, tmp_path, in_bf16):
    flags = {"fp8": "fp8_recipe" in CASES[case]} | CASES[case]
    if flags.get("script") == "train_mfsdp.py":
        pytest.importorskip("megatron_fsdp", reason="megatron-fsdp is not installed")
    said = train_by_te(dataset, tmp_path / "out", **flags)
    expected = in_bf16[flags.get("nproc", 1)]
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=0.01)
    assert losses(tmp_path / "out") != expected
    assert "Backend: te (--backend te)" in said
    assert f"Device = cuda x {flags.get('nproc', 1)}, computing in bfloat16" in said


def test_a_run_of_delayed_scaling_goes_on_bit_exactly(dataset, tmp_path):
    """Histories and scales come back from the checkpoint; statistics are those of tensors on the GPU's units."""
    flags = {"fp8": True, "fp8_recipe": "delayed", "max_steps": 4, "quant_stats": True, "quant_stats_freq": 2}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train_by_te(dataset, whole, save_steps=2, capability=HOPPER, **flags)
    shutil.copytree(whole / "checkpoint-2", parted / "checkpoint-2")
    train_by_te(dataset, parted, resume_from_checkpoint=parted / "checkpoint-2", **flags)
    assert losses(parted) == losses(whole)[2:]
    rows = read_json_lines(whole / "quant_stats.jsonl")
    assert {row["step"] for row in rows} == {2, 4}


def test_a_decoder_trains_as_in_bf16_but_for_the_formats(tmp_path):
    text = write_text(tmp_path / "text")
    flags = {"hidden_width": 64, "num_heads": 4, "intermediate_size": 96, "max_steps": 3}
    train_decoder(text, tmp_path / "torch", bf16=1, backend="torch", **flags)
    said = train_decoder_by_te(text, tmp_path / "te", fp8=1, fp8_recipe="current", **flags)
    assert losses(tmp_path / "te") == pytest.approx(losses(tmp_path / "torch"), rel=0.01)
    assert losses(tmp_path / "te") != losses(tmp_path / "torch")
    assert "Backend: te (--backend te)" in said


@pytest.mark.parametrize("way", ["p2p", "a2a"])
def test_ranks_that_share_packs_train_as_one(way, dataset, tmp_path, in_bf16):
    """By Transformer Engine's own exchange of keys (a ring) or of heads, around kernels of attention to packs."""
    train_by_te(dataset, tmp_path / "out", 2, "train_ddp_cp.py", cp_comm_type=way)
    assert losses(tmp_path / "out") == pytest.approx(in_bf16[1], rel=3e-4)
