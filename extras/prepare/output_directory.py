"""Output directories that are complete or absent: built under a temporary name, renamed at the end.

A complete directory holds `.complete.json`: its input and arguments, its results, and every file with size and CRC-32.
The same command run again checks the files against it and does nothing; another command replaces the directory only
with --overwrite, which rebuilds everything.

A killed or failed run leaves its temporary directory with a journal, from which the same command resumes. A run that
has recorded nothing leaves nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.cli import MAKE_ROOM, NO_ROOM, UserError, owner_of_denied
from common.files.safe_files import size_and_crc, sync, sync_directory, sync_tree

logger = logging.getLogger(__name__)
RECORD = ".complete.json"
BUILDING = ".building"
SCRATCH, JOURNAL, MADE_FROM = "scratch", "journal.jsonl", "made from"


def refuse_inputs(directory: Path, inputs: Mapping[str, str | None], flag: str = "--output_dir") -> None:
    """UserError for an input that is the directory or inside it."""
    for name, value in inputs.items():
        if value and Path(value).exists() and Path(value).resolve().is_relative_to(directory.resolve()):
            raise UserError(f"{flag} {directory}: {name} {value} is in there: choose another")


class Journal:
    """An append-only file of (key, JSON value) records that survives a kill at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        whole = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                key, self._values[key] = json.loads(line) if line.endswith(b"\n") else None
            except (TypeError, ValueError):  # torn by a crash during the write
                os.truncate(path, whole)
                break
            whole += len(line)

    def done(self, key: str) -> Any:
        """The latest value of `key`, or None."""
        return self._values.get(key)

    @property
    def holds_work(self) -> bool:
        """Whether there is any record besides the description of the work."""
        return not self._values.keys() <= {MADE_FROM}

    def note(self, key: str, value) -> None:
        """Record (key, value), flushed to disk. Sync the files it refers to first."""
        line = json.dumps([key, value]) + "\n"
        with open(self.path, "a") as file:
            file.write(line)
            sync(file)
        self._values[key] = json.loads(line)[1]  # what the next run will read


@dataclass
class Build:
    """`paths`: where to write each incomplete output; `scratch`: a directory for temporary files; `results`: numbers
    for the record of completion; `journal`: the parts that an interrupted run has finished.

    `paths` and `scratch` are as that run left them; with an empty journal they are empty directories.
    """

    paths: dict[str, Path]
    scratch: Path
    journal: Journal
    results: dict = field(default_factory=dict)

    def done(self, key: str) -> Any:
        """The value noted under `key` by this run or the interrupted one; None if there is none."""
        return self.journal.done(key)

    def note(self, key: str, value) -> None:
        """Note that a part is done; its files must be on disk (`sync`)."""
        self.journal.note(key, value)


def check_free(directory: Path) -> None:
    """UserError unless the directory is new or empty."""
    if os.path.lexists(directory) and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory}: there is something already: name a directory that is still to be made")


