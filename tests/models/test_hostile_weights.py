"""Directories of weights that somebody else made: refused in one line, or read as tensors and nothing else."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.cli import UserError
from common.models.esm2.config import esm2_config
from common.models.layers.hf_directory import INDEX, read_tensors
from tests.data_fixtures import environment, write_fasta
from tests.forked import run_script
from tests.guarded import guarded
from tests.models.reference import reference_model

SHARD = "model.safetensors"


@pytest.fixture
def directory(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}, tmp_path / "model" / SHARD)
    save_file({"secret": torch.ones(1)}, tmp_path / "elsewhere.safetensors")
    return tmp_path / "model"


def refusal(directory: Path) -> str | None:
    """Why it is refused, None where it is read; asserts that nothing else is opened."""
    with guarded(directory) as strays:
        try:
            read_tensors(str(directory))
            said = None
        except UserError as error:
            said = str(error)
    assert strays == []
    assert said is None or (said.isprintable() and str(directory) in said)
    return said


def with_header(header: bytes | dict, length: int | None = None, data: bytes = bytes(40)) -> bytes:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def one(dtype="F32", shape=(10,), offsets=(0, 40)) -> dict:
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


HEADERS = {
    "no bytes": b"",
    "a header of 8 EiB": with_header(b"{}", (1 << 63) - 1),
    "a header of 16 EiB": with_header(b"{}", (1 << 64) - 1),
    "a header of 1 GB": with_header(b"{}", 10**9),
    "a header that is a list": with_header(b"[]"),
    "a header that is deep": with_header(100_000 * b"["),
    "a header that is no text": with_header(b"\xff\xfe"),
    "offsets beyond the end": with_header(one(offsets=(0, 4000), shape=(1000,))),
    "offsets that go back": with_header(one(offsets=(40, 0))),
    "offsets that are negative": with_header(one(offsets=(-40, 0))),
    "a shape of 4 TB": with_header(one(shape=(10**12,))),
    "a shape beyond all numbers": with_header(one(shape=(1 << 62, 1 << 62))),
    "a shape smaller than its bytes": with_header(one(shape=(2,))),
    "a dtype of code": with_header(one(dtype="PICKLE")),
    "bytes of two": with_header(one() | {"b": one()["a"]}),
    "a hole": with_header(one(shape=(1,), offsets=(36, 40))),
    "a pickle": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00evil\x85R.",
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_safetensors_are_refused(directory, name):
    (directory / SHARD).write_bytes(HEADERS[name])
    assert "cannot be read" in refusal(directory)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"a": "../elsewhere.safetensors"}, "names '../elsewhere.safetensors', which is no file of the directory"),
        ({"a": "/dev/zero"}, "names '/dev/zero', which is no file of the directory"),
        ({"a": "x/model.safetensors"}, "names 'x/model.safetensors', which is no file of the directory"),
        ({"a": "a\0b"}, "which is no file of the directory"),
        ({"a": ".."}, "which is no file of the directory"),
        ({"a": ""}, "which is no file of the directory"),
        ({"a": [SHARD]}, "not an index of safetensors shards"),
        ([SHARD], "not an index of safetensors shards"),
        ({"a": "other.safetensors"}, "no such file"),
    ],
)
def test_hostile_index_outside_directory_is_refused(directory, content, reason):
    (directory / INDEX).write_text(json.dumps({"weight_map": content}))
    assert reason in refusal(directory)


@pytest.mark.parametrize("name", [SHARD, INDEX])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_hostile_irregular_files_are_refused(directory, name, make):
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    with guarded(), pytest.raises(UserError, match=r"cannot be read: .*no regular file|not an index"):
        read_tensors(str(directory))  # /dev/zero is opened, and not read


def test_symlinks_of_hub_cache_and_users_are_followed(directory, tmp_path):
    """What they lead to is read as tensors or not at all."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blob = tmp_path / "models--a--b" / "blobs" / "4567"
    for each in (snapshot, blob.parent):
        each.mkdir(parents=True)
    shutil.move(directory / SHARD, blob)
    (snapshot / SHARD).symlink_to(os.path.relpath(blob, snapshot))
    assert read_tensors(str(snapshot))[1].keys() == {"a", "b"}
    (directory / SHARD).symlink_to(blob)
    assert read_tensors(str(directory))[1].keys() == {"a", "b"}
    (directory / SHARD).unlink()
    (directory / SHARD).symlink_to(__file__)
    with pytest.raises(UserError, match="cannot be read"):
        read_tensors(str(directory))


def test_mutated_header_is_refused_or_harmless(directory):
    good, refused = (directory / SHARD).read_bytes(), 0
    size = 8 + struct.unpack("<Q", good[:8])[0]
    for seed in range(200):
        choose = random.Random(seed)
        changed = bytearray(good)
        for _ in range(choose.randint(1, 3)):
            changed[choose.randrange(size)] = choose.randrange(256)
        (directory / SHARD).write_bytes(changed[: choose.choice((len(good), choose.randrange(len(good))))])
        refused += refusal(directory) is not None
    assert refused > 100


@pytest.mark.parametrize("change", ["index", "FIFO", "header"])
def test_embed_of_hostile_weights_is_one_line(directory, tmp_path, change):
    reference_model(esm2_config(1, 32, 4), seed=5).save_pretrained(directory)
    if change == "index":
        (directory / INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    elif change == "FIFO":
        (directory / SHARD).unlink()
        os.mkfifo(directory / SHARD)
    else:
        (directory / SHARD).write_bytes(HEADERS["a shape of 4 TB"])
    fasta = write_fasta(tmp_path / "my.fasta", [("a", "MKV")])
    flags = ("--model_name_or_path", directory, "--fasta", fasta, "--output_dir", tmp_path / "out")
    done = run_script("embed.py", *flags, env=environment())
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, len(errors)) == (2, 1), done.stderr
    assert str(directory) in errors[0]
