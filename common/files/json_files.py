"""Files that are written whole or not at all, and checked when they are read: checksums, JSON, JSON lines."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from isal import isal_zlib

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
    """Whether this is the name of a file in the directory at hand: no separator, no `..`, nothing unprintable."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None and name not in (".", "..")


def open_regular(path: Path, follow_links: bool = False) -> BinaryIO:
    """Open a regular file to read. OSError for anything else (a FIFO would block, a device has no end), and for a link
    unless links are followed."""
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


def file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def read_limited(path: Path, limit: int, follow_links: bool = False) -> bytes:
    """All of a regular file. ValueError where it has more bytes than `limit`."""
    with open_regular(path, follow_links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path.name} is larger than {limit:,} bytes")
    return content


def read_json(path: Path, limit: int = JSON_LIMIT, follow_links: bool = False) -> dict[str, Any]:
    """The object that a JSON file holds. ValueError where it holds something else, OSError as `open_regular`."""
    try:
        content = json.loads(read_limited(path, limit, follow_links))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object of names and values, found {type(content).__name__}")
    return content


def check_type(name: str, value: Any, annotation: str) -> None:
    """ValueError unless the value is of one of the types in `annotation` ("int | None"); an integer is a float, too.

    Integers beyond 2**53 are refused: no count or size here comes near, and later arithmetic would overflow.
    """
    allowed = annotation.split(" | ")
    if not any(isinstance(value, _KINDS[k]) and (k == "bool" or not isinstance(value, bool)) for k in allowed):
        raise ValueError(f"{name} is {shorten(value)}, expected {annotation}")
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"{name} is {shorten(value)}: too large")
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name} is {shorten(value)}, expected {annotation}")


def shorten(value: Any) -> str:
    """A value for an error line."""
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
    """Have a file that was written reach the disk; call before the rename that makes it visible."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def replace_flushed(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write a file to, which then takes its place, once it is on the disk.

    A failure leaves `path` as it was and nothing beside it; a power cut too, but for the unfinished file.
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


def sync_directory(path: Path) -> None:
    """Have the names in a directory reach the disk: what was renamed or removed there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Have a directory reach the disk, with all that is in it; call before the rename that makes it visible."""
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
    """Replace the file at once: whoever reads finds the old one or the new one."""
    with replace_flushed(path) as partial:
        partial.write_text(json.dumps(value, indent=4, sort_keys=True) + "\n")


def write_json_flushed(path: Path, value: dict, sort_keys: bool) -> None:
    """Have it on the disk on return: a file of a directory that appears under its name when all of it is there."""
    with open(path, "w") as file:
        json.dump(value, file, indent=2, sort_keys=sort_keys)
        sync(file)


def read_json_lines(path: Path) -> list[dict]:
    """One object a line, none where there is no file; a last line torn by a crash is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class JsonLinesLog:
    """Rows with a "step", added as they come: metrics.jsonl has one a logged step, quant_stats.jsonl several."""

    def __init__(self, path: Path, keep_through: int):
        """Rows beyond step `keep_through` belong to steps that will be taken again: they are dropped."""
        self.path = path
        kept = [row for row in read_json_lines(path) if row["step"] <= keep_through]
        partial = path.with_suffix(".partial")
        try:
            partial.write_text(_lines(kept))
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    def write(self, *rows: dict) -> None:
        try:
            with open(self.path, "a") as file:
                file.write(_lines(rows))
        except OSError as error:  # of a full disk, which names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
