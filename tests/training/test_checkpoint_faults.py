"""A full disk, the end of a process and a second run in the same directory: none costs a checkpoint."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from common.checkpoint.files import damage_of
from common.distributed.world import World
from common.files.safe_files import JsonLinesLog
from common.training.run_directory import RunDirectory
from tests.live_runs import LiveRun, assert_same_run, newest_step
from tests.patience import run
from tests.small_disk import small_disk
from tests.training.checkpoint_fixtures import FLAGS, checkpointer_of_a_small_model, names, take_steps
from tests.training_fixtures import environment, on_ranks, train, training_command


@pytest.fixture
def disk(tmp_path):
    """A file system that holds several checkpoints until a test fills it."""
    with small_disk(tmp_path, "12m") as disk:
        yield disk


@pytest.mark.parametrize(
    ("async_save", "nproc", "script"),
    [
        (True, 1, "train_ddp.py"),
        pytest.param(False, 1, "train_ddp.py", marks=pytest.mark.slow),
        pytest.param(True, 2, "train_fsdp2.py", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_full_disk_keeps_earlier_ones(disk, dataset, tmp_path, async_save, nproc, script):
    out = disk / "out"
    # No row of metrics.jsonl meets the full disk before the save at step 6 has said that the one at step 4 failed.
    flags = FLAGS | {"async_save": async_save, "script": script, "max_steps": 8, "logging_steps": 8}
    train(dataset, out, nproc, **flags, stop_at_step=2)
    shutil.copytree(out, tmp_path / "never full")
    takes = sum(path.stat().st_size for path in (out / "checkpoint-2").iterdir())
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - takes // 2))
    with LiveRun(dataset, out, tmp_path / "logs", nproc, **flags) as run:
        assert run.end() == [2] * nproc
        said = [run.said(rank) for rank in range(nproc)]
    errors = [line for text in said for line in text.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert "checkpoint not saved: [Errno 28] No space left on device" in errors[0]
    assert "the last complete one is untouched" in errors[0]
    assert "Traceback" not in "".join(said)
    assert names(out) == ["checkpoint-2"]
    (disk / "ballast").unlink()
    assert "Resuming after step 2" in train(dataset, out, nproc, **flags)
    train(dataset, tmp_path / "never full", nproc, **flags)
    assert_same_run(out, tmp_path / "never full", 8, tmp_path)


def test_json_lines_full_disk_names_file(disk):
    rows = JsonLinesLog(disk / "metrics.jsonl", 0)
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free))
    with pytest.raises(OSError, match="No space left") as told:
        rows.write({"step": 1, "loss": 2.5})
    assert told.value.filename == str(disk / "metrics.jsonl")


def test_final_model_full_disk_leaves_nothing(disk, dataset):
    out = disk / "out"
    flags = {"max_steps": 2}
    train(dataset, out, **flags, save_final_model=False)
    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - 100_000))
    said = train(dataset, out, expect=2, **flags)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "final_model: not exported" in errors[0]
    assert "Traceback" not in said
    assert not list(out.glob("final_model*"))
    (disk / "ballast").unlink()
    train(dataset, out, **flags)
    assert (out / "final_model/model.safetensors").exists()


def _save_and_end(out: Path) -> None:
    checkpointer = checkpointer_of_a_small_model(out)
    take_steps(checkpointer)
    try:
        with checkpointer:
            checkpointer.save(1, {"step": 1})
    finally:
        torch.distributed.destroy_process_group()


def test_checkpoint_exit_waits_for_save(dataset, tmp_path):
    """8 processes that save in the background and end at once, half of them pairs; and a real command line."""
    for number in range(8):
        out = tmp_path / str(number)
        out.mkdir()
        nproc = 1 + number % 2
        codes, said = on_ranks(nproc, _save_and_end, out)
        assert codes == [0] * nproc, said
        assert "terminate called" not in "".join(said)
        assert names(out) == ["checkpoint-1"]
        assert damage_of(out / "checkpoint-1", World(0, 0, 1, torch.device("cpu"))) is None
    done = run(training_command(dataset, tmp_path / "real", **FLAGS), env=environment())
    assert done.returncode == 0
    assert not [line for line in done.stderr.splitlines() if " - INFO - " not in line]
    assert names(tmp_path / "real") == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_run_directory_waits_for_lock(dataset, tmp_path):
    """The lock goes with the process that holds it, and its loader workers do not inherit it."""
    out, flags = tmp_path / "out", FLAGS | {"max_steps": 500, "save_steps": 50, "dataloader_num_workers": 2}
    with LiveRun(dataset, out, tmp_path / "logs", **flags) as first:
        first.until(lambda: newest_step(out) >= 50)
        with LiveRun(dataset, out, tmp_path / "logs", **flags, stop_at_step=1) as second:
            second.until_said("another run is writing here: waiting")
            first.signal(signal.SIGKILL)
            assert second.end() == [0]
            assert "is done already" in second.said()


@pytest.mark.parametrize("mode", [None, 0o644])
def test_run_directory_record_is_private(tmp_path, mode, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if mode:  # as earlier versions made it
        (tmp_path / ".run").touch(mode)
    for restarted in (False, True):
        with RunDirectory(tmp_path) as directory:
            assert directory.restarted == restarted
            directory.begun = True
            directory.claim()
        assert (tmp_path / ".run").stat().st_mode & 0o777 == 0o600
