"""Output directories that are either complete or not there: built under a temporary name, renamed at the end.

A complete directory holds `.complete.json`: what it was made from (source, arguments), what came out, and every file
with size and CRC-32. The same command started again sees that, looks whether the files are as they were written, and
does nothing; another command replaces the directory only with --overwrite, which makes everything anew.

What a killed or failed run leaves under the temporary name has a journal: the same command goes on from what is noted
there. A run that has noted nothing leaves nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from common.cli import MAKE_ROOM, NO_ROOM, UserError
from common.files.json_files import size_and_crc, sync, sync_directory, sync_tree

logger = logging.getLogger(__name__)
RECORD = ".complete.json"
BUILDING = ".building"
SCRATCH, JOURNAL, MADE_FROM = "scratch", "journal.jsonl", "made from"


class Journal:
    """Notes (key -> anything JSON holds) in a file that stays readable whenever the process is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values = {}
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                key, self._values[key] = json.loads(line) if line.endswith(b"\n") else None
            except (TypeError, ValueError):  # torn: the process or the machine stopped while it was written
                os.truncate(path, whole)
                break
            whole += len(line)

    def done(self, key: str):
        """The latest value noted under `key`, or None."""
        return self._values.get(key)

    @property
    def holds_work(self) -> bool:
        """Whether anything is noted but what the work is for."""
        return not self._values.keys() <= {MADE_FROM}

    def note(self, key: str, value) -> None:
        """Have (key, value) on the disk on return; sync what it speaks of first."""
        line = json.dumps([key, value]) + "\n"
        with open(self.path, "a") as file:
            file.write(line)
            sync(file)
        self._values[key] = json.loads(line)[1]  # what the next run will read


@dataclass
class Build:
    """`paths`: where to write each output that is not complete yet; `scratch`: room for temporary files;
    `results`: numbers to put into the record of completion; `journal`: what an earlier run has done already.

    `paths` and `scratch` are as that run left them, or empty directories together with an empty journal.
    """

    paths: dict[str, Path]
    scratch: Path
    journal: Journal
    results: dict = field(default_factory=dict)

    def done(self, key: str):
        """What was noted under `key`, in this run or in the stopped one before it; None if nothing was."""
        return self.journal.done(key)

    def note(self, key: str, value) -> None:
        """Note that something is done; what it speaks of must be on the disk (`sync`)."""
        self.journal.note(key, value)


