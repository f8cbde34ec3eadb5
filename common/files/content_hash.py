"""Identity of a file: the SHA-256 of its content, never its path, size or date.

Reading a file of many gigabytes takes a while, so hashes are cached in ~/.cache (XDG_CACHE_HOME), one small file for
each path. A cached hash counts only while inode, size, mtime and ctime are unchanged: a replaced file has another
inode or ctime even if its name, size and mtime are the old ones.
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

from common.cli import UserError
from common.waiting import said_while

# A file changed this recently may change again without its times showing it (file systems count in ticks).
SETTLED_S = 2.0
SAID_EVERY_S = 5.0


def content_hash(path: str | Path) -> str:
    """SHA-256 (hex) of a regular file.

    UserError if it is no regular file or is written to meanwhile, OSError if it cannot be read.
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
    """`content_hash` of several files. The log says so where it takes long."""
    paths = list(paths)
    with said_while(f"Hashing {len(paths)} input files", every=SAID_EVERY_S), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(content_hash, paths))


def combined_hash(paths: Iterable[str | Path], threads: int = 4) -> str:
    """One hash (hex) of the contents of several files, in this order."""
    return hashlib.sha256("\n".join(content_hashes(paths, threads)).encode()).hexdigest()


def _stat(path: Path) -> dict[str, int]:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: not a regular file")
    return {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
    }


def _cache_file(path: Path) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "esm2-pretraining" / "content" / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]


def _write_cache(file: Path, entry: dict) -> None:
    """Best effort: without a home directory to write to, files are hashed each time."""
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_text(json.dumps(entry))
        os.replace(partial, file)
