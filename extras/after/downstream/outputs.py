"""Output directories of the scripts after training: locked, without an input inside, replaced file by file.

The manifest, `.files.json`, says what a directory was made from, whether it is finished, and which files are ours,
with size and CRC-32. --overwrite removes these alone; the same command on a finished output does nothing.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.cli import MAKE_ROOM, NO_ROOM, UserError, one_line, owner_of_denied
from common.files.safe_files import is_plain_name, read_json, size_and_crc, sync_tree, write_json
from extras.after.downstream.results import RESULTS
from extras.prepare.output_directory import lock, refuse_inputs, release

logger = logging.getLogger(__name__)
MANIFEST = ".files.json"
UNFINISHED = ".unfinished"  # directory in it, of files that are still to get their names


@dataclass(frozen=True)
class Manifest:
    """made_from: None if an earlier version did not record it; files: {path: [bytes, CRC-32]}, None if these are not
    known, or of a directory that is ours as a whole."""

    made_from: dict[str, Any] | None
    finished: bool
    files: dict[str, list[int] | None]

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        try:
            content = read_json(directory / MANIFEST)
            names = [name for name in content["files"] if all(map(is_plain_name, name.split("/")))]
            files = {name: content["files"][name] for name in names}
            return cls(dict(content["made_from"]), content["finished"] is True, files)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def of_earlier(cls, directory: Path, key: str, *names: str) -> Manifest | None:
        """The manifest of an output that has none, if its results have `key`, which only this script writes."""
        with suppress(OSError, ValueError):
            if key in read_json(directory / RESULTS):
                return cls(None, True, dict.fromkeys((RESULTS, *names)))
        return None

    def change(self, directory: Path) -> str | None:
        """How a file differs from what was written, or None."""
        for name, written in self.files.items():
            if not (directory / name).exists():
                return f"{name} has gone"
            if written is not None and size_and_crc(directory / name) != written:
                return f"{name} has changed"
        return None


@dataclass
class Output:
    """A locked directory that is to be written. files: ours that are there; resumes: whether a stopped run of the same
    command left them; flag: for errors."""

    directory: Path
    made_from: dict[str, Any]
    files: dict[str, list[int] | None]
    resumes: bool
    flag: str

    def begin(self, *names: str) -> None:
        """Record that these files and directories are ours, before they are written. Those of an earlier output are
        removed, unless it is resumed. UserError for one that is somebody else's."""
        for name in names:
            self._check_ours(name)
        earlier, self.files = self.files, dict.fromkeys(names)
        self._record(False, earlier | self.files)
        for name in earlier:
            if not (self.resumes and name.split("/")[0] in names):
                self._remove(name)

    def finish(self, *names: str) -> None:
        """Record that these are written; what else was begun is removed."""
        paths = [each for name in names for each in files_below(self.directory / name)]
        files = {path.relative_to(self.directory).as_posix(): size_and_crc(path) for path in paths}
        for name in self.files.keys() - set(names):
            self._remove(name)
        self._record(True, files)

    @contextmanager
    def replaced(self) -> Iterator[Path]:
        """A temporary directory to write all files to, which then replace those of an earlier output."""
        unfinished = self.directory / UNFINISHED
        try:
            with writing(self.directory, self.flag):
                unfinished.mkdir()
                yield unfinished
                sync_tree(unfinished)
                names = sorted(path.name for path in unfinished.iterdir())
                self.begin(*names)
                for name in names:
                    os.replace(unfinished / name, self.directory / name)
                self.finish(*names)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _check_ours(self, name: str) -> None:
        for path in files_below(self.directory / name):
            if not self.files.keys() & {name, path.relative_to(self.directory).as_posix()}:
                raise UserError(
                    f"{path}: is not of this script and would be replaced: move it, or choose another {self.flag}"
                )

    def _record(self, finished: bool, files: dict[str, list[int] | None]) -> None:
        write_json(self.directory / MANIFEST, {"made_from": self.made_from, "finished": finished, "files": files})

    def _remove(self, name: str) -> None:
        path = self.directory / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self.directory or any(parent.iterdir()):
                break
            parent.rmdir()


