"""Runs whose ranks share packs are the run of one process: train_ddp_cp.py, and train_fsdp2.py with --cp_size."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from common.files.safe_files import read_json_lines
from extras.prepare.sample import write_sample
from tests.live_runs import LiveRun, newest_step, outcome, trajectory
from tests.patience import join
from tests.training_fixtures import train

CP, FSDP2 = "train_ddp_cp.py", "train_fsdp2.py"
STEPS = 14
RUN = {"max_steps": STEPS, "packs_per_step": 2, "save_steps": 6, "do_eval": True}
HELD_OUT = (
    *("eval_loss", "eval_accuracy", "eval_selected_tokens", "eval_samples", "eval_unigram_loss"),
    *("eval_loss_masked", "eval_loss_kept", "eval_accuracy_masked", "eval_below_neighbours_masked_stderr"),
)
# Of sums in another order, over 14 steps; and of Adam, which turns gradients that are rounding alone into steps.
CLOSE = {"rel": 2e-4}


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    train(dataset, out, 1, **RUN)
    return out


@pytest.mark.parametrize(
    ("script", "nproc", "steps", "flags"),
    [
        pytest.param(CP, 2, STEPS, {}, marks=pytest.mark.slow),
        (
            CP,
            4,
            6,
            {"cp_comm_type": "all_gather", "pad_sequences_to_be_divisible_by": 16, "dataloader_num_workers": 1},
        ),
        pytest.param(
            CP, 4, 6, {"cp_size": 4, "cp_layout": "contiguous", "gradient_checkpointing": True}, marks=pytest.mark.slow
        ),
        pytest.param(FSDP2, 2, 6, {"cp_size": 2, "torch_compile": True, "compiler": "eager"}, marks=pytest.mark.slow),
        pytest.param(
            FSDP2, 4, 6, {"cp_size": 2, "sharding_strategy": "hybrid", "hsdp_shard_size": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=["ddp", "dp-x-cp", "contiguous", "fsdp2", "hybrid"],
)
def test_cp_run_equals_one_process(dataset, alone, tmp_path, script, nproc, steps, flags):
    train(dataset, tmp_path / "out", nproc, script=script, stop_at_step=steps, **RUN | flags)
    assert_same_numbers(tmp_path / "out", alone, tmp_path, steps)


def assert_same_numbers(out: Path, alone: Path, scratch: Path, steps: int = STEPS) -> None:
    """So many steps of both: the same proteins in each step, and numbers within rounding."""
    expected, found = trajectory(alone)[:steps], trajectory(out)
    assert len(found) == len(expected) == steps
    for one, other in zip(found, expected, strict=True):
        assert {k: one[k] for k in ("step", "tokens", "epoch")} == {k: other[k] for k in ("step", "tokens", "epoch")}
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], **CLOSE)
    if steps == STEPS:
        results = [json.loads((run / "all_results.json").read_text()) for run in (out, alone)]
        for key in HELD_OUT:
            assert results[0][key] == pytest.approx(results[1][key], **CLOSE), key
    state, reference = (outcome(run, steps, scratch) for run in (out, alone))
    assert state.keys() == reference.keys()
    moved = [name for name in state if name.startswith("model/") and not _close(state[name], reference[name])]
    assert not moved


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 2e-3 * b.norm())


@pytest.mark.parametrize(
    "recipe",
    [pytest.param("delayed", marks=pytest.mark.slow), pytest.param("current", marks=pytest.mark.slow), "mxfp8"],
)
def test_cp_emulated_formats_scale_by_whole_pack(dataset, tmp_path, recipe):
    flags = {"max_steps": 3, "packs_per_step": 2, "save_final_model": False, "fp8": True, "fp8_recipe": recipe}
    flags |= {"emulate_precision": True, "learning_rate": 0, "quant_stats": True, "quant_stats_freq": 1}
    train(dataset, tmp_path / "alone", 1, **flags)
    train(dataset, tmp_path / "shared", 2, script=CP, **flags)
    runs = [tmp_path / "alone", tmp_path / "shared"]
    for one, other in zip(*map(trajectory, runs), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=5e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-3)
    # A number that another order of sums takes past a boundary between two of the format's moves those after it.
    names = ("step", "layer", "module", "tensor", "gemms", "format")
    for one, other in zip(*(read_json_lines(run / "quant_stats.jsonl") for run in runs), strict=True):
        assert [one[name] for name in names] == [other[name] for name in names]
        if one["tensor"] in ("activation", "weight"):
            for stat in ("cur_amax", "l2_norm", "std", "scale_inv_max"):
                assert one[stat] == pytest.approx(other[stat], rel=1e-3), (one["tensor"], stat)


@pytest.mark.slow
def test_cp_resume_after_kill_on_other_number_of_ranks(dataset, alone, tmp_path):
    """cp 2, killed; one process; cp 4: the run of one process."""
    out = tmp_path / "out"
    with LiveRun(dataset, out, tmp_path / "logs", 2, script=CP, **RUN | {"save_steps": 1}) as run:
        run.until(lambda: newest_step(out) >= 4)
        run.signal(signal.SIGKILL)
    train(dataset, out, 1, **RUN | {"stop_at_step": 9})
    train(dataset, out, 4, script=CP, **RUN | {"cp_size": 4})
    assert_same_numbers(out, alone, tmp_path)


def test_cp_dead_peer_is_named(dataset, tmp_path):
    flags = {"max_steps": 3000, "save_steps": 1000, "ddp_timeout": 60}
    with LiveRun(dataset, tmp_path / "out", tmp_path / "logs", 2, script=CP, **flags) as run:
        run.until_step(3)
        run.signal(signal.SIGKILL, 1)
        join(run.processes[:1])
        assert run.processes[0].exitcode == 1, run.said()
    (error,) = [line for line in run.said().splitlines() if line.startswith("error: ")]
    assert error.startswith("error: another rank is gone: no answer from rank 1 ")


@pytest.mark.parametrize(
    ("cp_size", "packing"),
    [(1, {}), (2, {}), pytest.param(2, {"pad_to_max_length": True}, marks=pytest.mark.slow)],
    ids=["cp1", "cp2", "padded"],
)
def test_cp_streams_are_assigned_by_data_rank(tmp_path, cp_size, packing):
    """Padded batches are packs of so many sequences, and shared as such."""
    write_sample(tmp_path / "proteins.fasta", num_proteins=60, families=4, seed=3)
    flags = {"dataset": tmp_path / "proteins.fasta", "max_steps": 4, "packs_per_step": 2, "save_final_model": False}
    flags |= packing
    train(None, tmp_path / "alone", 1, **flags)
    train(None, tmp_path / "shared", 2 * cp_size, script=CP, cp_size=cp_size, **flags)
    for one, other in zip(trajectory(tmp_path / "shared"), trajectory(tmp_path / "alone"), strict=True):
        assert (one["tokens"], one["epoch"]) == (other["tokens"], other["epoch"])
        assert one["loss"] == pytest.approx(other["loss"], **CLOSE)


@pytest.mark.parametrize(
    ("nproc", "flags", "line"),
    [
        (
            2,
            {"cp_size": 3},
            "--cp_size 3 does not divide the number of ranks, 2: choose --cp_size 1, 2, or start 3 ranks (torchrun",
        ),
        (
            1,
            {"pad_sequences_to_be_divisible_by": 6},
            "--pad_sequences_to_be_divisible_by 6: a sequence is cut into 2 x --cp_size chunks: give a multiple of 4",
        ),
        (
            1,
            {"pad_sequences_to_be_divisible_by": 8, "cp_layout": "contiguous"},
            "--pad_sequences_to_be_divisible_by: --cp_layout contiguous pads nothing: drop one of them",
        ),
        (1, {"cp_layout": "zigzag"}, "--cp_layout zigzag: choose dual_chunk, contiguous"),
        (1, {"fp8_params": True, "fp8": True, "bf16": True}, "--fp8_params with --cp_size: "),
        (2, {"cp_comm_type": "a2a"}, "--cp_comm_type a2a: only Transformer Engine has all-to-all (--backend te): "),
    ],
    ids=["ranks", "multiple", "contiguous", "layout", "fp8_params", "a2a"],
)
def test_cp_refuses_unsupported_flags_in_one_line(dataset, tmp_path, nproc, flags, line):
    said = train(dataset, tmp_path / "out", nproc, expect=2, script=CP, **flags)
    assert re.match(rf"error: (\S+\.json: )?{re.escape(line)}", said), said  # the file that has the key
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_train_ddp_names_cp_script(dataset, tmp_path):
    said = train(dataset, tmp_path / "out", 1, expect=2, cp_size=2)
    assert said == "error: --cp_size 2: no context parallelism here: use train_ddp_cp.py\n"
