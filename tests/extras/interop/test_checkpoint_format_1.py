"""Checkpoints of before 0.5, by metadata.json or by pickle: as torch reads them, and as today's runs resume them."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from common.checkpoint.metadata import Refused
from common.checkpoint.reader import open_checkpoint
from extras.interop.checkpoint_format_1 import EarlierReader
from extras.interop.inert_pickle import Call, Name, loads
from extras.interop.pickled_metadata import content_of_pickle
from extras.interop.stored_tensors import StoredTensors
from tests.training.checkpoint_fixtures import exported, files_of
from tests.training.format_1 import write_format_1
from tests.training.hostile import old
from tests.training.hostile_changes import vouch
from tests.training.hostile_pickles import Evil
from tests.training_fixtures import losses, on_ranks, train

FLAGS = {"max_steps": 4, "save_final_model": False}


def sizes_of(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


@pytest.fixture
def run(earlier_run, tmp_path) -> Path:
    """A copy of its directory."""
    return Path(shutil.copytree(earlier_run, tmp_path / "out"))


def test_metadata_json_equals_pickle(earlier_run):
    checkpoint = earlier_run / "checkpoint-2"
    data = (checkpoint / ".metadata").read_bytes()
    content = json.loads((checkpoint / "metadata.json").read_text())
    assert content_of_pickle(data) == content
    ours, theirs = open_checkpoint(checkpoint).metadata, pickle.loads(data)
    names = {name for name in theirs.state_dict_metadata if not name.startswith("optimizer.param_groups.")}
    assert ours.state_dict_metadata == {name: theirs.state_dict_metadata[name] for name in names}
    assert ours.storage_data.keys() == {index for index in theirs.storage_data if index.fqn in names}
    assert len(names) > 50


def test_stored_tensors_equal_torch_load(earlier_run, short_run):
    stored = StoredTensors(open_checkpoint(earlier_run / "checkpoint-2"))
    of_today = StoredTensors(open_checkpoint(short_run / "checkpoint-2"))
    theirs = {name: torch.empty(shape) for name, shape in stored.shapes.items()}
    dcp.load(theirs, checkpoint_id=str(earlier_run / "checkpoint-2"), no_dist=True)
    assert of_today.shapes == stored.shapes
    for name, tensor in theirs.items():
        assert torch.equal(stored.read(name), tensor)
        assert torch.equal(of_today.read(name), tensor)
    assert len(theirs) > 50


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_reader_reads_any_dtype_and_stride(tmp_path, dtype):
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)).t()
    state = {"x": tensor, "empty": tensor[:0], "one": tensor[1, 1]}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    stored = StoredTensors(EarlierReader(tmp_path, sizes_of(tmp_path)))
    for name, expected in state.items():
        found = stored.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.float(), expected.float())


def _write_sharded(out: Path) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(15.0).reshape(5, 3)
    write = {"whole": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(3.0)}
    if dist.get_rank():
        dcp.save(write, storage_writer=dcp.FileSystemWriter(out))
    else:
        write_format_1(out, write)
    read = {"whole": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)])}
    dist.barrier()
    dcp.load(read, storage_reader=EarlierReader(out, sizes_of(out)))
    assert torch.equal(read["whole"].full_tensor(), whole)
    dist.destroy_process_group()


def test_reader_reads_shards_of_two_ranks(tmp_path):
    codes, said = on_ranks(2, _write_sharded, tmp_path)
    assert codes == [0, 0], said
    stored = StoredTensors(EarlierReader(tmp_path, sizes_of(tmp_path)))
    assert torch.equal(stored.read("whole"), torch.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize("index", ["metadata.json", ".metadata"])
@pytest.mark.parametrize(("nproc", "script"), [(1, "train_ddp.py"), (2, "train_fsdp2.py")])
def test_run_resumes_from_format_1_bit_identically(run, short_run, dataset, tmp_path, index, nproc, script):
    if index == ".metadata":  # as the earliest have it
        (run / "checkpoint-2" / "metadata.json").unlink()
        vouch(run / "checkpoint-2")
    today = Path(shutil.copytree(short_run, tmp_path / "today"))
    for directory in (run, today):
        said = train(dataset, directory, nproc, script=script, **FLAGS, packs_per_step=2)
        assert "Resuming after step 2" in said
    assert losses(run) == losses(today)
    written, expected = (files_of(out / "checkpoint-4") for out in (run, today))
    assert json.loads(written["manifest.json"])["format_version"] == 2
    for rank in range(nproc):
        assert written[f"__{rank}_0.distcp"] == expected[f"__{rank}_0.distcp"]


def test_export_and_start_of_format_1_equal_those_of_today(run, short_run, dataset, tmp_path):
    flags = FLAGS | {"max_steps": 1}
    for name, out in (("earlier", run), ("today", short_run)):
        exported(out / "checkpoint-2", tmp_path / f"{name} exported")
        train(dataset, tmp_path / name, model_name_or_path=out / "checkpoint-2", **flags)
    assert files_of(tmp_path / "earlier exported") == files_of(tmp_path / "today exported")
    assert losses(tmp_path / "earlier") == losses(tmp_path / "today")


def test_crafted_checkpoint_ends_run_on_two_ranks(run, dataset, tmp_path):
    made = tmp_path / "made"
    old(lambda metadata: setattr(metadata, "planner_data", Evil(str(made))))(run / "checkpoint-2")
    vouch(run / "checkpoint-2")
    said = train(dataset, run, 2, expect=2, script="train_fsdp2.py", **FLAGS)
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {run}/checkpoint-2/.metadata: refused: it names ")
    assert ".mkdir, which is no part of a checkpoint" in error
    assert not made.exists()


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
