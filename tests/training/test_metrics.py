"""What a run counts and leaves: MFU's peak, metrics.jsonl, the guides' JSON files, blocks, tables, pictures."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from common.data.collators import FillingCollator, MaskingCollator, to_device
from common.data.crops import Pack
from common.data.training_data import PreparedData
from common.models.esm2.alphabet import ESM2_TOKENS, LAST_RESIDUE
from common.models.esm2.config import esm2_config
from common.models.esm2.model import build_model
from common.training.log_row import peak_memory_gb, step_line
from common.training.masked_lm import MaskedLM
from common.training.run_logger import format_block, peak_flops, write_results
from tests.live_runs import trajectory
from tests.training_fixtures import (
    NUM_TEST,
    NUM_TRAIN,
    NUM_VALIDATION,
    arguments,
    rows,
    train,
)

TRAIN_KEYS = {
    *("epoch", "total_flos", "train_loss", "train_runtime", "train_samples"),
    *("train_samples_per_second", "train_steps_per_second"),
}
EVAL_KEYS = {
    *("eval_accuracy", "eval_loss", "eval_runtime", "eval_samples", "eval_samples_per_second"),
    *("eval_steps_per_second", "perplexity", "epoch"),
}
ROW_KEYS = {
    *("step", "loss", "step_loss", "train_perplexity", "grad_norm", "learning_rate", "tokens", "step_seconds"),
    *("tokens_per_second", "tokens_per_second_per_gpu", "unpadded_tokens_per_second_per_gpu"),
    *("data_wait_seconds", "peak_memory_gb", "epoch", "total_steps", "tflops_per_device"),
    *("forward_backward_seconds", "optimizer_seconds", "checkpoint_seconds", "skipped_steps"),
    "unknown_characters",
}


def read(path) -> dict:
    return json.loads(path.read_text())


def test_total_flos_sum_over_proteins_read(dataset, tmp_path):
    train(dataset, tmp_path, num_train_epochs=1, max_steps=None, max_seq_length=1500, tokens_per_pack=1500)
    store = PreparedData(arguments(dataset).data, ESM2_TOKENS).store
    lengths = store.lengths(np.arange(len(store))).astype(float)
    state = read(tmp_path / "trainer_state.json")
    assert state["tokens"] == lengths.sum()
    per_token = 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    body = 3 * (per_token * lengths.sum() + 4 * 2 * 32 * (lengths**2).sum())
    head = 3 * 2 * (32 * 32 + 32 * 33) * lengths.sum()
    # of the head we only know here that about 15 % of the positions are predicted
    assert body + 0.13 * head < state["total_flos"] < body + 0.17 * head
    assert read(tmp_path / "train_results.json")["total_flos"] == state["total_flos"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA GB300", 2500e12),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA L40", 181e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A16", None),
    ],
)
def test_peak_flops_is_by_device_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)  # the driver's answer
    assert peak_flops(torch.device("cuda"), bf16=True) == peak
    assert peak_flops(torch.device("cuda"), bf16=False) is None
    assert peak_flops(torch.device("cpu"), bf16=True) is None
    assert peak_flops(torch.device("cuda"), bf16=False, given_tflops=1979.0) == 1979e12


def test_mfu_is_of_the_given_peak(dataset, tmp_path):
    train(dataset, tmp_path, 1, max_steps=2, peak_tflops_per_gpu=0.25)
    for row in rows(tmp_path):
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / 0.25)


def test_results_have_the_guides_keys(evaluated_run):
    output_dir, _ = evaluated_run
    trained, evaluated, tested, everything = (
        read(output_dir / f"{name}_results.json") for name in ("train", "eval", "test", "all")
    )
    assert trained.keys() >= TRAIN_KEYS
    assert evaluated.keys() >= EVAL_KEYS
    assert everything == trained | evaluated | tested
    assert (trained["train_samples"], evaluated["eval_samples"]) == (NUM_TRAIN, NUM_VALIDATION)
    assert tested["test_samples"] == NUM_TEST
    state = read(output_dir / "trainer_state.json")
    assert state["log_history"] == rows(output_dir)
    # The ratios are of the whole run: all ranks' proteins over the seconds spent in steps.
    assert trained["train_samples_per_second"] * trained["train_runtime"] == pytest.approx(state["sequences"])
    assert trained["train_steps_per_second"] * trained["train_runtime"] == pytest.approx(12)
    assert trained["train_tokens_per_second"] * trained["train_runtime"] == pytest.approx(state["tokens"])


def test_metrics_have_one_row_per_logged_step(evaluated_run):
    output_dir, _ = evaluated_run
    history = rows(output_dir)
    assert [row["step"] for row in history] == [0, 1, 4, 5, 8, 10, 12]
    for row in history[1:]:
        evaluated = {k for k in row if k.startswith("eval_") or k == "perplexity"}
        assert row.keys() - evaluated == ROW_KEYS
        assert bool(evaluated) == (row["step"] in (4, 8, 12))
        assert 0 <= row["data_wait_seconds"] <= row["step_seconds"]
        assert row["peak_memory_gb"] > 0.05
    tokens = [row["tokens"] for row in history[1:]]
    assert tokens == sorted(set(tokens))
    # tokens/s of the interval since the last row, not of its last step
    for before, row in zip(history[1:], history[2:], strict=False):
        steps = row["step"] - before["step"]
        expected = (row["tokens"] - before["tokens"]) / (row["step_seconds"] * steps)
        assert row["tokens_per_second"] == pytest.approx(expected)


def test_metrics_loss_is_mean_since_last_row(evaluated_run, dataset, tmp_path):
    train(dataset, tmp_path, 2, max_steps=12)
    every = {row["step"]: row["loss"] for row in rows(tmp_path)}
    history = rows(evaluated_run[0])
    for before, row in zip(history, history[1:], strict=False):
        since = [every[step] for step in range(before["step"] + 1, row["step"] + 1)]
        assert row["loss"] == pytest.approx(np.mean(since), rel=1e-12)
        assert row["step_loss"] == every[row["step"]]
        assert row["train_perplexity"] == pytest.approx(np.exp(np.mean(since)), rel=1e-12)
    assert any(row["loss"] != row["step_loss"] for row in history[2:])


def test_metrics_rows_survive_kill(dataset, tmp_path):
    flags = {"max_steps": 11, "logging_steps": 5, "save_steps": 4, "save_final_model": False}
    train(dataset, tmp_path, **flags)
    expected = trajectory(tmp_path)
    assert [row["step"] for row in expected] == [1, 5, 10, 11]
    shutil.rmtree(tmp_path / "checkpoint-11")  # as if the machine had died before: three steps into the row
    train(dataset, tmp_path, **flags)
    assert trajectory(tmp_path) == expected


def test_metrics_speeds_count_padding(evaluated_run):
    """Two ranks, one pack each a step, filled up to a multiple of 64 tokens."""
    output_dir, _ = evaluated_run
    history = rows(output_dir)[1:]
    filled = []
    for before, row in zip(history, history[1:], strict=False):
        steps = row["step"] - before["step"]
        assert 2 * row["unpadded_tokens_per_second_per_gpu"] == pytest.approx(row["tokens_per_second"])
        computed = 2 * row["tokens_per_second_per_gpu"] * row["step_seconds"] * steps
        assert computed / 64 == pytest.approx(round(computed / 64)), "a multiple of 64"
        filled.append(computed - (row["tokens"] - before["tokens"]))
        assert -1e-6 < filled[-1] < 64 * 2 * steps
    assert max(filled) > 0


@pytest.mark.parametrize(("filled_to", "computed"), [(0, 64 + 128 + 64 + 64), (200, 4 * 256)])
def test_metrics_computed_tokens_are_those_layers_see(filled_to, computed):
    model, collator = build_model(esm2_config(1, 64, 4), 0), MaskingCollator(ESM2_TOKENS, 0)
    if filled_to:
        collator = FillingCollator(collator, filled_to, 16, 64, 64, ESM2_TOKENS.pad)
    seen = []
    model.layers[0].register_forward_hook(lambda layer, inputs, output: seen.append(len(inputs[0].x)))
    batches = []
    for lengths in ([64], [30, 35], [5], []):
        zeros = np.zeros(len(lengths), dtype=np.int64)
        ids = np.full(sum(lengths), LAST_RESIDUE, dtype=np.uint8)
        batches.append(collator(Pack(zeros, zeros, np.array(lengths, dtype=np.int64), 0), ids))
        model(**to_device(batches[-1], torch.device("cpu")))
    assert MaskedLM.counts(batches).num_computed == sum(seen) == computed
    assert MaskedLM.counts(batches).num_tokens == 64 + 65 + 5


def test_train_loss_is_mean_over_restarts(dataset, tmp_path):
    for stop in ({"stop_at_step": 3}, {}):
        train(dataset, tmp_path, max_steps=7, **stop)
    assert len(rows(tmp_path)) == 7
    mean = np.mean([row["loss"] for row in rows(tmp_path)])
    assert read(tmp_path / "train_results.json")["train_loss"] == pytest.approx(mean, rel=1e-9)


def test_metrics_resume_has_each_step_once(dataset, tmp_path):
    flags = {"max_steps": 8, "save_steps": 4}
    train(dataset, tmp_path, stop_at_step=6, **flags)
    for path in (tmp_path / "checkpoint-6").iterdir():
        path.unlink()  # as if the machine had died after step 6 and before its checkpoint
    (tmp_path / "checkpoint-6").rmdir()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 99.0}\n{"step": 8, "l')
    train(dataset, tmp_path, **flags)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
    assert max(row["loss"] for row in rows(tmp_path)) < 4


def test_results_are_merged_over_splits(tmp_path):
    write_results(tmp_path, "train", {"train_loss": 2.0, "epoch": 1.0})
    write_results(tmp_path, "eval", {"eval_loss": 2.5, "epoch": 2.0})
    assert read(tmp_path / "train_results.json") == {"train_loss": 2.0, "epoch": 1.0}
    assert read(tmp_path / "all_results.json") == {"train_loss": 2.0, "eval_loss": 2.5, "epoch": 2.0}
    write_results(tmp_path, "eval", {"eval_own_loss": 2.7, "epoch": 3.0})
    assert read(tmp_path / "all_results.json") == {"train_loss": 2.0, "eval_own_loss": 2.7, "epoch": 3.0}


def test_format_block_equals_guides():
    results = {
        "epoch": 1.0,
        "total_flos": 304_667_017_000_000.0,
        "train_loss": 2.638123,
        "train_runtime": 1367.08,
        "train_samples": 100000,
    }
    assert format_block("train", results).splitlines() == [
        "***** train metrics *****",
        "  epoch         =     1.0000",
        "  total_flos    =  304,667GF",
        "  train_loss    =     2.6381",
        "  train_runtime = 0:22:47.08",
        "  train_samples =     100000",
    ]


def test_step_line_shows_row():
    row = {"step": 20, "total_steps": 100, "epoch": 0.5, "loss": 2.71828, "grad_norm": 1.2344, "learning_rate": 4e-4}
    row |= {"peak_memory_gb": 12.345, "tokens_per_second": 95_900.4, "tflops_per_device": 123.456}
    row |= {"step_seconds": 0.5, "data_wait_seconds": 0.01, "step_loss": 2.5, "train_perplexity": 15.15423}
    row |= {"unpadded_tokens_per_second_per_gpu": 47_950.2, "tokens_per_second_per_gpu": 48_000.0}
    assert step_line(row) == (
        "step: 20/100  epoch: 0.50  loss: 2.7183  step_loss: 2.5000  ppl: 15.154  grad_norm: 1.234  lr: 4.00e-04  "
        "memory: 12.35GB  tps: 95,900  tps/gpu: 47,950  tflops: 123.46  data wait: 2%  eta: 0:00:40"
    )
    assert step_line(row | {"step": 100}).endswith("data wait: 2%")
    assert "loss: 2.7183  ppl: 15.154  lr:" in step_line(  # its last step was skipped
        {key: value for key, value in row.items() if key not in ("step_loss", "grad_norm")}
    )
    assert "mfu: 41.0%" in step_line(row | {"mfu": 0.41})


def test_log_has_step_lines_and_blocks(evaluated_run):
    output_dir, said = evaluated_run
    assert said.count("step: 12/12") == 1
    assert said.count("Held-out loss") == 4  # at steps 0, 4, 8, 12: the end is the last of them
    (held_out,) = [line for line in said.splitlines() if "Held-out loss" in line][-1:]
    results = read(output_dir / "all_results.json")
    of_hidden = f"{results['eval_loss_masked']:.4f} of {results['eval_masked_tokens']} hidden residues"
    assert f"Held-out loss {of_hidden} (by their frequencies " in held_out
    assert f" {results['eval_neighbours_loss_masked']:.4f}), perplexity" in held_out
    last = rows(output_dir)[-1]
    assert {key: last[key] for key in last if key in results and key.startswith("eval")} == {
        key: results[key] for key in results if key.startswith("eval")
    }
    for split in ("train", "eval", "test"):
        assert said.count(f"***** {split} metrics *****") == 1


def test_peak_memory_never_falls():
    block = torch.ones(100_000_000)  # 0.4 GB
    during = peak_memory_gb(torch.device("cpu"))
    del block
    assert during > 0.4
    # The kernel's count of pages lags by a few per core.
    assert peak_memory_gb(torch.device("cpu")) > during - 0.01
