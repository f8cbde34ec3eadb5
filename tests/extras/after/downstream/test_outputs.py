"""Output directories of the scripts after training: whose files are removed, who may write, what is said."""

from __future__ import annotations

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.cli import UserError
from extras.after.downstream.outputs import MANIFEST, Manifest, claimed, locked_file, writing
from extras.prepare.output_directory import refuse_inputs

MADE_FROM = {"seed": 1, "layers": (1, 2)}


def write(directory: Path, files: dict[str, str], made_from=MADE_FROM, overwrite=False, **more) -> bool:
    """As a script does; whether there was something to do."""
    with claimed(directory, {}, made_from, overwrite, **more) as output:
        if output is not None:
            with output.replaced() as partial:
                for name, text in files.items():
                    (partial / name).parent.mkdir(exist_ok=True)
                    (partial / name).write_text(text)
        return output is not None


def content(directory: Path) -> dict[str, str]:
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {str(path.relative_to(directory)): path.read_text() for path in paths}


@contextmanager
def largest_file(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_output_is_finished_for_the_same_and_refused_for_other_input(tmp_path, caplog):
    out, files = tmp_path / "new" / "out", {"a.csv": "1", "model/b.bin": "2"}
    assert write(out, files)
    assert content(out) == files
    caplog.set_level("INFO")
    assert not write(out, {"a.csv": "other"})
    assert f"{out} was made by the same command: nothing to do" in caplog.text
    with pytest.raises(UserError, match="was made from other input or arguments: --overwrite it"):
        write(out, files, {"seed": 2})
    (out / "model" / "b.bin").write_text("3")
    with pytest.raises(UserError, match=r"model/b.bin has changed since it was written"):
        write(out, files)
    (out / "a.csv").unlink()
    with pytest.raises(UserError, match=r"a.csv has gone since it was written"):
        write(out, files)


def test_output_overwritten_loses_its_own_files_alone(tmp_path):
    write(tmp_path, {"a.csv": "1", "old.png": "2", "model/b.bin": "3"})
    (tmp_path / "labels.csv").write_text("of the user")
    (tmp_path / "model" / "notes.txt").write_text("of the user")
    write(tmp_path, {"a.csv": "4", "c.png": "5"}, {"seed": 2}, overwrite=True)
    users = {"labels.csv": "of the user", "model/notes.txt": "of the user"}
    assert content(tmp_path) == users | {"a.csv": "4", "c.png": "5"}
    for name in ("labels.csv", "model"):
        with pytest.raises(UserError, match="is not of this script and would be replaced: move it"):
            write(tmp_path, {name: "6"}, {"seed": 3}, overwrite=True)
    assert content(tmp_path) == users | {"a.csv": "4", "c.png": "5"}
    assert not write(tmp_path, {}, {"seed": 2})


def test_output_of_another_script_is_refused(tmp_path):
    write(tmp_path, {"model.bin": "1"}, {"script": "finetune.py", "seed": 1})
    with pytest.raises(UserError, match=r"exists, and is of finetune.py: choose another"):
        write(tmp_path, {}, {"script": "contacts.py"}, overwrite=True)
    assert content(tmp_path) == {"model.bin": "1"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_output_in_a_directory_of_other_files_is_refused(tmp_path, overwrite):
    (tmp_path / "results.json").write_text("of the user")
    with pytest.raises(UserError, match=r"exists and is not of this script \(results.json\): choose another"):
        write(tmp_path, {"a.csv": "1"}, overwrite=overwrite)
    assert content(tmp_path) == {"results.json": "of the user"}


def test_output_of_an_earlier_version_is_replaced_by_name(tmp_path):
    (tmp_path / "results.json").write_text('{"probe": {}}')
    for name in ("predictions.csv", "labels.csv"):
        (tmp_path / name).write_text("before")
    assert Manifest.of_earlier(tmp_path, "head", "contacts.csv") is None
    earlier = Manifest.of_earlier(tmp_path, "probe", "predictions.csv")
    with pytest.raises(UserError, match="exists, by an earlier version: --overwrite it"):
        write(tmp_path, {}, earlier=earlier)
    write(tmp_path, {"results.json": "after"}, overwrite=True, earlier=earlier)
    assert content(tmp_path) == {"results.json": "after", "labels.csv": "before"}


def test_output_that_holds_an_input_is_refused(tmp_path):
    (tmp_path / "out" / "pdb").mkdir(parents=True)
    (tmp_path / "out" / "labels.csv").touch()
    (tmp_path / "link.csv").symlink_to("out/labels.csv")
    for path in ("out", "out/pdb", "out/labels.csv", "link.csv"):
        with pytest.raises(UserError, match=r"--labels .* is in there: choose another"):
            refuse_inputs(tmp_path / "out", {"--labels": str(tmp_path / path)})
    with claimed(tmp_path / "out" / "pdb" / "new", {"--labels": str(tmp_path / "out")}, {}, False) as output:
        assert output is not None


def test_output_is_locked_while_it_is_written(tmp_path):
    busy = pytest.raises(UserError, match="another run is writing here: wait for it")
    with claimed(tmp_path / "out", {}, MADE_FROM, False), busy:
        write(tmp_path / "out", {})
    assert write(tmp_path / "out", {"a.csv": "1"})
    scores = tmp_path / "new" / "scores.csv"
    with locked_file(scores, "--output"):
        busy = pytest.raises(UserError, match=r"scores.csv: another run is writing here.* another --output$")
        with busy, locked_file(scores, "--output"):
            pass
        with locked_file(scores.with_name("other.csv"), "--output"):
            pass
    assert not list(scores.parent.iterdir())


def test_output_that_fails_leaves_what_was_there(tmp_path):
    def fails(directory: Path, overwrite: bool = False) -> None:
        with claimed(directory, {}, {"seed": 2}, overwrite) as output, output.replaced() as partial:
            (partial / "a.csv").write_text("2")
            raise UserError("bad")

    with pytest.raises(UserError, match="bad"):
        fails(tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())
    write(tmp_path, {"a.csv": "1"})
    with pytest.raises(UserError, match="bad"):
        fails(tmp_path, overwrite=True)
    assert content(tmp_path) == {"a.csv": "1"}
    assert not write(tmp_path, {})


def test_output_of_a_killed_run_is_resumed_by_the_same_command_alone(tmp_path):
    with claimed(tmp_path, {}, MADE_FROM, False) as output:
        output.begin("state.pt", "results.json")
        (tmp_path / "state.pt").write_text("half")
    with pytest.raises(UserError, match="was made from other input or arguments"):
        write(tmp_path, {}, {"seed": 2})
    with claimed(tmp_path, {}, MADE_FROM, False) as output:
        output.begin("state.pt", "results.json")
        assert (tmp_path / "state.pt").read_text() == "half"
        (tmp_path / "results.json").write_text("all")
        output.finish("results.json")
    assert content(tmp_path) == {"results.json": "all"}
    with claimed(tmp_path, {}, {"seed": 2}, True) as output:
        output.begin("state.pt", "results.json")
        assert content(tmp_path) == {}


def test_manifest_removes_nothing_outside_of_its_directory(tmp_path):
    (tmp_path / "mine").write_text("of the user")
    write(tmp_path / "out", {"a.csv": "1"})
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["files"] |= {"../mine": None, "..": None, str(tmp_path / "mine"): None}
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    write(tmp_path / "out", {"b.csv": "2"}, {"seed": 2}, overwrite=True)
    assert content(tmp_path) == {"mine": "of the user", "out/b.csv": "2"}
    (tmp_path / "out" / MANIFEST).write_text('{"files": ' + "[" * 100_000)
    with pytest.raises(UserError, match="exists and is not of this script"):
        write(tmp_path / "out", {}, overwrite=True)


def test_file_that_may_not_grow_is_one_line(tmp_path):
    """`ulimit -f`, of Python's files and of safetensors'."""
    refused = pytest.raises(UserError, match="out: .*File too large.*: make room")
    with refused, writing(tmp_path / "out"), largest_file(1000):
        (tmp_path / "a").write_bytes(os.urandom(2000))
    with refused, writing(tmp_path / "out"), largest_file(1000):
        save_file({"a": torch.zeros(1000)}, tmp_path / "b.safetensors")
