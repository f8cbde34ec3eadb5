"""The GPU benchmarks on a CPU: rows are the scripts' own runs and fail alone; packs fit; clocks are read."""

from __future__ import annotations

import json
import signal
import sys

import pytest
import torch

from benchmarks import gpu_agreement, gpu_throughput
from benchmarks.dry_run import DDP, predicted
from benchmarks.gpu_agreement import PEER, TANH, TE_BF16, TORCH, TORCH_BF16, in_fp8
from benchmarks.gpu_clocks import Sample, summary
from benchmarks.gpu_kernels import matmuls, operand
from benchmarks.gpu_models import KINDS, SIZES, model_flags, row_flags, that_fits
from benchmarks.gpu_row import PROFILED, row_of
from benchmarks.gpu_throughput import Arguments
from benchmarks.measuring import words
from common.cli import UserError
from common.flags import checked
from common.training.command_line import parse_run
from extras.plan.dry_run.dry_run import GIB
from tests.forked import run_script
from tests.training_fixtures import rows
from tests.warm_python import python
from train_ddp import DdpFlags

SHORT = {"dataloader_num_workers": 0, "disable_tqdm": True}


def test_row_is_the_scripts_own_run(tmp_path):
    flags = row_flags("tiny", "fp32-residual", 1024, 2, tmp_path, "cpu") | SHORT | {"torch_compile": False}
    done = run_script("benchmarks.gpu_row", PROFILED, "1", "train_ddp.py", *words(flags))
    row = json.loads(done.stdout.splitlines()[-1])
    assert run_script("train_ddp.py", *words(flags | {"logging_steps": 1, "save_final_model": False})).returncode == 0
    last = rows(tmp_path)[-1]
    assert row["loss"] == last["step_loss"]
    assert {"aten::mm", "aten::_fused_adamw_"} <= row["kernels"].keys()
    assert 0 < sum(milliseconds for milliseconds, _ in row["kernels"].values()) < row["step_ms"]


@pytest.mark.parametrize("kind", KINDS)
def test_row_flags_are_the_scripts(kind, tmp_path):
    args = parse_run("", DdpFlags, words(row_flags("15B/8", kind, 4096, 2, tmp_path)))
    assert args.precision.bf16
    assert args.pack_tokens <= 4096


@pytest.mark.slow
def test_that_fits_is_the_largest_pack():
    flags = [*words(model_flags("tiny")), "--bf16", "--backend=torch", "--tokens_per_pack"]
    two, three = (predicted(DDP, 1, [*flags, tokens]) / GIB for tokens in ("2048", "3072"))
    assert that_fits("tiny", 4096, (DDP,), 1, 5 + (two + three) / 2) == (DDP, 2048)
    with pytest.raises(UserError, match="not one sequence fits"):
        that_fits("tiny", 1024, (DDP,), 1, 5 + two / 4)


def test_failed_row_keeps_the_others(tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    monkeypatch.setattr(sys, "executable", python())
    flags = ["--device=cpu", "--sizes=tiny", "--modes=te,peer", "--tokens=1024", "--steps=1", "--warmup=1"]
    monkeypatch.setattr("sys.argv", ["gpu_throughput", *flags, f"--output={out}"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        gpu_throughput.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    te, peer = json.loads(out.with_suffix(".json").read_text())
    assert te["error"].startswith("exit status 2: --backend te: ")
    assert peer["tokens_per_second"] > 0
    assert 3.2 < peer["loss"] < 3.9  # one step away from a uniform guess among 33
    assert out.read_text().strip() == capsys.readouterr().out.strip()
    assert "1.00 x" in out.read_text()
    assert "\npython train_ddp.py --config_name=facebook/esm2_t6_8M_UR50D" in out.read_text()


def test_row_is_given_up(tmp_path):
    flags = row_flags("tiny", "torch", 1024, 2, tmp_path, "cpu")
    assert row_of(DDP, flags, 1, 0.05, 1)["error"] == "given up after 0 s"


def test_clocks_are_read_and_summed_up():
    lines = ["1980, 2619, 412.53, 61, 0x0000000000000001", "1755, 2619, 699.10, 74, 0x0000000000000024"]
    found = summary(map(Sample.parse, [*lines, "[N/A], 2619, [N/A], [N/A], [N/A]"]))
    assert found == {
        "sm_mhz": [1867.5, 1755],
        "memory_mhz": 2619,
        "watts": 699.10,
        "celsius": 74,
        "throttled": ["power limit", "temperature (driver)"],
    }
    assert summary([]) == {}
    for line in ("Unable to determine the device handle for GPU0: Unknown Error", "", "1980, 2619, 412.53, 61"):
        with pytest.raises(ValueError, match=r"not clocks\.sm|invalid literal"):
            Sample.parse(line)


def test_products_are_those_of_a_layer():
    hidden, tokens = SIZES["tiny"][1], 48
    flops = 0
    for _, m, n, k, turned in matmuls("tiny", tokens):
        left, right = operand(m, k, turned[0], torch.device("cpu")), operand(k, n, turned[1], torch.device("cpu"))
        assert (left @ right).shape == (m, n)
        flops += 2 * m * n * k
    assert flops == 3 * 2 * 12 * hidden**2 * tokens


def test_agreement_uses_equal_weights():
    args = gpu_agreement.Arguments(device="cpu", size="tiny", tokens=1024)
    emulated = in_fp8("current")[1]
    pairs = [(TORCH, PEER), (TORCH_BF16, TORCH + TANH), emulated, (TE_BF16, TORCH_BF16)]
    exact, rounded, fp8, te = (found for _, found in gpu_agreement.rows_of(pairs, args))
    assert max(exact.values()) < 1e-5
    assert 1e-3 < rounded["gradients"] < 2e-2
    assert 2e-2 < fp8["gradients"] < 0.2
    assert isinstance(te, str)
    assert "--backend te" in te


@pytest.mark.parametrize("flags", [{"sizes": "9B"}, {"modes": "jax"}, {"device": "cuda"}, {"tokens": 512}])
def test_bad_flags_are_one_line(flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"--{next(iter(flags))}"):
        checked(Arguments(**{"device": "cpu"} | flags))
