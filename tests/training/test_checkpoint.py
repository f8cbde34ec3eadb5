"""Checkpoints: what is in them, when they may be used, and that neither damage nor a late step ruins a run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from common.checkpoint import files
from common.checkpoint.files import damage_of, newest_usable
from common.distributed.world import World
from common.files.runs import list_checkpoints
from common.files.safe_files import read_json, size_and_crc
from tests.live_runs import LiveRun, assert_same_run, newest_step, outcome
from tests.training.checkpoint_fixtures import DAMAGES, FLAGS, checkpointer_of_a_small_model, names, take_steps
from tests.training_fixtures import _main, flags_of, losses, on_ranks, rows, train

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory) -> Path:
    """A run of 6 steps with checkpoints 2, 4 and 6."""
    out = tmp_path_factory.mktemp("finished") / "out"
    train(dataset, out, **FLAGS)
    return out


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def test_checkpoint_holds_canonical_names_and_manifest(finished, dataset, tmp_path):
    assert names(finished) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    directory = finished / "checkpoint-4"
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest.keys() == {"format_version", "step", "model", "files"}
    assert (manifest["format_version"], manifest["step"]) == (2, 4)
    assert manifest["model"]["hidden_size"] == 32
    files = {path.name for path in directory.iterdir()} - {"manifest.json"}
    expected = {"metadata.json", "__0_0.distcp", "trainer_state.json", "config.json"}
    assert files == expected == manifest["files"].keys()
    for name, recorded in manifest["files"].items():
        assert recorded == size_and_crc(directory / name)
    assert json.loads((directory / "trainer_state.json").read_text())["step"] == 4

    train(dataset, tmp_path / "two", nproc=2, **FLAGS | {"max_steps": 2})
    of_two, of_one = (set(outcome(out, 2, tmp_path)) for out in (tmp_path / "two", finished))
    assert of_two == of_one
    # The same names as the unwrapped model's own.
    assert "model/encoder.layers.0.self_attention.layernorm_qkv.weight" in of_one
    assert not [name for name in of_two if "module." in name]


def test_checkpoint_async_save_equals_sync_save(finished, dataset, tmp_path):
    train(dataset, tmp_path / "sync", **FLAGS, async_save=False)
    for step in (2, 4, 6):
        assert_same_run(tmp_path / "sync", finished, step, tmp_path)


def _later_steps(out: Path) -> None:
    checkpointer = checkpointer_of_a_small_model(out)
    model, optimizer = checkpointer.model, checkpointer.optimizer
    expected = []
    for step in (1, 2, 3):
        take_steps(checkpointer)
        moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
        expected.append(([p.detach().clone() for p in model.parameters()], moments))
        checkpointer.save(step, {"step": step})
        for _ in range(20):  # while the writer is at work
            take_steps(checkpointer)
    checkpointer.wait()
    for step, (parameters, moments) in enumerate(expected, 1):
        checkpointer.load(out / f"checkpoint-{step}")
        assert read_json(out / f"checkpoint-{step}" / "trainer_state.json") == {"step": step}
        assert all(map(torch.equal, model.parameters(), parameters))
        assert all(map(torch.equal, (s["exp_avg"] for s in optimizer.state.values()), moments))


def test_checkpoint_save_ignores_later_steps(tmp_path):
    codes, said = on_ranks(1, _later_steps, tmp_path)
    assert codes == [0], said
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def _load_beside_gradients(out: Path) -> None:
    saved, fresh = checkpointer_of_a_small_model(out), checkpointer_of_a_small_model(out, ALONE)
    take_steps(saved)
    saved.save(1, {})
    saved.wait()
    parameters = list(fresh.model.parameters())
    for parameter in parameters:  # `Strategy.keep_gradients`
        parameter.grad = torch.ones_like(parameter)
    kept = [parameter.grad for parameter in parameters]
    fresh.load(out / "checkpoint-1")
    moments = [[s["exp_avg"] for s in each.optimizer.state.values()] for each in (saved, fresh)]
    assert len(moments[1]) == len(parameters)
    assert all(map(torch.equal, *moments))
    assert all(parameter.grad is gradient for parameter, gradient in zip(parameters, kept, strict=True))
    assert all(gradient.eq(1).all() for gradient in kept)


def test_checkpoint_loads_moments_beside_kept_gradients(tmp_path):
    codes, said = on_ranks(1, _load_beside_gradients, tmp_path)
    assert codes == [0], said


def _count_writers(out: Path) -> None:
    checkpointer = checkpointer_of_a_small_model(out)
    take_steps(checkpointer)
    most = 0
    for step in range(1, 9):
        checkpointer.save(step, {})
        most = max(most, sum(thread.name == "checkpoint writer" for thread in threading.enumerate()))
        assert len(list(out.glob("tmp-checkpoint-*"))) <= 1
    checkpointer.wait()
    assert most == 1


def test_checkpoint_has_one_save_in_flight(tmp_path):
    codes, said = on_ranks(1, _count_writers, tmp_path)
    assert codes == [0], said
    assert len(names(tmp_path)) == 8


def test_checkpoint_limit_always_keeps_an_intact_one(dataset, tmp_path):
    """Killed again and again while it saves every step and keeps one: a whole one is there each time."""
    out, generator = tmp_path / "out", random.Random(3)
    flags = FLAGS | {"max_steps": 400, "save_steps": 1, "save_total_limit": 1}
    for _ in range(8):
        with LiveRun(dataset, out, tmp_path / "logs", **flags) as run:
            reached = newest_step(out)
            run.until(lambda n=reached: newest_step(out) > n)
            time.sleep(generator.uniform(0, 0.05))
            run.signal(signal.SIGKILL)
            assert run.end() == [-signal.SIGKILL]
        assert newest_usable(out, ALONE) is not None
        assert len(names(out)) <= 3  # it, one not yet removed, one being written or removed
    train(dataset, out, **flags, stop_at_step=newest_step(out) + 1)
    assert len(names(out)) == 1
    train(dataset, tmp_path / "three", **FLAGS | {"save_steps": 1, "save_total_limit": None})  # what it is without
    assert names(tmp_path / "three") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_checkpoint_detects_damage(run, damage):
    assert damage_of(run / "checkpoint-6", ALONE) is None
    DAMAGES[damage](run / "checkpoint-6")
    assert damage_of(run / "checkpoint-6", ALONE)
    assert newest_usable(run, ALONE) == run / "checkpoint-4"


@pytest.fixture(scope="module")
def of_three(dataset, tmp_path_factory) -> Path:
    """The same run on three ranks, which have a shard each."""
    out = tmp_path_factory.mktemp("of_three") / "out"
    train(dataset, out, nproc=3, script="train_fsdp2.py", **FLAGS, packs_per_step=3)
    return out


def _choose_and_count(out: Path, model: dict) -> None:
    """On a rank: which is the newest usable one, and which files were read for it."""
    read = []
    check_file = files.check_file
    files.check_file = lambda path, recorded: (read.append(path.name), check_file(path, recorded))
    world = World(int(os.environ["RANK"]), 0, int(os.environ["WORLD_SIZE"]), torch.device("cpu"))
    torch.distributed.init_process_group("gloo")
    newest = newest_usable(out, world)
    print(json.dumps([newest and newest.name, read]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("damaged", [None, "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "metadata.json"])
def test_checkpoint_ranks_verify_shares_and_agree(of_three, tmp_path, damaged):
    out = Path(shutil.copytree(of_three, tmp_path / "out"))
    manifest = json.loads((out / "checkpoint-6/manifest.json").read_text())
    if damaged:
        os.truncate(out / "checkpoint-6" / damaged, 1000)
    codes, said = on_ranks(2, _choose_and_count, out, manifest["model"])
    assert codes == [0, 0], "\n".join(said)
    (name, read), (other, more) = (json.loads(text.splitlines()[-1]) for text in said)
    assert name == other == ("checkpoint-4" if damaged else "checkpoint-6")
    rounds = 2 if damaged else 1
    assert sorted(read + more) == sorted([*manifest["files"]] * rounds), "each file once"
    shards = [sum(name.endswith("distcp") for name in of) for of in (read, more)]
    assert max(shards) - min(shards) <= rounds
    if damaged:
        assert f"checkpoint-6: skipped: {damaged} is damaged (1000 bytes" in said[0]


def test_checkpoint_skips_corrupt_shard_for_older_one(of_three, dataset, tmp_path):
    out = Path(shutil.copytree(of_three, tmp_path / "out"))
    for shard in (out / "checkpoint-6").glob("*.distcp"):
        shard.unlink()
    said = train(dataset, out, nproc=2, **FLAGS, packs_per_step=2 * 3)
    assert said.count("checkpoint-6: skipped: __0_0.distcp is missing or unreadable (No such file or directory)") == 1
    assert "Resuming after step 4" in said
    for checkpoint in out.glob("checkpoint-*"):
        (checkpoint / "__1_0.distcp").write_bytes(b"torn")
    codes, said = on_ranks(2, _main, flags_of(dataset, out, **FLAGS))
    assert codes == [2, 2]
    assert "".join(said).count("error: ") == "".join(said).count("none of its checkpoints is whole") == 1


def test_checkpoint_sets_damaged_newest_aside(run, finished, dataset, tmp_path):
    """Also with --save_total_limit 1: the damaged one must not count as the newest and crowd out the whole ones."""
    DAMAGES["a flipped byte"](run / "checkpoint-6")
    (run / "tmp-checkpoint-5").mkdir()
    (run / "tmp-checkpoint-5" / "__0_0.distcp").write_bytes(b"torn")
    said = train(dataset, run, **FLAGS, save_total_limit=1)
    assert "checkpoint-6: skipped: __0_0.distcp is damaged" in said
    assert "Resuming after step 4" in said
    assert names(run) == ["checkpoint-6", "superseded-checkpoint-6"]
    assert_same_run(run, finished, 6, tmp_path)


def test_checkpoint_newest_is_by_number(run, dataset):
    os.utime(run / "checkpoint-2")
    (run / "checkpoint-4").rename(run / "checkpoint-10")  # text order would put it first
    assert newest_usable(run, ALONE).name == "checkpoint-10"
    assert [step for step, _ in list_checkpoints(run)] == [10, 6, 2]


def test_checkpoint_refuses_step_0_if_none_is_intact(run, finished, dataset, tmp_path):
    """A run that silently started at step 0 would throw away what can perhaps be rescued."""
    for checkpoint in run.glob("checkpoint-*"):
        DAMAGES["a shard cut short"](checkpoint)
    said = train(dataset, run, expect=2, **FLAGS)
    assert said.count("error: ") == 1
    assert "none of its checkpoints is whole (checkpoint-6: __0_0.distcp is damaged" in said
    assert names(run) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    train(dataset, run, **FLAGS, resume_from_checkpoint="False")
    assert names(run) == sorted([*names(finished), *(f"superseded-{name}" for name in names(finished))])
    assert_same_run(run, finished, 6, tmp_path)
    for checkpoint in run.glob("checkpoint-*"):
        DAMAGES["no manifest"](checkpoint)
    train(dataset, run, **FLAGS, overwrite_output_dir=True)
    assert names(run) == names(finished)


def test_checkpoint_refuses_step_0_if_all_are_gone(run, finished, dataset):
    """The user moved or deleted them, of a finished or an unfinished run."""
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    before = (run / "metrics.jsonl").read_text()
    for left in ("there is train_results.json", "one was saved here"):
        said = train(dataset, run, expect=2, **FLAGS)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert f"{run}: no checkpoint is left of an earlier run ({left}): put it back, or" in errors[0]
        assert (run / "metrics.jsonl").read_text() == before
        (run / "train_results.json").unlink(missing_ok=True)
    train(dataset, run, **FLAGS, resume_from_checkpoint="false", stop_at_step=1)
    shutil.rmtree(run / "checkpoint-1")
    train(dataset, run, **FLAGS, overwrite_output_dir=True)
    assert losses(run) == losses(finished)


@pytest.mark.parametrize("flags", [{}, {"resume_from_checkpoint": "false"}, {"overwrite_output_dir": True}], ids=str)
def test_checkpoint_kill_before_first_starts_over(run, finished, dataset, tmp_path, flags):
    """By the same command, also where it had begun to take an earlier run's place."""
    out = run if flags else tmp_path / "new"
    with LiveRun(dataset, out, tmp_path / "logs", **FLAGS | {"max_steps": 500, "save_steps": 400}, **flags) as live:
        live.until_said("step: 3/500")
        live.signal(signal.SIGKILL)
        assert live.end() == [-signal.SIGKILL]
    (out / "tmp-checkpoint-4").mkdir()
    assert not list(out.glob("checkpoint-*"))
    train(dataset, out, **FLAGS, **flags)
    assert [row["step"] for row in rows(out)] == list(range(1, 7))
    assert_same_run(out, finished, 6, tmp_path)


