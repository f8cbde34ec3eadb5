"""Output directories that are either complete or not there: built under a temporary name, renamed at the end.

A complete directory holds `.complete.json`: what it was made from (source, arguments) and what came out. The same
command started again sees that and does nothing; another command replaces the directory only with --overwrite.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.cli import UserError

logger = logging.getLogger(__name__)
RECORD = ".complete.json"
BUILDING = ".building"


@dataclass
class Build:
    """`paths`: where to write each output that is not complete yet; `scratch`: room for temporary files;
    `results`: numbers to put into the record of completion."""

    paths: dict[str, Path]
    scratch: Path
    results: dict = field(default_factory=dict)


def read_record(directory: Path) -> dict | None:
    """The record of completion, {"made_from": ..., "results": ...}, or None where there is none."""
    try:
        return json.loads((directory / RECORD).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


@contextmanager
def building(parent: Path, names: list[str], made_from: dict, overwrite: bool) -> Iterator[Build]:
    """Build parent/name for each of `names` that is not there yet; `paths` is empty when all of them are.

    On a clean exit each output appears under its name at once; otherwise nothing stays behind. What a killed run
    left is cleared first. UserError if an output exists and was made from something else (unless `overwrite`), if
    `parent` is not writable or if another run is at work in it.
    """
    missing = [name for name in names if not _is_complete(parent / name, made_from)]
    for name in names:
        if name not in missing:
            logger.info("%s is complete and was made from the same input and arguments: nothing to do", parent / name)
    if not missing:
        yield Build({}, parent)
        return
    for name in missing:
        _refuse_to_replace(parent / name, overwrite)
    created = [path for path in (parent, *parent.parents) if not path.exists()]
    work = parent / BUILDING
    lock = None
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(parent)
            _clear(parent)
            work.mkdir()
            (work / "scratch").mkdir()
        except OSError as error:
            raise UserError(f"--output_dir {parent}: {error.strerror}: choose a directory you can write to") from None
        build = Build({name: work / name for name in missing}, work / "scratch")
        for path in build.paths.values():
            path.mkdir()
        try:
            yield build
            for name, path in build.paths.items():
                _publish(path, parent / name, {"made_from": made_from, "results": build.results})
        finally:
            _clear(parent)
        created = []
    finally:
        if lock is not None:
            os.close(lock)
        for path in created:  # after a failure only; those that hold something (a download to resume) stay
            with suppress(OSError):
                path.rmdir()


def _is_complete(directory: Path, made_from: dict) -> bool:
    record = read_record(directory)
    # Through JSON, so that tuples and the like compare as what was written.
    return record is not None and record["made_from"] == json.loads(json.dumps(made_from))


def _refuse_to_replace(directory: Path, overwrite: bool) -> None:
    if overwrite or not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    why = "was made from other input or arguments" if read_record(directory) else "exists and is not from this script"
    raise UserError(f"{directory}: {why}: give --overwrite to replace it, or another --output_dir")


def _publish(path: Path, final: Path, record: dict) -> None:
    with open(path / RECORD, "w") as file:
        json.dump(record, file, indent=1, sort_keys=True)
        sync(file)
    if final.exists():
        final.rename(final.parent / f"{BUILDING}-replaced-{final.name}")
    path.rename(final)
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def sync(file) -> None:
    """Have a file that was written reach the disk; call before the rename that makes it visible."""
    file.flush()
    os.fsync(file.fileno())


def _clear(parent: Path) -> None:
    for path in parent.glob(f"{BUILDING}*"):
        shutil.rmtree(path)


def _lock(parent: Path) -> int | None:
    """Hold the directory for this process; released by the system however the process ends."""
    handle = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"{parent}: another run is writing here: wait for it, or choose another --output_dir"
        ) from None
    except OSError:  # a file system without locks
        os.close(handle)
        return None
    return handle
