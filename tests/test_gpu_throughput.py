"""benchmarks/gpu_throughput.py as far as a CPU goes: what is fed to whom, and a table after every row."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_throughput
from benchmarks.gpu_throughput import Arguments, prepare
from common.cli import UserError


def test_the_peer_gets_the_same_proteins_in_no_more_positions():
    args = Arguments(device="cpu", tokens=4096, steps=2, warmup=0)
    for pack, padded in zip(prepare("torch", args), prepare("peer", args), strict=True):
        assert 4094 <= pack["num_tokens"] <= 4096
        assert pack["max_seqlen"] <= 1024
        assert padded["input_ids"].numel() <= 4096
        kept = padded["attention_mask"].bool()
        assert torch.equal(padded["input_ids"][kept], pack["input_ids"][: int(kept.sum())])
        assert torch.equal(padded["labels"][kept], pack["labels"][: int(kept.sum())])
        assert padded["input_ids"].shape[1] * (len(kept) + 1) > 4096 * 0.5  # and not needlessly few


def test_rows_that_fail_leave_the_others(tmp_path, monkeypatch, capsys):
    out = tmp_path / "table.md"
    flags = ["--device=cpu", "--sizes=tiny", "--modes=te-bf16,torch,peer", "--tokens=256", "--steps=1", "--warmup=1"]
    monkeypatch.setattr("sys.argv", ["gpu_throughput", *flags, f"--output={out}"])
    gpu_throughput.main()
    te, ours, peer = json.loads(out.with_suffix(".json").read_text())
    assert "Transformer Engine" in te["error"] or "GPU" in te["error"]
    for row in (ours, peer):
        assert row["tokens_per_second"] > 0
        assert 3.2 < row["loss"] < 3.9  # one step away from a uniform guess among 33
    assert out.read_text().strip() == capsys.readouterr().out.strip()
    assert "1.00 x" in out.read_text()


@pytest.mark.parametrize("flags", [{"sizes": "9B"}, {"modes": "jax"}, {"device": "cuda"}])
def test_bad_flags_are_one_line(flags):
    if flags == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=f"--{next(iter(flags))}"):
        Arguments(**flags)
