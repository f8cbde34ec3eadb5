"""A checkpoint is data: whatever is in one, reading it ends with a model or one line, and touches nothing else."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from common.checkpoint import files as files
from common.checkpoint.files import reason_of
from common.checkpoint.reader import open_checkpoint
from common.cli import UserError
from common.models.esm2.config import load_config
from common.training.trainer_state import TrainerState
from extras.export import choose, export
from extras.interop.stored_tensors import StoredTensors
from tests.forked import run_script
from tests.guarded import guarded
from tests.training.hostile import CASES, WEIGHT
from tests.training.hostile_changes import CANARY, SHARD, Case, vouch
from tests.training_fixtures import train

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def copied(short_run, earlier_run, tmp_path) -> Callable[[bool], Path]:
    """What copies a good one, to be changed (earlier: in format 1); a canary lies beside it."""
    (tmp_path / CANARY).write_text("alive")
    runs = (short_run, earlier_run)
    return lambda earlier: Path(shutil.copytree(runs[earlier] / "checkpoint-2", tmp_path / "checkpoint-2"))


@pytest.fixture(scope="module", autouse=True)
def warm(short_run, earlier_run, tmp_path_factory) -> None:
    """What libraries do once in a process is done before anything is looked at."""
    for out in (short_run, earlier_run):
        read_all(out / "checkpoint-2", tmp_path_factory.mktemp("warm") / "model")


def read_all(checkpoint: Path, out: Path | None = None, tensors: bool = True) -> None:
    """All that export and resume read of it; out: where to export. UserError as they have it."""
    choose(checkpoint)
    if out:
        export(checkpoint, out)
    load_config(str(checkpoint))
    TrainerState.read(files.read_listed(checkpoint, "trainer_state.json"), str(checkpoint))
    if tensors:
        stored = StoredTensors(open_checkpoint(checkpoint))
        for name in stored.shapes:
            stored.read(name)
        try:
            dcp.load({WEIGHT: torch.zeros(64, 32)}, storage_reader=open_checkpoint(checkpoint), no_dist=True)
        except CheckpointException as error:
            raise UserError(reason_of(error)) from error


def outcome(checkpoint: Path, **how) -> str | None:
    """What is refused of it, None where nothing is; asserts that nothing but it and the export is touched."""
    canary, out = checkpoint.parent / CANARY, checkpoint.parent / "model"
    said = None
    with guarded(checkpoint, out, out.with_name("model.partial")) as strays:
        try:
            read_all(checkpoint, **how)
        except UserError as error:
            said = str(error)
    assert strays == []
    assert canary.read_text() == "alive"
    assert said is None or (said.isprintable() and len(said) < 2000)
    return said


@pytest.mark.parametrize("earlier", [False, True])
def test_intact_checkpoint_is_read(copied, earlier):
    checkpoint = copied(earlier)
    assert outcome(checkpoint, out=checkpoint.parent / "model") is None
    assert (checkpoint.parent / "model" / "model.safetensors").exists()
    if earlier:
        (checkpoint / "metadata.json").unlink()  # as the earliest versions wrote them
        vouch(checkpoint)
        assert outcome(checkpoint) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_checkpoint_is_refused_in_one_line(copied, case: Case):
    checkpoint = copied(case.earlier)
    before = {path.name for path in checkpoint.parent.iterdir()}
    case(checkpoint)
    said = outcome(checkpoint, out=checkpoint.parent / "model")
    if not case.reason:  # harmless
        assert said is None
        return
    assert said is not None, "read"
    assert re.search(case.reason, said), said
    assert {path.name for path in checkpoint.parent.iterdir()} - {"model"} == before


def mutated(data: bytes, choose: random.Random) -> bytes:
    """Cut short, with bytes flipped, or a part of it repeated or left out."""
    kind = choose.randrange(4)
    at = choose.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(choose.randint(1, 4)):
            changed[choose.randrange(len(data))] = choose.randrange(256)
        return bytes(changed)
    end = min(len(data), at + choose.randint(1, 40))
    return data[:end] + data[at:] if kind == 2 else data[:at] + data[end:]


@pytest.mark.parametrize(
    ("name", "count"),
    [(".metadata", 80), ("metadata.json", 80), ("manifest.json", 40), ("trainer_state.json", 40), ("config.json", 40)],
)
def test_mutated_file_is_refused_or_harmless(copied, name, count):
    checkpoint = copied(name == ".metadata")
    if name == ".metadata":
        (checkpoint / "metadata.json").unlink()
    vouch(checkpoint)
    good, refused = (checkpoint / name).read_bytes(), 0
    for seed in range(count):
        (checkpoint / name).write_bytes(mutated(good, random.Random(f"{name} {seed}")))
        if name != "manifest.json":
            vouch(checkpoint)
        refused += outcome(checkpoint, tensors="metadata" in name) is not None
    assert refused > count // 4


def test_mutated_shard_item_is_refused_or_harmless(copied):
    """What describes a tensor within a shard of format 1: the archive's headers and the pickle."""
    checkpoint = copied(True)
    metadata = json.loads((checkpoint / "metadata.json").read_text())
    _, begin, length = metadata["tensors"][WEIGHT]["chunks"][0][2:]
    good, refused = (checkpoint / SHARD).read_bytes(), 0
    for seed in range(60):
        choose = random.Random(seed)
        changed = bytearray(good)
        for _ in range(choose.randint(1, 4)):
            at = choose.choice((choose.randrange(600), length - 1 - choose.randrange(600)))
            changed[begin + at] = choose.randrange(256)
        (checkpoint / SHARD).write_bytes(changed)
        vouch(checkpoint)
        refused += outcome(checkpoint) is not None
    assert refused > 10


@pytest.mark.parametrize(
    "name", ["pickle: BUILD on an allowed class", "manifest: a FIFO as shard", "config: 1e9 layers"]
)
def test_export_of_hostile_checkpoint_is_one_line(copied, name):
    checkpoint = copied(BY_NAME[name].earlier)
    BY_NAME[name](checkpoint)
    done = run_script("extras.export", checkpoint, checkpoint.parent / "model")
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert done.stderr.endswith(f"{errors[0]}\n")
    assert re.search(BY_NAME[name].reason, errors[0])
    assert not (checkpoint.parent / "model").exists()


@pytest.mark.parametrize(
    "name", ["pickle: BUILD on an allowed class", "item: no archive", "metadata: bytes shared", "state: a list"]
)
def test_resume_from_hostile_checkpoint_is_one_line(copied, dataset, name):
    checkpoint = copied(BY_NAME[name].earlier)
    BY_NAME[name](checkpoint)
    said = train(dataset, checkpoint.parent, expect=2, max_steps=4, save_final_model=False)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(BY_NAME[name].reason, errors[0])
