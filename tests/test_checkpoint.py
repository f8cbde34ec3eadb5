"""Checkpoints are complete or not there: layout, damage, other models, pruning, a full disk, saves in flight."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.training_fixtures import (
    TINY_OVERRIDES,
    checkpoint_state,
    final_weights,
    losses,
    run_training,
    same_bits,
    train,
)

SHORT = {"max_steps": 6, "save_steps": 2}


def steps_saved(output_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in output_dir.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    """A run of 6 steps with checkpoints 2, 4 and 6."""
    output_dir = tmp_path_factory.mktemp("finished") / "out"
    train(dataset, output_dir, **SHORT)
    return output_dir


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    """The same run as if it had been stopped after checkpoint 4."""
    shutil.copytree(finished, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    shutil.rmtree(tmp_path / "out" / "final_model")
    return tmp_path / "out"


def test_layout_manifest_and_canonical_names(finished, dataset, tmp_path):
    assert steps_saved(finished) == [2, 4, 6]
    assert not list(finished.glob("tmp-*"))
    checkpoint = finished / "checkpoint-4"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["step"] == 4
    assert manifest["model"]["hidden_size"] == 64
    on_disk = {path.name for path in checkpoint.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    for name, (size, _) in manifest["files"].items():
        assert (checkpoint / name).stat().st_size == size
    train(dataset, tmp_path / "two", nproc=2, **SHORT)
    for run in (finished, tmp_path / "two"):
        state = checkpoint_state(run / "checkpoint-4", tmp_path)
        assert "encoder.layers.1.self_attention.layernorm_qkv.weight" in state["model"]
        assert not any("module." in name for name in state["model"])
        assert all(tensor.dtype == torch.float32 for tensor in state["model"].values())


def test_background_and_foreground_saves_are_the_same_and_not_touched_by_later_steps(finished, dataset, tmp_path):
    train(dataset, tmp_path / "out", async_save=False, **SHORT)
    for step in (2, 4):
        a = checkpoint_state(finished / f"checkpoint-{step}", tmp_path)["model"]
        b = checkpoint_state(tmp_path / "out" / f"checkpoint-{step}", tmp_path)["model"]
        assert same_bits(a, b)
    early = checkpoint_state(finished / "checkpoint-2", tmp_path)["model"]
    late = checkpoint_state(finished / "checkpoint-4", tmp_path)["model"]
    assert not same_bits(early, late)


def _truncate(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)


def _flip_a_byte(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def _empty(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.unlink()


DAMAGE = {
    "truncated shard": _truncate,
    "flipped byte": _flip_a_byte,
    "no manifest": lambda c: (c / "manifest.json").unlink(),
    "torn manifest": lambda c: os.truncate(c / "manifest.json", 20),
    "no metadata": lambda c: (c / ".metadata").unlink(),
    "no trainer state": lambda c: (c / "trainer_state.json").unlink(),
    "empty directory": _empty,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_the_next_older_used(damage, copy, finished, dataset):
    damage(copy / "checkpoint-4")
    said = train(dataset, copy, **SHORT)
    assert "checkpoint-4: skipped" in said
    assert "Resuming after step 2" in said
    assert same_bits(final_weights(copy), final_weights(finished))
    assert losses(copy) == losses(finished)
    assert steps_saved(copy) == [2, 4, 6]


def test_when_every_checkpoint_is_damaged_the_run_says_so_and_does_not_start_over(copy, dataset):
    for step in (2, 4):
        _truncate(copy / f"checkpoint-{step}")
    said = train(dataset, copy, expect=2, **SHORT)
    assert "none of its checkpoints is whole" in said
    assert "--overwrite_output_dir" in said
    said = train(dataset, copy, overwrite_output_dir=True, **SHORT)
    assert "Resuming" not in said


def test_leftovers_of_a_killed_save_are_cleared(copy, dataset):
    shutil.copytree(copy / "checkpoint-4", copy / "tmp-checkpoint-5")
    said = train(dataset, copy, **SHORT)
    assert "Resuming after step 4" in said
    assert not list(copy.glob("tmp-*"))


def test_the_newest_is_by_number_not_by_name_or_time(copy, dataset):
    (copy / "checkpoint-4").rename(copy / "checkpoint-10")
    os.utime(copy / "checkpoint-2")
    said = train(dataset, copy, **SHORT)
    assert "Resuming after step 4" in said  # what is inside counts


def test_another_model_is_refused_with_the_differing_fields_named(copy, dataset):
    other = TINY_OVERRIDES.replace("num_hidden_layers=2", "num_hidden_layers=3")
    for where in ({}, {"resume_from_checkpoint": str(copy / "checkpoint-2")}):
        said = train(dataset, copy, expect=2, config_overrides=other, **where, **SHORT)
        assert "num_hidden_layers 2 (now 3)" in said
    assert steps_saved(copy) == [2, 4]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"seed": 1}, "seed 42 (now 1)"),
        ({"max_seq_length": 64}, "max_seq_length"),
        ({"max_train_samples": 9}, "dataset"),
    ],
)
def test_another_order_of_batches_is_refused(flags, named, copy, dataset):
    assert named in train(dataset, copy, expect=2, **SHORT | flags)
    assert steps_saved(copy) == [2, 4]


def test_resume_from_a_named_checkpoint_and_from_none(copy, finished, dataset):
    said = train(dataset, copy, resume_from_checkpoint=str(copy / "checkpoint-2"), **SHORT)
    assert "Resuming after step 2" in said
    assert losses(copy) == losses(finished)
    said = train(dataset, copy, resume_from_checkpoint="false", **SHORT)
    assert "Resuming" not in said
    assert losses(copy) == losses(finished)


def test_a_damaged_checkpoint_that_was_asked_for_by_name_is_an_error(copy, dataset):
    _truncate(copy / "checkpoint-4")
    said = train(dataset, copy, expect=2, resume_from_checkpoint=str(copy / "checkpoint-4"), **SHORT)
    assert "damaged" in said


@pytest.mark.parametrize("limit", [1, 2])
def test_save_total_limit_keeps_the_newest(limit, dataset, tmp_path):
    train(dataset, tmp_path / "out", max_steps=5, save_steps=1, save_total_limit=limit)
    assert steps_saved(tmp_path / "out") == [4, 5][-limit:]


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MB: room for one or two of the tiny model's checkpoints."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_survives(in_background, small_disk, finished, dataset):
    out = small_disk / "out"
    size = sum(path.stat().st_size for path in (finished / "checkpoint-2").iterdir())
    assert size < 2_000_000  # one fits, three do not
    train(dataset, out, stop_at_step=2, async_save=in_background, **SHORT)
    (small_disk / "ballast").write_bytes(bytes(4_000_000 - size - size // 2 - 200_000))
    said = train(dataset, out, expect=2, async_save=in_background, **SHORT)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "No space left" in errors[0]
    assert "Traceback" not in said
    assert steps_saved(out) == [2]
    assert not list(out.glob("tmp-*"))
    (small_disk / "ballast").unlink()
    said = train(dataset, out, save_total_limit=1, async_save=in_background, **SHORT)
    assert "Resuming after step 2" in said
    assert same_bits(final_weights(out), final_weights(finished))


def test_exit_waits_for_the_save_in_flight(dataset, tmp_path):
    """A writer that outlived its process group used to abort about one exit in six; two ranks, eight exits."""
    for number in range(8):
        out = tmp_path / str(number)
        said = train(dataset, out, nproc=2, max_steps=1, save_final_model=False)
        assert "terminate called" not in said
        assert steps_saved(out) == [1]


def test_a_real_torchrun_leaves_whole_checkpoints(dataset, tmp_path):
    done = run_training(dataset, tmp_path / "out", nproc=2, **SHORT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "UserWarning" not in done.stderr
    said = train(dataset, tmp_path / "out", **SHORT | {"max_steps": 8})
    assert "Resuming after step 6" in said
