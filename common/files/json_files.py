"""Read untrusted files safely and write files atomically: JSON, JSON lines, checksums, content hashes, fsync."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from isal import isal_zlib

from common.cli import UserError, log_every

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


# ---- content hashes -------------------------------------------------------------------------------------------
#
# A file's identity is the SHA-256 of its content, never its path, size or date. Hashes are cached in ~/.cache
# (XDG_CACHE_HOME), one small file per path. A cached hash is used only while inode, size, mtime and ctime are
# unchanged: a replaced file has another inode or ctime even if its name, size and mtime are the same.

# A file this recent may change again within the same tick of the file system's clock, so its hash is not cached.
SETTLED_S = 2.0
LOG_EVERY_S = 5.0


def content_hash(path: str | Path) -> str:
    """SHA-256 (hex) of a regular file.

    UserError if it is no regular file or changes while it is read, OSError if it cannot be read.
    """
    path = Path(path).resolve()
    before = _stat(path)
    cached = _cache_file(path)
    with suppress(OSError, ValueError, TypeError, KeyError):
        entry = json.loads(cached.read_text())
        if entry["stat"] == before:
            return entry["sha256"]
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _stat(path) != before:
        raise UserError(f"{path}: changed while it was read: start again when it is complete")
    if max(before["mtime_ns"], before["ctime_ns"]) < time.time_ns() - SETTLED_S * 1e9:
        _write_cache(cached, {"stat": before, "sha256": digest})
    return digest


def content_hashes(paths: Iterable[str | Path], threads: int = 4) -> list[str]:
    """`content_hash` of several files, with a log line every few seconds."""
    paths = list(paths)
    with log_every(f"Hashing {len(paths)} input files", every=LOG_EVERY_S), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(content_hash, paths))


def combined_hash(paths: Iterable[str | Path], threads: int = 4) -> str:
    """One hash (hex) of the contents of several files, in this order."""
    return hashlib.sha256("\n".join(content_hashes(paths, threads)).encode()).hexdigest()


def _stat(path: Path) -> dict[str, int]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: not a regular file")
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _cache_file(path: Path) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "esm2-pretraining" / "content" / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


def _write_cache(file: Path, entry: dict) -> None:
    """Best effort: without a writable home directory files are hashed each time."""
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(entry))
        os.replace(partial, file)


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
    """One object per line; [] if the file is missing. A last line torn by a crash is dropped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


class JsonLinesLog:
    """A file of rows with a "step": metrics.jsonl has one per logged step, quant_stats.jsonl several."""

    def __init__(self, path: Path, keep_through: int):
        """Drops the rows beyond step `keep_through`: a resumed run takes those steps again."""
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
        except OSError as error:  # an error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def _lines(rows: Iterable[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
