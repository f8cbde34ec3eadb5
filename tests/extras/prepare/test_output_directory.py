"""extras/prepare/output_directory.py: outputs are complete or absent; a killed build resumes from its journal."""

import multiprocessing
import os
import shutil
import signal
import zlib
from functools import partial
from pathlib import Path

import pytest

from common.cli import UserError
from common.files.safe_files import replace_flushed, write_json
from extras.prepare.output_directory import Journal, building, hold_work, read_record

NAMES = ["csv", "fasta"]


def killed(work, *arguments) -> None:
    """Run `work` in a process of its own, which it ends with SIGKILL."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_done(parent, made_from, overwrite=False) -> None:
    with building(parent, NAMES, made_from, overwrite) as build:
        (build.paths["csv"] / "x000.csv").write_text("half")
        (build.scratch / "bucket").write_text("sorted")
        build.note("part", {"number": 1})
        build.note("part", {"number": 2})
        die()


def test_build_resumes_after_kill(tmp_path):
    killed(half_done, tmp_path, {"seed": (1, 2)})
    with building(tmp_path, NAMES, {"seed": (1, 2)}, overwrite=False) as build:
        assert build.done("part") == {"number": 2}
        assert build.done("other") is None
        assert (build.paths["csv"] / "x000.csv").read_text() == "half"
        assert (build.scratch / "bucket").read_text() == "sorted"
        build.results["records"] = 3
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [".complete.json", "x000.csv"]
    files = {"x000.csv": [4, zlib.crc32(b"half")]}
    assert read_record(tmp_path / "csv") == {"made_from": {"seed": [1, 2]}, "results": {"records": 3}, "files": files}


@pytest.mark.parametrize(("names", "seed"), [(NAMES, 8), ([*NAMES, "arrow"], 7)])
def test_build_of_other_input_starts_over(tmp_path, names, seed):
    killed(half_done, tmp_path, {"seed": 7})
    with building(tmp_path, names, {"seed": seed}, overwrite=False) as build:
        assert build.done("part") is None
        assert not any(file for path in (build.scratch, *build.paths.values()) for file in path.iterdir())


def test_build_clears_work_without_journal(tmp_path):
    (tmp_path / ".building/csv").mkdir(parents=True)
    (tmp_path / ".building/csv/x000.csv").write_text("half")
    with building(tmp_path, ["csv"], {}, overwrite=False) as build:
        assert not list(build.paths["csv"].iterdir())


def fails(parent, error, notes: bool) -> None:
    with building(parent, NAMES, {}, overwrite=False) as build:
        (build.paths["csv"] / "x000.csv").write_text("half")
        if notes:
            build.note("part", 5)
        raise error


ERRORS = [UserError("bad"), OSError(28, "No space left on device"), ZeroDivisionError(), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS)
def test_build_resumes_after_error(tmp_path, error):
    with pytest.raises(type(error)):
        fails(tmp_path, error, notes=True)
    assert [path.name for path in tmp_path.iterdir()] == [".building"]
    with pytest.raises(type(error)):
        fails(tmp_path, error, notes=False)
    with building(tmp_path, NAMES, {}, overwrite=False) as build:
        assert build.done("part") == 5
        assert (build.paths["csv"] / "x000.csv").read_text() == "half"
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


@pytest.mark.parametrize("error", ERRORS)
def test_build_without_notes_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)):
        fails(tmp_path / "new" / "out", error, notes=False)
    assert not list(tmp_path.iterdir())


def test_build_removes_other_work_with_warning(tmp_path, caplog):
    killed(half_done, tmp_path, {"seed": 7})
    with building(tmp_path, NAMES, {"seed": 8}, overwrite=False):
        pass
    assert "removing the work of an interrupted run for other input or arguments" in caplog.text


def holds(parent, begun, ends) -> None:
    hold_work(parent)
    begun.set()
    ends.wait()


def test_build_lock_covers_all_ranks(tmp_path):
    """The ranks of a run, which may outlive the one that was in `building`."""
    killed(half_done, tmp_path, {})
    context = multiprocessing.get_context("fork")
    begun, ends = context.Event(), context.Event()
    rank = context.Process(target=holds, args=(tmp_path, begun, ends), daemon=True)
    rank.start()
    begun.wait()
    with pytest.raises(UserError, match="another run is writing here"), building(tmp_path, NAMES, {}, overwrite=False):
        pass
    ends.set()
    rank.join()
    with building(tmp_path, NAMES, {}, overwrite=False) as build:
        assert build.done("part") == {"number": 2}
        with pytest.raises(UserError, match="another run is writing here"), building(tmp_path, NAMES, {}, False):
            pass


@pytest.fixture
def on_disk(monkeypatch):
    """Inodes of what was flushed. Renaming what was not, or a directory with such a file, fails."""
    flushed = set()
    fsync, renames = os.fsync, {name: getattr(os, name) for name in ("rename", "replace")}

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check(name, source, target) -> None:
        files = [path for path in [Path(source), *Path(source).rglob("*")] if path.name != "journal.jsonl"]
        assert {path.stat().st_ino for path in files} <= flushed, f"{source} was renamed before it was flushed"
        renames[name](source, target)

    monkeypatch.setattr(os, "fsync", flush)
    for name in renames:
        monkeypatch.setattr(os, name, partial(check, name))
    return flushed


def test_build_flushes_before_rename(tmp_path, on_disk):
    build_all(tmp_path)
    assert tmp_path.stat().st_ino in on_disk
    on_disk.clear()
    with replace_flushed(tmp_path / "file") as path:
        path.write_text("new")
    assert {(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino} <= on_disk
    on_disk.clear()
    write_json(tmp_path / "file", {"a": 1})
    assert {(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino} <= on_disk


def test_replace_flushed_failure_keeps_old_file(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileNotFoundError), replace_flushed(tmp_path / "file") as path:
        path.write_bytes((tmp_path / "absent").read_bytes() if path.write_text("half") else b"")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def publishing_stops(parent, number: int, after: bool) -> None:
    """Killed while the outputs are renamed into place: before or after the `number`th rename."""
    original, count = type(parent).rename, 0

    def rename(path, target):
        nonlocal count
        count += 1
        if count == number and not after:
            die()
        original(path, target)
        if count == number:
            die()

    type(parent).rename = rename
    with building(parent, NAMES, {"seed": 1}, overwrite=True) as build:
        for path in build.paths.values():
            (path / "content").write_text("new")
        build.results["records"] = 3
        build.note("written", 3)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_build_killed_while_publishing_resumes(tmp_path, number, after):
    with building(tmp_path, NAMES, {"seed": 0}, overwrite=False) as build:
        for path in build.paths.values():
            (path / "content").write_text("old")
    killed(publishing_stops, tmp_path, number, after)
    with building(tmp_path, NAMES, {"seed": 1}, overwrite=True) as build:
        # Two renames an output: the old one away, the new one into place.
        assert list(build.paths) == NAMES[(number - (not after)) // 2 :]
        if build.paths:
            assert build.done("written") == 3
            build.results["records"] = build.done("written")
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    for name in NAMES:
        assert (tmp_path / name / "content").read_text() == "new"
        files = {"content": [3, zlib.crc32(b"new")]}
        assert read_record(tmp_path / name) == {"made_from": {"seed": 1}, "results": {"records": 3}, "files": files}


@pytest.mark.parametrize("torn", [b'["b", {"x', b'["b", 2]', b"\0\0\0\0\n", b"7\n"])
def test_journal_drops_torn_record(tmp_path, torn):
    path = tmp_path / "journal"
    Journal(path).note("a", [1])
    path.write_bytes(path.read_bytes() + torn)
    journal = Journal(path)
    assert (journal.done("a"), journal.done("b")) == ([1], None)
    journal.note("b", {"x": 3})
    assert Journal(path).done("b") == {"x": 3}
    assert Journal(path).done("a") == [1]


def build_all(parent, seed=1, names=("csv",), **how) -> bool:
    """Whether there was something to make."""
    with building(
        parent, list(names), {"seed": seed}, **{"overwrite": False, "siblings": ("csv", "fasta")} | how
    ) as build:
        for path in build.paths.values():
            (path / "x000").write_text(f"made with {seed}")
            (path / "below").mkdir()
            (path / "below" / "x001").write_text("more")
        return bool(build.paths)


def remove(directory) -> None:
    (directory / "x000").unlink()


def lengthen(directory) -> None:
    (directory / "below" / "x001").write_text("much more")


def flip(directory) -> None:
    (directory / "x000").write_text("made with 7")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (remove, "x000 has gone"),
        (lengthen, r"below/x001 has changed \(9 bytes, 4 written\)"),
        (flip, r"x000 has changed \(its checksum differs\)"),
    ],
)
def test_build_verifies_complete_output(tmp_path, change, told):
    assert build_all(tmp_path)
    assert not build_all(tmp_path)
    assert not build_all(tmp_path, verify=True)
    change(tmp_path / "csv")
    if change is flip:
        assert not build_all(tmp_path), "sizes only, unless asked for"
    with pytest.raises(UserError, match=rf"csv: {told} since it was written: give --overwrite"):
        build_all(tmp_path, verify=True)
    assert build_all(tmp_path, overwrite=True)
    assert (tmp_path / "csv/x000").read_text() == "made with 1"
    assert not build_all(tmp_path, verify=True)


def test_build_overwrite_rebuilds(tmp_path):
    build_all(tmp_path)
    before = (tmp_path / "csv/x000").stat().st_ino
    assert build_all(tmp_path, overwrite=True)
    assert (tmp_path / "csv/x000").stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_build_removes_stale_siblings(tmp_path):
    build_all(tmp_path, names=("csv", "fasta"))
    (tmp_path / "arrow").mkdir()  # of another script: none of this one's business
    with pytest.raises(UserError, match=r"csv: was made from other input"):
        build_all(tmp_path, seed=2)
    shutil.rmtree(tmp_path / "csv")
    with pytest.raises(UserError, match=r"fasta: was made from other input or arguments: give --overwrite"):
        build_all(tmp_path, seed=2)
    assert build_all(tmp_path, seed=2, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrow", "csv"]
    assert build_all(tmp_path, seed=2, names=("fasta",)), "of the same input it may come later"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrow", "csv", "fasta"]
