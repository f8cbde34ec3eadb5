"""Times of the parts of a step, stragglers, profiler traces of chosen steps, checkpoints every few minutes."""

from __future__ import annotations

import gzip
import json
import os
import socket
import statistics
import time

import pytest
import torch

from common.cli import UserError
from common.models.esm2.model import Esm2ForMaskedLM
from common.training.log_row import step_line
from common.training.run_logger import parse_steps
from tests.live_runs import newest_step, trajectory
from tests.training_fixtures import _main, flags_of, on_ranks, rows, train

FLAGS = {"max_steps": 10, "save_final_model": False}


FSDP2 = {"script": "train_fsdp2.py"}
HYBRID = FSDP2 | {"sharding_strategy": "hybrid", "hsdp_shard_size": 2}


def _main_slow(argv: list[str], script: str, rank: int, seconds: float, forward: int) -> None:
    """A train script; one rank needs so much longer for the first `forward` forward passes, then backward passes."""
    passes = 0

    def is_slow(module) -> bool:
        return isinstance(module, Esm2ForMaskedLM) and module.training and int(os.environ.get("RANK", 0)) == rank

    def before(module, inputs) -> None:
        nonlocal passes
        if is_slow(module):
            passes += 1
            if passes <= forward:
                time.sleep(seconds)

    def after(module, inputs, output) -> None:
        if is_slow(module) and passes > forward:
            output.loss_sum.register_hook(lambda gradient: time.sleep(seconds))

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    torch.nn.modules.module.register_module_forward_hook(after)
    _main(argv, script)


def slowed(
    dataset, out, nproc: int, rank: int, seconds: float, forward=10**9, script: str = "train_ddp.py", **flags
) -> str:
    argv = flags_of(dataset, out, **FLAGS | flags)
    codes, said = on_ranks(nproc, _main_slow, argv, script, rank, seconds, forward)
    assert codes == [0] * nproc, said
    return said[0]


@pytest.mark.parametrize(("nproc", "flags"), [(1, {}), (2, {}), (2, FSDP2)], ids=["one", "ddp", "fsdp2"])
def test_step_parts_add_up(dataset, tmp_path, nproc, flags):
    slowed(dataset, tmp_path, nproc, 0, 0.1, **flags)
    history = rows(tmp_path)[1:]
    parts = ("data_wait_seconds", "forward_backward_seconds", "optimizer_seconds")
    for row in history:
        assert sum(row[part] for part in parts) <= row["step_seconds"]
        assert row["forward_backward_seconds"] > 0.1
        assert row["optimizer_seconds"] > 0
    middle = {key: statistics.median(row[key] for row in history) for key in (*parts, "step_seconds")}
    assert sum(middle[part] for part in parts) > 0.7 * middle["step_seconds"]
    assert middle["optimizer_seconds"] < 0.1


def test_checkpoint_seconds_are_in_the_next_row(dataset, tmp_path):
    train(dataset, tmp_path, **FLAGS, save_steps=4, async_save=False)
    stalls = {row["step"]: row["checkpoint_seconds"] for row in rows(tmp_path)}
    assert {step for step, seconds in stalls.items() if seconds > 1e-3} == {5, 9}


