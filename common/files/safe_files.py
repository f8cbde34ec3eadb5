"""Read untrusted files safely and write files atomically: JSON, JSON lines, checksums, fsync."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from isal import isal_zlib

from common.cli import UserError

JSON_LIMIT = 16 << 20  # bytes of a configuration, a manifest or a trainer state
LARGEST_INT = 1 << 53  # of JSON that every reader agrees on

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")
_KINDS = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
    "None": type(None),
    "dict": dict,
    "list[str]": list,
}


# ---- files that somebody else may have made: regular, of bounded size, values of the expected types ----------


def is_plain_name(name: Any) -> bool:
    """Whether this is a plain file name: no separator, no `..`, nothing unprintable."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None and name not in (".", "..")


def file_name(name: str, taken: set[str]) -> str:
    """For a protein of this name: characters that every filesystem takes, and none of the names that are taken."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:80].lstrip(".") or "protein"
    unique = next(each for n in range(len(taken) + 1) if (each := f"{plain}-{n}" if n else plain) not in taken)
    taken.add(unique)
    return unique


def open_regular(path: Path, follow_links: bool = False) -> BufferedReader:
    """Open a regular file for reading.

    OSError for anything else (a FIFO would block, a device is endless), and for a link unless `follow_links`.
    """
    # O_NONBLOCK: opening a FIFO without a writer returns; O_NOCTTY: opening a terminal does not take it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(errno.ELOOP, "is a link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def file_size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size


def read_limited(path: Path, limit: int, follow_links: bool = False) -> bytes:
    """The content of a regular file. ValueError if it has more bytes than `limit`."""
    with open_regular(path, follow_links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path.name} is larger than {limit:,} bytes")
    return content


def read_json(path: Path, limit: int = JSON_LIMIT, follow_links: bool = False) -> dict[str, Any]:
    """The object in a JSON file. ValueError if it holds anything else, OSError as `open_regular`."""
    try:
        content = json.loads(read_limited(path, limit, follow_links))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object of names and values, found {type(content).__name__}")
    return content


def check_type(name: str, value: Any, annotation: str) -> None:
    """ValueError unless the value has one of the types in `annotation` ("int | None"); integers count as floats.

    Integers beyond 2**53 are refused: no count or size is that large, and later arithmetic would overflow.
    """
    allowed = annotation.split(" | ")
    if not any(isinstance(value, _KINDS[k]) and (k == "bool" or not isinstance(value, bool)) for k in allowed):
        raise ValueError(f"{name} is {shorten(value)}, expected {annotation}")
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"{name} is {shorten(value)}: too large")
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} is {shorten(value)}, expected {annotation}")


def shorten(value: Any) -> str:
    """A value as text for an error message, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open` that makes the file readable and writable by its owner only, also if it exists."""
    descriptor = os.open(path, flags, 0o600)
    with suppress(OSError):  # another user's file, or a file system without modes
        os.fchmod(descriptor, 0o600)
    return descriptor


# ---- durable writes -----------------------------------------------------------------------------------------


def sync(file) -> None:
    """Flush a file to disk; call before the rename that publishes it."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def replace_flushed(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on exit flush it and rename it to `path`.

    A failure leaves `path` unchanged and removes the temporary file (a power cut may leave it).
    """
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Yield a new temporary directory to write to; on exit flush it and rename it to `directory`, which is replaced.

    A failure leaves `directory` as it was and removes the temporary one.
    """
    unfinished = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        sync_tree(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if directory.exists():
        shutil.rmtree(directory)
    unfinished.rename(directory)
    sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk: renames and removals."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything below it to disk; call before the rename that publishes it."""
    for root, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(root))


def size_and_crc(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file, as manifests keep them."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), isal_zlib.crc32(block, crc)
    return [size, crc]


# ---- JSON and JSON lines ------------------------------------------------------------------------------------


def write_json(path: Path, value: dict) -> None:
    """Replace the file atomically: a reader sees the old one or the new one."""
    with replace_flushed(path) as partial:
        partial.write_text(json.dumps(value, indent=4, sort_keys=True) + "\n")


def write_json_flushed(path: Path, value: dict, sort_keys: bool) -> None:
    """Write and flush a file of a directory that is renamed when complete."""
    with open(path, "w") as file:
        json.dump(value, file, indent=2, sort_keys=sort_keys)
        sync(file)


def read_json_lines(path: Path) -> list[dict]:
    """One object per line; [] if the file is missing. A last line torn by a crash is dropped; another is UserError."""
    rows, lines = [], path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if len(rows) + 1 < len(lines):
                raise UserError(f"{path}, line {len(rows) + 1}: not JSON: mend or remove that line") from error
    return rows


class JsonLinesLog:
    """A file of rows with a "step": metrics.jsonl has one per logged step, quant_stats.jsonl several."""

    def __init__(self, path: Path, keep_through: int):
        """Drops the rows beyond step `keep_through`: a resumed run takes those steps again."""
        self.path = path
        rows = [row for row in read_json_lines(path) if row["step"] <= keep_through]
        with replace_flushed(path) as partial:
            partial.write_text(_lines(rows))

    def write(self, *rows: dict) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(_lines(rows))
        except OSError as error:  # an error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
