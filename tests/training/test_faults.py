"""What goes wrong in the middle of a run, or on one rank only: all ranks end soon, with one status and one reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import datasets
import pytest
import torch

from common.cli import UserError
from common.data.workers import deliver
from common.distributed.process_group import ProcessFlags, distributed_run
from common.distributed.world import World
from common.training.run_directory import clear
from tests.live_runs import LiveRun, assert_same_run, newest_step, outcome
from tests.training_fixtures import ROOT, losses, on_ranks, rows, run_forked, run_training, train
from tests.warm_python import python

LONG = {"max_steps": 300, "save_steps": 10, "per_device_train_batch_size": 1, "save_final_model": False}


def errors_of(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


# ---- one rank fails -----------------------------------------------------------------------------------------


def _run_body(body: str) -> None:
    with distributed_run(ProcessFlags(use_cpu=True)) as world:
        BODIES[body](world)


def _user_error_on_rank_1(world: World) -> None:
    with world.raise_together():
        if world.rank == 1:
            raise UserError("rank 1 has no such file")
    world.any(False)


def _user_error_on_every_rank(world: World) -> None:
    with world.raise_together():
        raise UserError("no such file")


def _user_error_while_the_main_rank_works(world: World) -> None:
    with world.on_main_rank() as is_main:
        if is_main:
            raise UserError("no such file")
    world.any(False)


def _bug_while_the_main_rank_works(world: World) -> None:
    with world.on_main_rank() as is_main:
        if is_main:
            raise ZeroDivisionError("a bug")
    world.any(False)


def _bug_on_rank_1_in_what_only_the_main_rank_should_do(world: World) -> None:
    with world.on_main_rank():
        if world.rank == 1:
            raise ZeroDivisionError("a bug")
    world.any(False)


def _bug_on_rank_1_where_no_one_expects_it(world: World) -> None:
    if world.rank == 1:
        raise ZeroDivisionError("a bug")
    world.any(False)


BODIES = {
    name: body
    for body in (
        _user_error_on_rank_1,
        _user_error_on_every_rank,
        _user_error_while_the_main_rank_works,
        _bug_while_the_main_rank_works,
        _bug_on_rank_1_in_what_only_the_main_rank_should_do,
        _bug_on_rank_1_where_no_one_expects_it,
    )
    if (name := body.__name__)
}


@pytest.mark.parametrize(
    ("body", "status", "speaker"),
    [
        (_user_error_on_rank_1, 2, 1),
        (_user_error_on_every_rank, 2, 0),
        (_user_error_while_the_main_rank_works, 2, 0),
        (_bug_while_the_main_rank_works, 1, 0),
        (_bug_on_rank_1_in_what_only_the_main_rank_should_do, 1, 1),
    ],
)
def test_world_failing_rank_ends_all_with_its_status(body, status, speaker):
    codes, said = on_ranks(2, _run_body, body.__name__)
    assert codes == [status] * 2
    assert said[1 - speaker] == ""
    if status == 2:
        assert len(said[speaker].splitlines()) == 1
        assert said[speaker].startswith("error: " + ("rank 1: " if speaker else ""))
    else:
        assert said[speaker].count("Traceback") == 1
        assert "ZeroDivisionError: a bug" in said[speaker]


def test_world_bug_on_one_rank_ends_the_others():
    codes, said = on_ranks(2, _run_body, "_bug_on_rank_1_where_no_one_expects_it")
    assert codes == [1, 1]
    assert "ZeroDivisionError: a bug" in said[1]
    assert said[0].startswith("error: another rank is gone")
    assert len(said[0].splitlines()) == 1


def test_damaged_record_is_named_once(dataset, tmp_path):
    """One record of 60 with an id that is no token, met in the middle of the run; what was saved before is whole."""
    sequences = [row["input_ids"] for row in datasets.load_from_disk(str(dataset / "train")).select(range(60))]
    sequences[37][2] = 40
    datasets.Dataset.from_dict({"input_ids": sequences}).save_to_disk(tmp_path / "data" / "train")
    for number, workers in enumerate((0, 2)):
        out = tmp_path / str(number)
        flags = LONG | {"save_steps": 1, "dataloader_num_workers": workers}
        with LiveRun(tmp_path / "data", out, tmp_path / "logs", 2, **flags) as run:
            assert run.end() == [2, 2]
            said = run.said(0) + run.said(1)
        assert "Traceback" not in said
        assert len(errors_of(said)) == 1
        assert "record 37: token id 40, the model has 0-32" in errors_of(said)[0]
        assert newest_step(out) == rows(out)[-1]["step"] < 300


@pytest.mark.parametrize("flags", [{"eval_steps": 2}, {}], ids=["in the run", "at its end"])
def test_damaged_validation_record_is_named_once(dataset, tmp_path, flags):
    """One rank meets it, in an evaluation that the others are in too."""
    sequences = [row["input_ids"] for row in datasets.load_from_disk(str(dataset / "validation"))]
    sequences[7] = [0, 5, 40, 2]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").symlink_to(dataset / "train")
    datasets.Dataset.from_dict({"input_ids": sequences}).save_to_disk(tmp_path / "data" / "validation")
    out = tmp_path / "out"
    run = {"max_steps": 4, "do_eval": True, "per_device_eval_batch_size": 1, "save_final_model": False}
    with LiveRun(tmp_path / "data", out, tmp_path / "logs", 2, **run | flags) as live:
        assert live.end() == [2, 2]
        said = live.said(0) + live.said(1)
    assert "Traceback" not in said
    (error,) = errors_of(said)
    assert "record 7: token id 40, the model has 0-32" in error


def test_killed_loader_worker_ends_all_ranks_and_run_resumes(dataset, tmp_path):
    out, flags = tmp_path / "out", LONG | {"max_steps": 60}
    with LiveRun(dataset, out, tmp_path / "logs", 2, **flags, dataloader_num_workers=1) as run:
        run.until(lambda: newest_step(out) >= 10)
        os.kill(run.children(rank=1)[0], signal.SIGKILL)
        assert run.end() == [1, 1]
        assert "DataLoader worker" in run.said(1)
        assert "Traceback" not in run.said(0)
    train(dataset, out, 2, **flags)
    train(dataset, tmp_path / "whole", 2, **flags)
    assert_same_run(out, tmp_path / "whole", 60, tmp_path)


def test_lost_loader_worker_is_not_a_user_error(monkeypatch):
    """Then the connection breaks, which is an OSError, as an unreadable file is."""

    def broken(*_) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")

    items = deliver([torch.zeros(1)] * 3, num_workers=1, prefetch_factor=2, pin_memory=False)
    next(items)
    monkeypatch.setattr("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data", broken)
    with pytest.raises(RuntimeError, match="a DataLoader worker is gone .*Connection reset by peer"):
        list(items)  # one is fetched already


# ---- the run itself goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, 2])
def test_diverged_run_ends_before_saving(dataset, tmp_path, nproc):
    """NaN weights would replace every good checkpoint under --save_total_limit."""
    out = tmp_path / "out"
    flags = {"max_steps": 40, "save_steps": 1, "save_total_limit": 1, "save_final_model": False}
    train(dataset, out, nproc, **flags, stop_at_step=3)
    before = outcome(out, 3, tmp_path)
    with LiveRun(dataset, out, tmp_path / "logs", nproc, **flags | {"learning_rate": 1e38}) as run:
        assert run.end() == [2] * nproc
        said = "".join(run.said(rank) for rank in range(nproc))
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if "error: " in line]) == 1
    assert "the run has diverged: --max_skipped_steps 5 skipped in a row" in said
    last = newest_step(out)
    assert last < 40
    assert all(tensor.isfinite().all() for name, tensor in outcome(out, last, tmp_path).items() if name[:5] == "model")
    assert all(tensor.isfinite().all() for name, tensor in before.items() if name[:5] == "model")
    assert all(json.loads(json.dumps(row, allow_nan=False)) for row in rows(out))


# ---- directories --------------------------------------------------------------------------------------------


def test_output_dir_may_have_spaces_links_and_relative_path(dataset, tmp_path):
    flags = {"max_steps": 2, "save_steps": 1}
    train(dataset, tmp_path / "plain", **flags)
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    relative = Path(os.path.relpath(tmp_path / "relative", ROOT))
    for out in (tmp_path / "a dir with spaces", tmp_path / "link"):
        train(dataset, out, **flags, stop_at_step=1)
        assert "Resuming after step 1" in train(dataset, out, **flags)
        assert losses(out) == losses(tmp_path / "plain")
    done = run_forked(Path(os.path.relpath(dataset, ROOT)), relative, **flags)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "relative") == losses(tmp_path / "plain")


def test_clear_removes_only_files_of_a_run(dataset, tmp_path):
    out = tmp_path / "out"
    train(dataset, out, max_steps=2, save_steps=1, do_eval=True)
    written = {path.name for path in out.iterdir()}
    (out / "superseded-checkpoint-7").mkdir()
    (out / "tmp-checkpoint-9").mkdir()
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(out / "checkpoint-2", elsewhere)
    (out / "checkpoint-8").symlink_to(elsewhere)
    mine = (
        "my_results.json",
        "notes.txt",
        "logs/slurm-1.out",
        "checkpoint-notes/a",
        "final_model_old/b",
        "csv/x000.csv",
    )
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    clear(out)
    assert sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()) == sorted([".run", *mine])
    assert written - {".run"} == {
        *(".saved", "run_info.json"),
        *("checkpoint-1", "checkpoint-2", "final_model", "metrics.jsonl", "trainer_state.json", "training_curves.png"),
        *("train_results.json", "eval_results.json", "test_results.json", "all_results.json"),
        *("eval_losses.parquet", "test_losses.parquet"),
    }
    assert (elsewhere / "manifest.json").exists()


@pytest.mark.parametrize(
    ("variables", "resumes"),
    [
        ({"SLURM_JOB_ID": "17"}, True),
        ({"TORCHELASTIC_RUN_ID": "job"}, True),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "none"}, True, marks=pytest.mark.slow
        ),  # the same parent, here the tests' server, stands for one torchrun
        ({}, False),
    ],
    ids=str,
)
def test_restarted_job_resumes_despite_flags_that_start_over(dataset, tmp_path, variables, resumes):
    out = tmp_path / "out"
    for flags in ({"overwrite_output_dir": True}, {"resume_from_checkpoint": "false"}):
        shutil.rmtree(out, ignore_errors=True)
        flags |= {"max_steps": 4, "save_steps": 1, "save_final_model": False, "env": variables}
        for stop in (2, None):
            with LiveRun(dataset, out, tmp_path / "logs", **flags, stop_at_step=stop) as run:
                assert run.end() == [0]
        assert ("Resuming after step 2" in run.said()) == resumes


def test_empty_validation_split_is_refused(dataset, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train").symlink_to(dataset / "train")
    datasets.Dataset.from_dict({"input_ids": [[0, 5, 2]]}).select([]).save_to_disk(data / "validation")
    said = train(data, tmp_path / "out", expect=2, max_steps=1, do_eval=True)
    assert len(errors_of(said)) == 1
    assert "validation: the dataset is empty" in said
    assert not (tmp_path / "out").exists()


def test_torchrun_reports_bad_flag_once(dataset, tmp_path):
    done = run_training(dataset, tmp_path / "out", nproc=2, bf16="maybe", python=python())
    assert done.returncode == 1  # torchrun's own
    assert len(errors_of(done.stderr)) == 1
    assert "--bf16" in done.stderr
    assert 'train_ddp.py", line' not in done.stderr, "a traceback of ours, not only torchrun's"
    codes, said = on_ranks(2, _parse_nonsense)
    assert codes == [2, 2]
    assert said[1] == ""


def _parse_nonsense() -> None:
    from tests.training_fixtures import _main

    _main(["--nonsense"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"max_steps": "ten"}', "max_steps"),
        ('{"bf16": "maybe"}', "bf16"),
        ('{"seed": [1, 2]}', "seed: expected one value"),
        ("[1, 2]", "expected names of flags"),
        ('{"seed": 1', "cannot be read"),
    ],
)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_flags_file_is_checked_like_flags(tmp_path, suffix, text, reason):
    file = tmp_path / f"flags.{suffix}"
    file.write_text(text)
    codes, said = on_ranks(1, _main_on_file, file)
    assert codes == [2]
    assert len(said[0].splitlines()) == 1
    assert said[0].startswith("error: ")
    assert reason in said[0]


def _main_on_file(file: Path) -> None:
    from tests.training_fixtures import _main

    _main([str(file)])
