"""A file's identity: the SHA-256 of its content, never its path, size or date.

Hashes are cached in ~/.cache (XDG_CACHE_HOME), one small file per path. A cached hash is used only while inode, size,
mtime and ctime are unchanged: a replaced file has another inode or ctime even if its name, size and mtime are the
same.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from common.cli import UserError, log_every

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
