"""Checkpoints as they are read: by JSON or, of earlier versions, by pickle, and as torch itself reads them."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from common.cli import UserError
from common.training.checkpoint_metadata import Refused, decode, encode
from common.training.checkpoint_reader import Reader, StoredTensors
from common.training.inert_pickle import Call, Name, loads
from extras.interop.pickled_metadata import content_of_pickle
from tests.training.checkpoint_fixtures import files_of
from tests.training.hostile import old, vouch
from tests.training.hostile_pickles import Evil
from tests.training_fixtures import train

FLAGS = {"max_steps": 4, "save_final_model": False}


@pytest.fixture
def run(short_run, tmp_path) -> Path:
    """A copy of its directory."""
    return Path(shutil.copytree(short_run, tmp_path / "out"))


def test_metadata_json_equals_pickle(short_run):
    checkpoint = short_run / "checkpoint-2"
    theirs = pickle.loads((checkpoint / ".metadata").read_bytes())
    content = json.loads((checkpoint / "metadata.json").read_text())
    assert content == encode(theirs)
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    ours, of_pickle = (
        decode(each, sizes) for each in (content, content_of_pickle((checkpoint / ".metadata").read_bytes()))
    )
    assert ours.state_dict_metadata == of_pickle.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == of_pickle.storage_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    assert len(ours.state_dict_metadata) > 50


def test_stored_tensors_equal_torch_load(short_run):
    stored = StoredTensors(short_run / "checkpoint-2")
    theirs = {name: torch.empty(shape) for name, shape in stored.shapes.items()}
    dcp.load(theirs, checkpoint_id=str(short_run / "checkpoint-2"), no_dist=True)
    for name, tensor in theirs.items():
        assert torch.equal(stored.read(name), tensor)
    assert len(theirs) > 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_stored_tensors_reads_any_dtype_and_stride(tmp_path, dtype):
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)).t()
    dcp.save({"x": tensor, "empty": tensor[:0], "one": tensor[1, 1]}, checkpoint_id=str(tmp_path), no_dist=True)
    (tmp_path / "manifest.json").write_text(json.dumps({"format_version": 1, "model": {}, "files": {}}))
    vouch(tmp_path)
    stored = StoredTensors(tmp_path)
    for name, expected in (("x", tensor), ("empty", tensor[:0]), ("one", tensor[1, 1])):
        found = stored.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.float(), expected.float())


def test_checkpoint_of_earlier_version_resumes_bit_identically(run, dataset, tmp_path):
    """One with .metadata alone. An earlier version reads today's, too: the format's number is the same."""
    earlier = Path(shutil.copytree(run, tmp_path / "earlier"))
    (earlier / "checkpoint-2" / "metadata.json").unlink()
    vouch(earlier / "checkpoint-2")
    assert json.loads((earlier / "checkpoint-2" / "manifest.json").read_text())["format_version"] == 1
    shards = []
    for directory in (run, earlier):
        train(dataset, directory, **FLAGS)
        shards.append(files_of(directory / "checkpoint-4")["__0_0.distcp"])
    numbers = [_numbers(shard, Reader(d / "checkpoint-4")) for shard, d in zip(shards, (run, earlier), strict=True)]
    assert numbers[0] == numbers[1]


def _numbers(shard: bytes, reader: Reader) -> dict:
    """{tensor or value: its bytes, without the random id that torch.save adds}."""
    found = {}
    for index, stored in reader.read_metadata().storage_data.items():
        with zipfile.ZipFile(io.BytesIO(shard[stored.begin : stored.begin + stored.length])) as archive:
            names = [name for name in archive.namelist() if "serialization_id" not in name]
            found[index.fqn] = [archive.read(name) for name in names]
    return found


def test_crafted_checkpoint_ends_run_on_two_ranks(run, dataset, tmp_path):
    made = tmp_path / "made"
    old(lambda metadata: setattr(metadata, "planner_data", Evil(str(made))))(run / "checkpoint-2")
    vouch(run / "checkpoint-2")
    said = train(dataset, run, 2, expect=2, script="train_fsdp2.py", **FLAGS)
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {run}/checkpoint-2/.metadata: refused: it names ")
    assert ".mkdir, which is no part of a checkpoint" in error
    assert not made.exists()


def test_reader_opens_no_file_that_the_manifest_does_not_list(run):
    manifest = run / "checkpoint-2" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"]["metadata.json"], content["files"][".metadata"]
    manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match="refused: not in the manifest"):
        Reader(run / "checkpoint-2").read_metadata()


def test_inert_pickle_makes_plain_values():
    value = {"a": [1, -2.5, None, True, ("x", ())], "b": {"c": 1 << 40, 3: []}}
    for protocol in (2, 3, 4, 5):
        assert loads(pickle.dumps(value, protocol)) == value
    names = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")}
    call = loads(pickle.dumps(Path("/a/b")), names)
    assert type(call) is Call
    assert type(call.of) is Name
    assert call.arguments == ("/", "a", "b") or call.arguments == ("/a/b",)
    with pytest.raises(Refused, match="it names"):
        loads(pickle.dumps(Path("/a/b")))