def read_record(directory: Path) -> dict | None:
    """The record of completion, {"made_from": ..., "results": ...}, or None."""
    try:
        return json.loads((directory / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None


@contextmanager
def building(
    parent: Path,
    names: list[str],
    made_from: dict,
    overwrite: bool,
    verify: bool = False,
    siblings: tuple[str, ...] = (),
) -> Iterator[Build]:
    """Build parent/name for each of `names` that is not complete; `paths` is empty if all are.

    overwrite: rebuild all of them; verify: compare checksums of complete outputs, not only sizes; siblings: other
    outputs of the same script in `parent`: those made from other input are removed.

    On a clean exit each output is renamed into place. Otherwise (kill, interrupt, any error) the noted parts stay, and
    the next run with the same `made_from` resumes from them; work for another `made_from` is removed. UserError if an
    output was made from something else (unless `overwrite`), if `parent` is not writable or another run works in it.
    """
    made_from = json.loads(json.dumps(made_from))  # as it is read again: lists, not tuples
    created = [path for path in (parent, *parent.parents) if not path.exists()]
    handle = None
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            handle = lock(parent)
            if (parent / BUILDING).is_dir():
                release(lock(parent, of=parent / BUILDING))  # ranks of an earlier run may still be at work
            missing = _missing(parent, names, made_from, overwrite, verify)
            stale = [name for name in siblings if name not in names and _is_stale(parent / name, made_from)]
            for name in stale:
                _refuse_to_replace(parent / name, overwrite)
            build = _open_work(parent, missing, made_from) if missing else None
        except OSError as error:
            otherwise = owner_of_denied(error) or "choose a directory you can write to"
            what_to_do = MAKE_ROOM if error.errno in NO_ROOM else otherwise
            raise UserError(f"--output_dir {parent}: {error.strerror}: {what_to_do}") from None
        if build is None:
            _clear(parent)  # a run was killed after its last rename
            yield Build({}, parent, Journal(parent / BUILDING / JOURNAL))
            return
        failed = True
        try:
            yield build
            for name, path in build.paths.items():
                manifest = {"made_from": made_from, "results": build.results, "files": _files(path)}
                _publish(path, parent / name, manifest)
            for name in stale:
                logger.warning("%s was made from other input: removed", parent / name)
                shutil.rmtree(parent / name)
            failed = False
        except OSError as error:
            error.filename = error.filename or str(parent)  # an error of a full disk names no file
            raise
        finally:
            if failed and build.journal.holds_work:
                logger.info("Finished parts stay in %s: the same command resumes from there", parent / BUILDING)
            else:
                _clear(parent)
        created = []
    finally:
        release(handle)
        for path in created:  # only after a failure; directories that are not empty stay
            with suppress(OSError):
                path.rmdir()


def hold_work(parent: Path) -> None:
    """Lock the build in `parent` against other runs for the lifetime of this process.

    For the other ranks of a run whose main rank is in `building`: they may outlive it. UserError if it is locked.
    """
    lock(parent, fcntl.LOCK_SH, parent / BUILDING)


def _missing(parent: Path, names: list[str], made_from: dict, overwrite: bool, verify: bool) -> list[str]:
    if overwrite:
        begun = Journal(parent / BUILDING / JOURNAL).done(MADE_FROM)
        if begun is None or begun["made_from"] != made_from:
            return list(names)
        # The same command was killed: the outputs it had published are new.
        return [name for name in names if name not in begun["names"] or (parent / BUILDING / name).is_dir()]
    missing = []
    for directory in (parent / name for name in names):
        record = read_record(directory)
        if record is None or record["made_from"] != made_from:
            _refuse_to_replace(directory, overwrite)
            missing.append(directory.name)
        elif change := how_changed(directory, record, verify):
            raise UserError(f"{directory}: {change} since it was written: give --overwrite to make it again")
        else:
            logger.info("%s is complete and was made from the same input and arguments: nothing to do", directory)
    return missing


def _open_work(parent: Path, names: list[str], made_from: dict) -> Build:
    """The work of an interrupted run for the same outputs, otherwise empty directories."""
    work = parent / BUILDING
    paths = {name: work / name for name in names}
    journal = Journal(work / JOURNAL)
    of = journal.done(MADE_FROM)
    # An output directory that is missing was published just before the kill.
    if (
        of is None
        or of["made_from"] != made_from
        or not all(name in of["names"] and path.is_dir() for name, path in paths.items())
    ):
        if journal.holds_work:
            logger.warning("%s: removing the work of an interrupted run for other input or arguments", work)
        _clear(parent)
        try:
            for path in (work, work / SCRATCH, *paths.values()):
                path.mkdir()
            journal = Journal(work / JOURNAL)
            journal.note(MADE_FROM, {"made_from": made_from, "names": names})
        except OSError:  # the disk is full
            _clear(parent)
            raise
    else:
        logger.info("Resuming from what an interrupted run left in %s", work)
    return Build(paths, work / SCRATCH, journal)


def _is_stale(directory: Path, made_from: dict) -> bool:
    """Whether the same script (its `made_from` has the same keys) made it from other input."""
    record = read_record(directory)
    if record is None or record["made_from"] == made_from:
        return False
    always = {name for name in made_from if not name.startswith("on_")}  # on_* are recorded only if given
    return always <= record["made_from"].keys()


def _files(directory: Path) -> dict[str, list[int]]:
    """{path below the directory: [bytes, CRC-32]}."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != RECORD)
    names = [str(path.relative_to(directory)) for path in paths]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(size_and_crc, paths), strict=True))


def how_changed(directory: Path, record: dict, verify: bool = False) -> str | None:
    """How a file differs from the record of completion, or None. Records of earlier versions list no files."""
    for name, (size, crc) in record.get("files", {}).items():
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


def lock(parent: Path, kind: int = fcntl.LOCK_EX, of: Path | None = None, flag: str = "--output_dir") -> int | None:
    """Lock `of` (default: parent) for this process; the system releases it when the process ends. None where the file
    system has no locks. UserError, which names `parent`, while another process holds it."""
    handle = os.open(of or parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{parent}: another run is writing here: wait for it, or choose another {flag}") from None
    except OSError:  # the file system has no locks
        os.close(handle)
        return None
    return handle


def release(handle: int | None) -> None:
    if handle is not None:
        os.close(handle)
