"""A checkpoint that somebody has made runs nothing of theirs."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from common.cli import UserError
from common.files.output_directory import size_and_crc
from common.outputs.checkpoint_reader import Planner, Reader
from tests.training_fixtures import train

FLAGS = {"max_steps": 2, "save_final_model": False}


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    train(dataset, out, **FLAGS)
    return out


def crafted(run: Path, change) -> Path:
    """The run's checkpoint with other metadata, which its manifest vouches for."""
    checkpoint = run / "checkpoint-2"
    with open(checkpoint / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][".metadata"] = size_and_crc(checkpoint / ".metadata")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


@pytest.mark.parametrize(("nproc", "script"), [(1, "train_ddp.py"), (2, "train_fsdp2.py")])
def test_a_crafted_checkpoint_is_refused_in_a_line(dataset, finished, tmp_path, nproc, script):
    run, made = Path(shutil.copytree(finished, tmp_path / "out")), tmp_path / "made"

    def change(metadata):
        metadata.planner_data = Evil(made)
        return metadata

    crafted(run, change)
    flags = FLAGS | {"max_steps": 4}
    said = train(dataset, run, nproc, expect=2, script=script, **flags)
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {run}/checkpoint-2/.metadata: refused: it names ")
    assert ".mkdir, which is no part of a checkpoint" in error
    said = train(dataset, tmp_path / "new", expect=2, **flags, resume_from_checkpoint=run / "checkpoint-2")
    assert "refused: it names " in said
    assert not made.exists()


def test_metadata_that_point_elsewhere_or_are_none_are_refused(finished, tmp_path):
    def elsewhere(metadata):
        metadata.storage_data[MetadataIndex("x")] = _StorageInfo("../../shadow", 0, 1)
        return metadata

    for number, (change, reason) in enumerate(
        ((elsewhere, "its shard '../../shadow' is elsewhere"), (lambda _: [1], "it is no metadata"))
    ):
        run = Path(shutil.copytree(finished, tmp_path / str(number)))
        with pytest.raises(UserError, match=rf"\.metadata: refused: {reason}"):
            Reader(crafted(run, change)).read_metadata()
    (run / "checkpoint-2" / ".metadata").write_bytes(b"\x80\x05nonsense")
    with pytest.raises(UserError, match=r"\.metadata: refused: "):
        Reader(run / "checkpoint-2").read_metadata()


def test_metadata_are_read_as_they_were_written(finished):
    ours = Reader(finished / "checkpoint-2").read_metadata()
    with open(finished / "checkpoint-2" / ".metadata", "rb") as file:
        theirs = pickle.load(file)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert len(ours.state_dict_metadata) > 50


def test_a_value_that_is_more_than_a_value_is_not_read(tmp_path):
    buffer = io.BytesIO()
    torch.save({"lr": Evil(tmp_path / "made")}, buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        Planner().load_bytes(None, buffer)
    assert not (tmp_path / "made").exists()