def read_record(directory: Path) -> dict | None:
    """The record of completion, {"made_from": ..., "results": ...}, or None where there is none."""
    try:
        return json.loads((directory / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@contextmanager
def building(
    parent: Path,
    names: list[str],
    made_from: dict,
    overwrite: bool,
    verify: bool = False,
    siblings: tuple[str, ...] = (),
    earlier: Callable[[Path, dict], bool] = lambda directory, made_from: False,
) -> Iterator[Build]:
    """Build parent/name for each of `names` that is not there yet; `paths` is empty when all of them are.

    overwrite: make all of them anew; verify: look at the checksums of what is there, not only at sizes; siblings: what
    the same script may have made there before, in other forms: of other input it must not stay beside the new.
    earlier: whether a complete directory, whose record has this `made_from`, was made by an earlier version of the
    script, which recorded other facts, from the same input; it counts as complete then.

    On a clean exit each output appears under its name at once. A run that ends otherwise, killed, interrupted or by
    any error, leaves what it has noted, and the next one with the same `made_from` goes on from it; if it has noted
    nothing, nothing is left. Work for something else is cleared. UserError if an output exists and was made from
    something else (unless `overwrite`), if `parent` is not writable or if another run is at work in it.
    """
    created = [path for path in (parent, *parent.parents) if not path.exists()]
    lock = None
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(parent)
            if (parent / BUILDING).is_dir():
                _release(_lock(parent, of=parent / BUILDING))  # nor may ranks of an earlier run still be at work
            same = partial(_is_same, made_from=made_from, earlier=earlier)
            missing = _missing(parent, names, made_from, overwrite, verify, same)
            stale = [name for name in siblings if name not in names and _is_stale(parent / name, made_from)]
            for name in stale:
                _refuse_to_replace(parent / name, overwrite)
            build = _open_work(parent, missing, made_from) if missing else None
        except OSError as error:
            what_to_do = MAKE_ROOM if error.errno in NO_ROOM else "choose a directory you can write to"
            raise UserError(f"--output_dir {parent}: {error.strerror}: {what_to_do}") from None
        if build is None:
            _clear(parent)  # a run killed between its last rename and the end
            yield Build({}, parent, Journal(parent / BUILDING / JOURNAL))
            return
        failed = True
        try:
            yield build
            for name, path in build.paths.items():
                made = {"made_from": made_from, "results": build.results, "files": _files(path)}
                _publish(path, parent / name, made)
            for name in stale:
                logger.warning("%s was made from other input: removed", parent / name)
                shutil.rmtree(parent / name)
            failed = False
        except OSError as error:
            error.filename = error.filename or str(parent)  # writing to a full disk does not say where
            raise
        finally:
            if failed and build.journal.holds_work:
                logger.info("What is finished stays in %s: the same command goes on from there", parent / BUILDING)
            else:
                _clear(parent)
        created = []
    finally:
        _release(lock)
        for path in created:  # after a failure only; those that hold something (a download to resume) stay
            with suppress(OSError):
                path.rmdir()


def hold_work(parent: Path) -> None:
    """Keep other runs out of what is being built in `parent`, for as long as this process lives.

    For the ranks beside the one that is in `building`: they may outlive it. UserError if another run has it already.
    """
    _lock(parent, fcntl.LOCK_SH, parent / BUILDING)


def _missing(
    parent: Path, names: list[str], made_from: dict, overwrite: bool, verify: bool, same: Callable[[Path], bool]
) -> list[str]:
    if overwrite:
        begun = Journal(parent / BUILDING / JOURNAL).done(MADE_FROM)
        if begun is None or begun["made_from"] != _as_json(made_from):
            return list(names)
        # A run that did the same was killed: what it had published already is new.
        return [name for name in names if name not in begun["names"] or (parent / BUILDING / name).is_dir()]
    missing = [name for name in names if not same(parent / name)]
    for name in names:
        if name not in missing and (change := _changed(parent / name, verify)):
            raise UserError(f"{parent / name}: {change} since it was written: give --overwrite to make it again")
        if name in missing:
            _refuse_to_replace(parent / name, overwrite)
        else:
            logger.info("%s is complete and was made from the same input and arguments: nothing to do", parent / name)
    return missing


def _open_work(parent: Path, names: list[str], made_from: dict) -> Build:
    """The work of a killed run where it was for the same outputs, otherwise empty directories."""
    work = parent / BUILDING
    paths = {name: work / name for name in names}
    journal = Journal(work / JOURNAL)
    of = journal.done(MADE_FROM)
    # A directory of its outputs that is gone was published, just before the kill.
    if (
        of is None
        or of["made_from"] != _as_json(made_from)
        or not all(name in of["names"] and path.is_dir() for name, path in paths.items())
    ):
        if journal.holds_work:
            logger.warning("%s: work of a stopped run for other input or arguments is removed", work)
        _clear(parent)
        try:
            for path in (work, work / SCRATCH, *paths.values()):
                path.mkdir()
            journal = Journal(work / JOURNAL)
            journal.note(MADE_FROM, {"made_from": made_from, "names": names})
        except OSError:  # a disk that is full already
            _clear(parent)
            raise
    else:
        logger.info("Going on from what a stopped run left in %s", work)
    return Build(paths, work / SCRATCH, journal)


def _as_json(value: dict) -> dict:
    """As it reads once written, so that tuples and the like compare equal."""
    return json.loads(json.dumps(value))


def _is_same(directory: Path, made_from: dict, earlier: Callable[[Path, dict], bool]) -> bool:
    """Whether the directory is complete and of the same input."""
    record = read_record(directory)
    return record is not None and (
        record["made_from"] == _as_json(made_from) or earlier(directory, record["made_from"])
    )


def _is_stale(directory: Path, made_from: dict) -> bool:
    """Whether the same script made it from something else: what it was made from has the same keys."""
    record = read_record(directory)
    if record is None or record["made_from"] == _as_json(made_from):
        return False
    always = {name for name in made_from if not name.startswith("on_")}  # others are there where they are given
    return always <= record["made_from"].keys()


def _files(directory: Path) -> dict[str, list[int]]:
    """{path below the directory: [bytes, CRC-32]}."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    names = [str(path.relative_to(directory)) for path in paths]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(size_and_crc, paths), strict=True))


def _changed(directory: Path, verify: bool) -> str | None:
    """What is not as the record of completion has it. Records of earlier versions do not tell."""
    for name, (size, crc) in (read_record(directory) or {}).get("files", {}).items():
        path = directory / name
        if not path.is_file():
            return f"{name} has gone"
        if path.stat().st_size != size:
            return f"{name} has changed ({path.stat().st_size:,} bytes, {size:,} written)"
        if verify and size_and_crc(path) != [size, crc]:
            return f"{name} has changed (its checksum differs)"
    return None


def _refuse_to_replace(directory: Path, overwrite: bool) -> None:
    if overwrite or not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    why = "was made from other input or arguments" if read_record(directory) else "exists and is not from this script"
    raise UserError(f"{directory}: {why}: give --overwrite to replace it, or another --output_dir")


def _publish(path: Path, final: Path, record: dict) -> None:
    with open(path / RECORD, "w") as file:
        json.dump(record, file, indent=1, sort_keys=True)
    sync_tree(path)
    if final.exists():
        final.rename(final.parent / f"{BUILDING}-replaced-{final.name}")
    path.rename(final)
    sync_directory(final.parent)


def _clear(parent: Path) -> None:
    for path in parent.glob(f"{BUILDING}*"):
        shutil.rmtree(path)


def _lock(parent: Path, kind: int = fcntl.LOCK_EX, of: Path | None = None) -> int | None:
    """Hold the directory (or another one in its stead) for this process; released by the system however it ends."""
    handle = os.open(of or parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"{parent}: another run is writing here: wait for it, or choose another --output_dir"
        ) from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle


def _release(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)