def files_below(path: Path) -> list[Path]:
    """All files of a directory, or the file itself; [] if there is nothing."""
    if path.is_dir() and not path.is_symlink():
        return sorted(each for each in path.rglob("*") if each.is_symlink() or not each.is_dir())
    return [path] if os.path.lexists(path) else []


@contextmanager
def claimed(
    directory: Path,
    inputs: Mapping[str, str | None],
    made_from: dict[str, Any],
    overwrite: bool,
    earlier: Manifest | None = None,
    flag: str = "--output_dir",
) -> Iterator[Output | None]:
    """The locked output directory; None, and a line, if it is finished and was made from the same.

    inputs: {flag: path or name}; made_from: the script's name, flags and hashes of inputs; earlier: of an output
    without manifest.
    UserError if it holds an input, was made from something else (unless `overwrite`), has files but no output of the
    script, or another command writes there.
    """
    refuse_inputs(directory, inputs, flag)
    with locked(directory, flag):
        yield _claim(directory, json.loads(json.dumps(made_from)), overwrite, earlier, flag)


def _claim(
    directory: Path, made_from: dict[str, Any], overwrite: bool, earlier: Manifest | None, flag: str
) -> Output | None:
    otherwise = "--overwrite it, or choose another"
    shutil.rmtree(directory / UNFINISHED, ignore_errors=True)  # of a killed run, as is this
    (directory / f"{MANIFEST}.partial").unlink(missing_ok=True)
    manifest = Manifest.read(directory) or earlier
    if manifest is None:
        if other := next(directory.iterdir(), None):
            raise UserError(f"{flag} {directory}: exists and is not of this script ({other.name}): choose another")
        return Output(directory, made_from, {}, False, flag)
    if manifest.made_from is not None and (script := manifest.made_from.get("script")) != made_from.get("script"):
        raise UserError(f"{flag} {directory}: exists, and is of {script}: choose another")
    if overwrite:
        return Output(directory, made_from, manifest.files, False, flag)
    if manifest.made_from is None:
        raise UserError(f"{flag} {directory}: exists, by an earlier version: {otherwise}")
    if manifest.made_from != made_from:
        raise UserError(f"{flag} {directory}: was made from other input or arguments: {otherwise}")
    if not manifest.finished:
        return Output(directory, made_from, manifest.files, True, flag)
    if change := manifest.change(directory):
        raise UserError(f"{flag} {directory}: {change} since it was written: {otherwise}")
    logger.info("%s was made by the same command: nothing to do", directory)
    return None


@contextmanager
def made(directory: Path, flag: str) -> Iterator[None]:
    """Make the directory and its parents; after an error, those that are empty go again."""
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        with writing(directory, flag):
            directory.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in created:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def locked(directory: Path, flag: str) -> Iterator[None]:
    """The directory, made if need be. UserError while another command holds it."""
    with made(directory, flag):
        handle = lock(directory, flag=flag)
        try:
            yield
        finally:
            release(handle)


@contextmanager
def locked_file(path: Path, flag: str) -> Iterator[None]:
    """Lock an output file by its `.partial`, which `replace_flushed` renames later. UserError while another command
    holds it."""
    partial = path.with_name(f"{path.name}.partial")
    with made(path.parent, flag):
        with writing(path, flag):
            partial.touch()
        handle = lock(path, of=partial, flag=flag)
        try:
            yield
        finally:
            with suppress(OSError):
                if handle is None or os.path.samestat(partial.stat(), os.fstat(handle)):
                    partial.unlink()
            release(handle)


@contextmanager
def writing(path: Path, flag: str = "--output_dir") -> Iterator[None]:
    """UserError where a file cannot be written: a full disk, `ulimit -f`, a directory of another user."""
    try:
        yield
    except SafetensorError as error:  # it has the system's message alone
        raise UserError(f"{flag} {path}: {one_line(error)[:120]}: {MAKE_ROOM}") from error
    except OSError as error:
        otherwise = owner_of_denied(error) or f"choose another {flag}"
        what_to_do = MAKE_ROOM.replace("--output_dir", flag) if error.errno in NO_ROOM else otherwise
        raise UserError(f"{flag} {path}: {error.strerror or one_line(error)}: {what_to_do}") from error
