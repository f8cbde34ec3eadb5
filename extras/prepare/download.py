"""Download a URL into a directory: resumed after broken connections, restarts and full disks; verified."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from common.cli import MAKE_ROOM, NO_ROOM, UserError
from extras.prepare.transfers import FetchError, TemporaryError, Transfer, identity, open_transfer, shown

logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RetryPolicy:
    """When to retry. `attempts` failures in a row without progress end the download. Waits double from first_wait_s,
    or follow Retry-After, up to longest_wait_s. A transfer ends after timeout_s of silence, or below min_bytes_per_s.
    """

    timeout_s: float = 60.0
    min_bytes_per_s: float = 10_000.0
    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 300.0


RETRIES = RetryPolicy()


@dataclass(frozen=True)
class Expected:
    """What a file should be: `sums` by algorithm (hex, lower case), `size` in bytes or None, and who says so."""

    sums: dict[str, str] = field(default_factory=dict)
    size: int | None = None
    authority: str = ""

    def mismatch(self, path: Path) -> str | None:
        """How the file differs from what is expected, or None."""
        size = path.stat().st_size
        if self.size not in (None, size):
            return f"has {size:,} bytes, {self.authority} says {self.size:,}"
        for name, expected in self.sums.items():
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False)).hexdigest()  # noqa: B023
            if digest != expected:
                return f"its {name} is {digest}, {self.authority or '--' + name} says {expected}"
        return None


ANYTHING = Expected()


class DownloadFiles:
    """The files of one download: `part` grows, `note` says which version it is part of, `target` is complete."""

    def __init__(self, directory: Path, url: str) -> None:
        name = Path(unquote(urlsplit(url).path)).name or "source"
        # File names are limited to 255 bytes; the hash tells files of the same name apart.
        self.target = directory / f"{hashlib.sha256(identity(url).encode()).hexdigest()[:8]}-{name[-100:]}"
        self.part, self.note = (self.target.with_name(self.target.name + suffix) for suffix in (".part", ".json"))

    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def begin(self, transfer: Transfer) -> None:
        """Start over: note the version before its first byte is written."""
        self.part.unlink(missing_ok=True)
        self.note.write_text(json.dumps({"version": transfer.version, "total": transfer.total}))

    def read_note(self) -> dict:
        try:
            return json.loads(self.note.read_text())
        except (FileNotFoundError, ValueError):  # killed during the write
            return {"version": "", "total": None}

    def remove(self) -> None:
        for path in (self.target, self.part, self.note):
            path.unlink(missing_ok=True)
        with suppress(OSError):
            self.part.parent.rmdir()  # only if it is empty

    def keep(self) -> str:
        """After a failure: remove files that cannot be resumed. Returns a remark about the bytes that are kept."""
        if self.size() and self.read_note()["version"]:
            return f" ({self.size():,} bytes have arrived and are kept)"
        self.remove()
        return ""


@contextmanager
def download_directory(path: Path) -> Iterator[Path]:
    """A directory for downloads, removed once they are read, or if they turn out to be unusable (UserError).

    It stays after a FetchError or a kill, so that the next run resumes.
    """
    try:
        yield path
    except UserError as error:
        if not isinstance(error, FetchError):
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def download(url: str, directory: Path, expected: Expected = ANYTHING, retries: RetryPolicy = RETRIES) -> Path:
    """Fetch `url` into `directory` and return the file's path; a complete file from an earlier run is reused.

    A broken transfer is resumed (Range, FTP REST) if the remote file is unchanged (ETag, Last-Modified, MDTM), else
    started over. Size and checksums of the whole file are verified. A wrong file is removed, and downloaded once more
    if it had been resumed: a server may change a file and keep its ETag.

    Raises FetchError. Bytes that have arrived stay in `directory`, unless they are wrong.
    """
    files = DownloadFiles(directory, url)
    resumed = files.target.exists()  # by an earlier run, maybe in several transfers
    for last in (False, True):
        if not files.target.exists():
            resumed |= _fetch(url, files, expected, retries)
        mismatch = expected.mismatch(files.target)
        if mismatch is None:
            files.note.unlink(missing_ok=True)
            return files.target
        files.remove()
        if last or not resumed:
            break
        logger.warning("%s: %s; it was downloaded in several transfers: downloading it again", shown(url), mismatch)
    raise FetchError(f"{shown(url)}: {mismatch}: the file was removed: check the address and the checksum")


def _fetch(url: str, files: DownloadFiles, expected: Expected, retries: RetryPolicy) -> bool:
    """Make files.target, with retries. Returns whether a transfer was resumed."""
    resumed = False
    failures, furthest = 0, files.size()
    while True:
        try:
            resumed |= _attempt(url, files, expected, retries)
            files.part.rename(files.target)
            return resumed
        except TemporaryError as error:
            arrived = files.size()
            failures = 1 if arrived > furthest and not isinstance(error, _TooSlow) else failures + 1
            furthest = max(furthest, arrived)
            if failures >= retries.attempts:
                note = files.keep()
                raise FetchError(f"{shown(url)}: {error} ({failures} attempts): {error.advice}{note}") from error
            wait_s = max(retries.first_wait_s * 2 ** (failures - 1), error.retry_after_s)
            wait_s = min(wait_s, retries.longest_wait_s)
            logger.warning("%s: %s; trying again in %.0f s", shown(url), error, wait_s)
            time.sleep(wait_s)
        except FetchError:
            files.keep()
            raise
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            where = files.part.parent
            raise FetchError(f"{where}: no space left for {shown(url)}: {MAKE_ROOM}{files.keep()}") from error


class _TooSlow(TemporaryError):
    """The transfer stalled: bytes that arrived all the same do not count as progress."""


def _attempt(url: str, files: DownloadFiles, expected: Expected, retries: RetryPolicy) -> bool:
    """One transfer into files.part. Returns whether it resumed an earlier one."""
    files.part.parent.mkdir(parents=True, exist_ok=True)
    note = files.read_note()
    start = files.size() if note["version"] else 0
    if start:
        logger.info("Resuming %s after %s bytes", shown(url), f"{start:,}")
        if start == note["total"]:
            return True
    with closing(open_transfer(url, start, note["version"], retries.timeout_s)) as transfer:
        _check_size(files, transfer, expected)
        if transfer.start == 0:
            files.begin(transfer)
        _copy(transfer, files.part, expected, retries)
    return transfer.start > 0


def _check_size(files: DownloadFiles, transfer: Transfer, expected: Expected) -> None:
    """Before any byte is written: FetchError for an unexpected size, or if the disk is too small."""
    if transfer.total is None:
        return
    if expected.size not in (None, transfer.total):
        files.remove()
        raise FetchError(
            f"{shown(transfer.url)}: the server has {transfer.total:,} bytes, {expected.authority} says "
            f"{expected.size:,}: a release may be under way there: start again later"
        )
    missing = transfer.total - transfer.start
    free = shutil.disk_usage(files.part.parent).free + (files.size() if transfer.start == 0 else 0)  # `begin` frees it
    if missing > free:
        raise FetchError(
            f"{files.part.parent}: not enough space for {shown(transfer.url)}: {missing:,} bytes to come, "
            f"{free:,} free: {MAKE_ROOM}"
        )


def _copy(transfer: Transfer, part: Path, expected: Expected, retries: RetryPolicy) -> None:
    position, total = transfer.start, transfer.total if transfer.total is not None else expected.size
    window_s = window_bytes = 0
    interval = 0.5 if sys.stderr.isatty() else 10.0
    name = shown(transfer.url)
    bar = tqdm(total=total, initial=position, desc=name, unit="B", unit_scale=True, mininterval=interval)
    with bar, open(part, "r+b" if position else "wb") as file:
        file.seek(position)
        file.truncate()
        while True:
            began = time.monotonic()
            chunk = transfer.read(CHUNK_BYTES)
            if not chunk:
                break
            window_s += time.monotonic() - began  # time in the network alone, not in writes to the disk
            window_bytes += len(chunk)
            file.write(chunk)
            position += len(chunk)
            bar.update(len(chunk))
            if window_s >= retries.timeout_s:
                if window_bytes < retries.min_bytes_per_s * window_s:
                    raise _TooSlow(f"{window_bytes:,} bytes arrived in {window_s:.0f} s")
                window_s = window_bytes = 0
    if total is not None and position != total:
        if position > total:
            part.unlink()  # too long: not a prefix of the right file
        raise TemporaryError(f"{position:,} of {total:,} bytes arrived")
