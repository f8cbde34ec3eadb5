"""common/files/output_directory.py: complete or not there; what a killed build leaves is gone on from, or cleared."""

import multiprocessing
import os
import signal

import pytest

from common.cli import UserError
from common.files.output_directory import Journal, building, read_record

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


def test_a_killed_build_is_gone_on_from(tmp_path):
    killed(half_done, tmp_path, {"seed": (1, 2)})
    with building(tmp_path, NAMES, {"seed": (1, 2)}, overwrite=False) as build:
        assert build.done("part") == {"number": 2}
        assert build.done("other") is None
        assert (build.paths["csv"] / "x000.csv").read_text() == "half"
        assert (build.scratch / "bucket").read_text() == "sorted"
        build.results["records"] = 3
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [".complete.json", "x000.csv"]
    assert read_record(tmp_path / "csv") == {"made_from": {"seed": [1, 2]}, "results": {"records": 3}}


@pytest.mark.parametrize(("names", "seed"), [(NAMES, 8), ([*NAMES, "arrow"], 7)])
def test_other_input_or_outputs_start_anew(tmp_path, names, seed):
    killed(half_done, tmp_path, {"seed": 7})
    with building(tmp_path, names, {"seed": seed}, overwrite=False) as build:
        assert build.done("part") is None
        assert not any(file for path in (build.scratch, *build.paths.values()) for file in path.iterdir())


def test_work_without_a_journal_is_cleared(tmp_path):
    (tmp_path / ".building/csv").mkdir(parents=True)
    (tmp_path / ".building/csv/x000.csv").write_text("half")
    with building(tmp_path, ["csv"], {}, overwrite=False) as build:
        assert not list(build.paths["csv"].iterdir())


def fails(parent, error) -> None:
    with building(parent, NAMES, {}, overwrite=False) as build:
        build.note("part", 5)
        raise error


@pytest.mark.parametrize("error", [UserError("bad"), OSError(28, "No space left on device"), ZeroDivisionError()])
def test_a_failure_leaves_nothing(tmp_path, error):
    killed(half_done, tmp_path / "out", {})
    with pytest.raises(type(error)):
        fails(tmp_path / "out", error)
    assert not list((tmp_path / "out").iterdir())


def test_an_interrupted_build_is_gone_on_from(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fails(tmp_path, KeyboardInterrupt())
    with building(tmp_path, NAMES, {}, overwrite=False) as build:
        assert build.done("part") == 5


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
def test_killed_while_publishing(tmp_path, number, after):
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
        assert read_record(tmp_path / name) == {"made_from": {"seed": 1}, "results": {"records": 3}}


@pytest.mark.parametrize("torn", [b'["b", {"x', b'["b", 2]', b"\0\0\0\0\n", b"7\n"])
def test_a_torn_note_is_no_note(tmp_path, torn):
    path = tmp_path / "journal"
    Journal(path).note("a", [1])
    path.write_bytes(path.read_bytes() + torn)
    journal = Journal(path)
    assert (journal.done("a"), journal.done("b")) == ([1], None)
    journal.note("b", {"x": 3})
    assert Journal(path).done("b") == {"x": 3}
    assert Journal(path).done("a") == [1]