@pytest.mark.parametrize(
    ("nproc", "rank", "accumulation", "flags"),
    [
        (2, 1, 2, {}),
        (2, 0, 1, FSDP2),
        pytest.param(4, 1, 2, HYBRID, marks=pytest.mark.slow),
        pytest.param(2, 0, 2, {"script": "train_mfsdp.py"}, marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp2", "hsdp", "mfsdp"],
)
def test_stragglers_name_the_slow_rank(dataset, tmp_path, nproc, rank, accumulation, flags):
    """Slow in the forward passes up to the first comparison, then in the backward passes."""
    flags = flags | {"straggler_every": 5, "gradient_accumulation_steps": accumulation}
    said = slowed(dataset, tmp_path, nproc, rank, 0.2, 5 * accumulation, **flags)
    history = rows(tmp_path)
    compared = [row for row in history if "slowest_rank" in row]
    assert [row["step"] for row in compared] == [5, 10]
    for row in compared:
        assert (row["slowest_rank"], row["slowest_host"]) == (rank, socket.gethostname())
        assert row["rank_seconds_max"] > 0.2 * accumulation
        assert row["rank_seconds_min"] < row["rank_seconds_max"] - 0.1 * accumulation, "waiting is not work"
        assert row["rank_seconds_min"] <= row["rank_seconds_median"] <= row["rank_seconds_max"]
    assert said.count(f"slowest: rank {rank} ({socket.gethostname()})") == 2


def test_stragglers_off_changes_no_bit(dataset, tmp_path):
    flags = FLAGS | FSDP2 | {"activation_checkpointing": "full"}
    for every in (0, 1):
        train(dataset, tmp_path / str(every), 2, **flags, straggler_every=every)
    assert not [row for row in rows(tmp_path / "0") if "slowest_rank" in row]
    assert len([row for row in rows(tmp_path / "1") if "slowest_rank" in row]) == 10
    assert trajectory(tmp_path / "0") == trajectory(tmp_path / "1")


@pytest.mark.parametrize(
    ("flags", "collective"),
    [({}, "all_reduce"), pytest.param(FSDP2, "all_gather", marks=pytest.mark.slow)],
    ids=["ddp", "fsdp2"],
)
def test_profiler_traces_the_given_steps_of_every_rank(dataset, tmp_path, flags, collective):
    train(dataset, tmp_path, 2, **FLAGS | flags, profile_steps="4-6")
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["rank0-steps-4-6.json.gz", "rank1-steps-4-6.json.gz"]
    for name in names:
        with gzip.open(tmp_path / "profile" / name) as file:
            events = json.load(file)["traceEvents"]
        steps = [event for event in events if event.get("name", "").startswith("Optimizer.step#AdamW")]
        assert len([event for event in steps if event.get("ph") == "X" and event.get("cat") == "user_annotation"]) == 3
        assert any(collective in event.get("name", "") for event in events)


def test_profiler_trace_of_resumed_run_is_in_two_files(dataset, tmp_path):
    for stop in (5, None):
        train(dataset, tmp_path, **FLAGS, profile_steps="4-7", stop_at_step=stop)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["rank0-steps-4-5.json.gz", "rank0-steps-6-7.json.gz"]
    (tmp_path / "profile" / "mine.txt").write_text("mine")
    train(dataset, tmp_path, **FLAGS | {"max_steps": 1}, overwrite_output_dir=True)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("text", ["0-3", "5-4", "a-b", "3-", "-3", "1,2", " 1-2"])
def test_parse_steps_refuses_bad_ranges(text):
    with pytest.raises(UserError, match=r"--profile_steps .*: expected steps as A-B"):
        parse_steps(text)


def test_parse_steps_reads_ranges():
    assert parse_steps("3-5") == range(3, 6)
    assert parse_steps("7") == range(7, 8)


def test_profile_steps_error_is_one_line(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", expect=2, profile_steps="9-3")
    assert said == "error: --profile_steps 9-3: expected steps as A-B, say 10-12, counted from 1\n"
    assert not (tmp_path / "out").exists()


def test_save_minutes_follows_the_clock_of_rank_0(dataset, tmp_path):
    """Steps of at least 0.1 s and a save after 0.35 s, asked for before a step: every fifth at the latest."""
    out = tmp_path / "out"
    slowed(dataset, out, 2, 1, 0.1, save_steps=1000, save_minutes=0.35 / 60)
    saved = sorted(int(path.name[11:]) for path in out.glob("checkpoint-*"))
    assert len(saved) >= 2
    assert all(later - earlier <= 5 for earlier, later in zip([0, *saved], saved, strict=False))
    train(dataset, tmp_path / "without", 2, **FLAGS, save_steps=1000)
    assert newest_step(tmp_path / "without") == 10
    assert len(list((tmp_path / "without").glob("checkpoint-*"))) == 1
    assert trajectory(out) == trajectory(tmp_path / "without")


def test_step_line_shows_stalls_and_skipped_steps_if_any():
    row = {"step": 20, "total_steps": 100, "epoch": 0.5, "loss": 2.7, "grad_norm": 1.2, "learning_rate": 4e-4}
    row |= {"peak_memory_gb": 12.3, "tokens_per_second": 95_900.4, "tflops_per_device": 123.4}
    row |= {"step_seconds": 0.5, "data_wait_seconds": 0.01, "checkpoint_seconds": 0.0, "skipped_steps": 0}
    assert step_line(row).endswith("data wait: 2%  eta: 0:00:40")
    assert step_line(row | {"checkpoint_seconds": 1.26}).endswith("eta: 0:00:40  checkpoint: 1.3s")
    assert step_line(row | {"skipped_steps": 3}).endswith("eta: 0:00:40  skipped: 3")
