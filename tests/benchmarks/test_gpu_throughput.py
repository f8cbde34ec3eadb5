"""The GPU benchmarks as far as a CPU goes: what is fed to whom, a table after every row, and rows that fail."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_agreement, gpu_throughput
from benchmarks.gpu_agreement import PEER, TE_BF16, TORCH, TORCH_BF16, in_fp8
from benchmarks.gpu_models import batches_for
from benchmarks.gpu_throughput import Arguments, rows_of
from common.cli import UserError
from common.flags import checked
from tests.benchmarks.misbehaving import misbehave
from tests.patience import run
from tests.training_fixtures import ROOT
from tests.warm_python import python


def test_peer_gets_the_same_proteins():
    for pack, part in zip(batches_for("torch", 4096, 2), batches_for("peer", 4096, 2), strict=True):
        assert 4094 <= pack["num_tokens"] <= 4096
        assert pack["max_seqlen"] <= 1024
        rows = part["num_sequences"]
        assert rows * part["max_seqlen"] <= 4096  # padded
        assert (rows + 1) * part["max_seqlen"] > 4096 * 0.5  # and not needlessly few
        for name in ("input_ids", "labels"):
            assert torch.equal(part[name], pack[name][: part["num_tokens"]])


def test_failed_row_keeps_the_others(tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    flags = ["--device=cpu", "--sizes=tiny", "--modes=te,torch,peer", "--tokens=256", "--steps=1", "--warmup=1"]
    monkeypatch.setattr("sys.argv", ["gpu_throughput", *flags, f"--output={out}"])
    gpu_throughput.main()
    te, ours, peer = json.loads(out.with_suffix(".json").read_text())
    assert "Transformer Engine" in te["error"] or "GPU" in te["error"]
    for row in (ours, peer):
        assert row["tokens_per_second"] > 0
        assert 3.2 < row["loss"] < 3.9  # one step away from a uniform guess among 33
    assert out.read_text().strip() == capsys.readouterr().out.strip()
    assert "1.00 x" in out.read_text()


def test_hanging_or_killed_row_keeps_the_others():
    modes = ["peer", "te", "te-fp8", "torch-compiled", "torch", "te-fp8-params"]
    found = list(rows_of([("tiny", mode) for mode in modes], SimpleNamespace(row_seconds=15, minutes=10), misbehave))
    assert [row["mode"] for row in found] == modes
    assert "given up after 15 s" in found[1]["error"]
    assert "its process died (7)" in found[3]["error"]
    processes = [found[n]["process"] for n in (0, 2, 4, 5)]
    assert len(set(processes)) == 4


def test_session_ends_at_its_time_limit():
    started = time.monotonic()
    found = list(rows_of([("tiny", "te")] * 3, SimpleNamespace(row_seconds=15, minutes=0.05), misbehave))
    assert len(found) == 1
    assert time.monotonic() - started < 20


def test_agreement_uses_equal_weights():
    args = gpu_agreement.Arguments(device="cpu", size="tiny", tokens=512)
    emulated = in_fp8("current")[1]
    pairs = [(TORCH, PEER), (TORCH_BF16, TORCH), emulated, (TE_BF16, TORCH_BF16)]
    exact, rounded, fp8, te = (found for _, found in gpu_agreement.rows_of(pairs, args))
    assert max(exact.values()) < 1e-5
    assert 1e-3 < rounded["gradients"] < 2e-2
    assert 2e-2 < fp8["gradients"] < 0.2
    assert isinstance(te, str)
    assert "Transformer Engine" in te or "GPU" in te


def test_session_without_a_gpu_fails(tmp_path):
    command = [ROOT / "tests/gpu/session.sh", tmp_path / "out"]
    environment = os.environ | {"PYTHON": python(), "CUDA_VISIBLE_DEVICES": ""}
    done = run(command, env=environment)
    assert done.returncode == 2
    assert done.stderr.count("error: --device cuda: no GPU here") == 2
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("flags", [{"sizes": "9B"}, {"modes": "jax"}, {"device": "cuda"}])
def test_bad_flags_are_one_line(flags, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"--{next(iter(flags))}"):
        checked(Arguments(**flags))