def test_checkpoint_resumes_from_named_or_none(run, finished, dataset, tmp_path):
    """Later checkpoints are of another trajectory and set aside, or a restart would resume from them."""
    said = train(dataset, run, **FLAGS, resume_from_checkpoint=run / "checkpoint-2")
    assert "Resuming after step 2" in said
    assert names(run) == sorted([*names(finished), "superseded-checkpoint-4", "superseded-checkpoint-6"])
    assert_same_run(run, finished, 6, tmp_path)
    said = train(dataset, tmp_path / "other", **FLAGS, resume_from_checkpoint=finished / "checkpoint-4")
    assert [row["step"] for row in rows(tmp_path / "other")] == [5, 6]
    assert losses(tmp_path / "other") == losses(finished)[4:]
    said = train(dataset, run, **FLAGS, resume_from_checkpoint="False")
    assert "Resuming" not in said
    assert_same_run(run, finished, 6, tmp_path)


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        ({"seed": 7}, ["seed 42 (now 7)"]),
        ({"max_seq_length": 64}, ["max_seq_length 128 (now 64)", "tokens_per_pack 512 (now 256)"]),
        ({"max_train_samples": 100}, ["the data have changed", "240 records; now", "100 records)"]),
        ({"pad_to_max_length": True}, ["sequences_per_pack None (now 4)", "tokens_per_pack 512 (now not used)"]),
        (
            {"config_overrides": "num_hidden_layers=1,hidden_size=64,num_attention_heads=4,intermediate_size=64"},
            ["another model: hidden_size 32 (now 64), num_hidden_layers 2 (now 1), num_attention_heads 2 (now 4)"],
        ),
    ],
)
def test_checkpoint_of_other_model_or_data_is_refused(run, dataset, flags, reasons):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for where in (None, run / "checkpoint-2"):
        said = train(dataset, run, expect=2, **FLAGS | flags, resume_from_checkpoint=where)
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert all(reason in errors[0] for reason in reasons)
        assert "Traceback" not in said
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".run"} == {
        path: time for path, time in before.items() if path.name != ".run"
    }


def test_checkpoint_of_other_alphabet_is_refused(run, dataset):
    """Its ids stand for other residues: nothing else would tell."""
    for manifest in run.glob("checkpoint-*/manifest.json"):
        contents = json.loads(manifest.read_text())
        contents["model"]["alphabet"] = contents["model"]["alphabet"].replace("L A G", "A L G")
        manifest.write_text(json.dumps(contents))
    said = train(dataset, run, expect=2, **FLAGS)
    assert "checkpoint-6: the checkpoint is of another model: alphabet '<cls> <pad> <eos> <unk> A L G" in said
    assert "(now '<cls> <pad> <eos> <unk> L A G" in said


@pytest.mark.parametrize("damage", ["a flipped byte", "nothing"])
def test_checkpoint_refuses_damaged_named_one(run, dataset, damage):
    DAMAGES[damage](run / "checkpoint-4")
    said = train(dataset, run, expect=2, **FLAGS, resume_from_checkpoint=run / "checkpoint-4")
    assert f"error: --resume_from_checkpoint {run / 'checkpoint-4'}: " in said
    said = train(dataset, run, expect=2, **FLAGS, resume_from_checkpoint=run / "checkpoint-5")
    assert "checkpoint-5: no such directory" in said
