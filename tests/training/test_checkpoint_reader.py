"""The files of a checkpoint: what other programs read in them, and what this one reads."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException

from common.checkpoint.reader import Reader, open_checkpoint
from common.checkpoint.writer import METADATA, Writer
from common.cli import UserError
from extras.interop.stored_tensors import StoredTensors
from tests.training.checkpoint_fixtures import files_of
from tests.training_fixtures import checkpoint_state, train


@pytest.fixture(scope="module")
def of_two(dataset, tmp_path_factory):
    """A checkpoint of two ranks, which have half of each weight."""
    out = tmp_path_factory.mktemp("of_two") / "out"
    train(dataset, out, 2, script="train_fsdp2.py", max_steps=1, save_final_model=False)
    return out / "checkpoint-1"


def test_shards_are_safetensors_of_each_rank(of_two):
    stored, rows = StoredTensors(open_checkpoint(of_two)), {}
    for rank in (0, 1):
        with safe_open(of_two / f"__{rank}_0.distcp", "pt") as shard:
            parts = json.loads(shard.metadata()["DCP_SHARDING_INFO"])
            for name in shard.keys():  # noqa: SIM118  (it is no dict)
                part, (first, *_) = shard.get_tensor(name), [*parts[name]["saved_offsets"], 0]
                whole = stored.read(name)
                assert torch.equal(whole[first : first + len(part)] if whole.dim() else whole, part)
                rows[name] = rows.get(name, 0) + (len(part) if whole.dim() else 1)
    assert rows == {name: shape[0] if shape else 1 for name, shape in stored.shapes.items()}
    assert len(rows) > 50


def test_stored_tensors_equal_torch_reader(of_two, tmp_path):
    stored, state = StoredTensors(open_checkpoint(of_two)), checkpoint_state(of_two, tmp_path)
    moments = {f"{name}.{key}": t for name, of in state["optimizer"]["state"].items() for key, t in of.items()}
    theirs = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    theirs |= {f"optimizer.state.{name}": tensor for name, tensor in moments.items()}
    assert theirs.keys() == stored.shapes.keys()
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"])
def test_writer_and_reader_keep_any_dtype_and_stride(tmp_path, dtype):
    tensor = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)).t()
    state = {"byte": torch.tensor([7], dtype=torch.uint8), "x": tensor, "empty": tensor[:0], "one": tensor[1, 1]}
    dcp.save(state, storage_writer=Writer(tmp_path), no_dist=True)
    stored = StoredTensors(Reader(tmp_path, {path.name: path.stat().st_size for path in tmp_path.iterdir()}))
    with safe_open(tmp_path / "__0_0.distcp", "pt") as shard:
        for name, expected in state.items():
            for found in (stored.read(name), shard.get_tensor(name)):
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("other", [3, "text", {"of": ["objects"]}])
def test_writer_refuses_what_is_no_tensor(tmp_path, other):
    """torch's HuggingFaceStorageWriter writes a file that nothing reads (tests/test_good_guesses.py)."""
    with pytest.raises(CheckpointException) as error:
        dcp.save({"x": torch.ones(2), "n": other}, storage_writer=Writer(tmp_path), no_dist=True)
    assert "only tensors are saved" in str(error.value)
    assert not (tmp_path / METADATA).exists()


def test_shards_of_the_same_run_are_the_same_bytes(short_run, dataset, tmp_path):
    train(dataset, tmp_path / "out", max_steps=2, save_final_model=False)
    one, two = (files_of(out / "checkpoint-2") for out in (short_run, tmp_path / "out"))
    assert all(one[name] == two[name] for name in ("__0_0.distcp", "metadata.json", "config.json"))


def test_reader_opens_no_file_that_the_manifest_does_not_list(short_run):
    sizes = {path.name: path.stat().st_size for path in (short_run / "checkpoint-2").glob("*.distcp")}
    with pytest.raises(UserError, match="refused: not in the manifest"):
        Reader(short_run / "checkpoint-2", sizes)
