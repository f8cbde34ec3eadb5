"""Download a URL into a directory, through broken connections, restarts, busy servers and full disks; verified.

`transfers` opens a download, `download_files` says whether what has arrived is what should have.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from common.cli import MAKE_ROOM, NO_ROOM, UserError
from extras.prepare.transfers import FetchError, TemporaryError, Transfer, identity, open_transfer, shown

# The files of a download that is under way: what has arrived, whether it is right, and how it becomes whole.

GZIP = b"\x1f\x8b"
COPY_BYTES = 1 << 20
HASHED_BYTES = 4 << 20


@dataclass(frozen=True)
class Expected:
    """What a file should be: `sums` by algorithm (hex, lower case), `size` in bytes or None, and who says so."""

    sums: dict[str, str] = field(default_factory=dict)
    size: int | None = None
    authority: str = ""


ANYTHING = Expected()


class Digest:
    """The checksums that are asked for, of the first `position` bytes of a file that grows."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.restart()

    def restart(self) -> None:
        self.position = 0
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in self.expected.sums}

    def update(self, data: bytes) -> None:
        for each in self._hashes.values():
            each.update(data)
        self.position += len(data)

    def catch_up(self, path: Path, end: int) -> None:
        """Have `position` be `end`, reading from `path` what has not been seen."""
        assert self.position <= end
        if not self._hashes:
            self.position = end
            return
        with open(path, "rb") as file:
            file.seek(self.position)
            while data := file.read(min(HASHED_BYTES, end - self.position)):
                self.update(data)

    def complaint(self, path: Path) -> str | None:
        """What is wrong with the whole file, or None; what was hashed while it arrived is not read again."""
        size, expected = path.stat().st_size, self.expected
        if expected.size is not None and size != expected.size:
            return f"has {size:,} bytes, {expected.authority} says {expected.size:,}"
        self.catch_up(path, size)
        for name, wanted in expected.sums.items():
            if (found := self._hashes[name].hexdigest()) != wanted:
                return f"its {name} is {found}, {expected.authority or '--' + name} says {wanted}"
        return None


class DownloadFiles:
    """The files of one download: `part` grows, `note` says what it is part of, `target` is complete; `plain` is
    `part` without the compression of the transfer."""

    def __init__(self, directory: Path, url: str) -> None:
        name = Path(unquote(urlsplit(url).path)).name or "source"
        # Names end at 255 bytes; the hash tells files of one name apart.
        self.target = directory / f"{hashlib.sha256(identity(url).encode()).hexdigest()[:8]}-{name[-100:]}"
        self.part = self.target.with_name(self.target.name + ".part")
        self.note = self.target.with_name(self.target.name + ".json")
        self.plain = self.target.with_name(self.target.name + ".plain")

    def size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def begin(self, transfer: Transfer) -> None:
        """Note what the bytes belong to before the first one is written."""
        self.part.unlink(missing_ok=True)
        self.note.write_text(
            json.dumps({"version": transfer.version, "total": transfer.total, "gzipped": transfer.gzipped_in_transit})
        )

    def read_note(self) -> dict:
        try:
            return json.loads(self.note.read_text())
        except (FileNotFoundError, ValueError):  # killed in mid-write
            return {"version": "", "total": None, "gzipped": False}

    def remove(self) -> None:
        for path in (self.target, self.part, self.note, self.plain):
            path.unlink(missing_ok=True)

    def keep(self) -> str:
        """After a failure: remove what cannot be gone on from. Returns what there is to say about the rest."""
        if self.size() and self.read_note()["version"]:
            return f" ({self.size():,} bytes have arrived and are kept)"
        self.remove()
        with suppress(OSError):
            self.part.parent.rmdir()  # only if there is nothing in it
        return ""

    def complete(self) -> bool:
        """Give the whole file its name; True if a compression that was the server's own idea had to be undone first.

        Raises TemporaryError, and removes everything, if that compression is broken.
        """
        if self.read_note()["gzipped"]:
            try:
                if _gzip_layers(self.part) > (self.target.suffix == ".gz"):
                    with gzip.open(self.part, "rb") as encoded, open(self.plain, "wb") as file:
                        shutil.copyfileobj(encoded, file, COPY_BYTES)
                    self.plain.rename(self.target)
                    self.part.unlink()
                    return True
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.remove()
                raise TemporaryError(f"arrived as a gzip stream that is broken ({error})") from error
        self.part.rename(self.target)
        return False


def _gzip_layers(path: Path) -> int:
    """How often the file is gzipped: 0, 1 or 2. Servers that label a .gz file as encoded send it as it is: 1."""
    with open(path, "rb") as file:
        if file.read(2) != GZIP:
            return 0
        file.seek(0)
        with gzip.open(file, "rb") as inner:
            return 1 + (inner.read(2) == GZIP)


logger = logging.getLogger(__name__)
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Patience:
    """With servers. `attempts` failures in a row that bring the download no further are the end of it, with waits of
    first_wait_s, twice that, four times that ... in between, or as long as the server asks for (Retry-After), but no
    longer than longest_wait_s. A transfer is broken off after timeout_s of silence, or of less than
    min_bytes_per_s."""

    timeout_s: float = 60.0
    min_bytes_per_s: float = 10_000.0
    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 300.0


PATIENCE = Patience()


@contextmanager
def download_directory(path: Path) -> Iterator[Path]:
    """A directory for downloads that is removed once they are used up, or turned out to be unusable.

    It stays when fetching fails or the process is stopped, so that the next run goes on where this one ended.
    """
    try:
        yield path
    except FetchError:
        with suppress(OSError):
            path.rmdir()  # only if there is nothing in it
        raise
    except UserError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def download(url: str, directory: Path, expected: Expected = ANYTHING, patience: Patience = PATIENCE) -> Path:
    """Fetch `url` into `directory` and return the file's path; a complete file that is already there is returned.

    A broken transfer goes on where it ended (Range, FTP REST) if the remote file is still the same one (ETag,
    Last-Modified, MDTM); otherwise it starts over. Size and checksums are verified, of resumed files as a whole; a
    file that is wrong is removed, and if it had arrived in pieces fetched once more in one.

    Raises FetchError. What has arrived by then stays in `directory`, except what is wrong.
    """
    files = DownloadFiles(directory, url)
    digest = Digest(expected)
    in_pieces = files.target.exists()  # came in an earlier run, we don't know how
    for last in (False, True):
        if not files.target.exists():
            in_pieces |= _fetch(url, files, digest, patience)
        complaint = digest.complaint(files.target)
        if complaint is None:
            files.note.unlink(missing_ok=True)
            return files.target
        files.remove()
        if last or not in_pieces:
            break
        logger.warning("%s: %s; it came in pieces: fetching it once more", shown(url), complaint)
    raise FetchError(f"{shown(url)}: {complaint}: the file was removed: check the address and the checksum")


def _fetch(url: str, files: DownloadFiles, digest: Digest, patience: Patience) -> bool:
    """Bring files.target there, whatever attempts that takes. Returns whether it arrived in pieces."""
    in_pieces = False
    failures, furthest = 0, files.size()
    while True:
        try:
            with _full_disk(url, files):
                in_pieces |= _attempt(url, files, digest, patience)
                if files.complete():
                    digest.restart()
            return in_pieces
        except TemporaryError as trouble:
            arrived = files.size()
            failures = 1 if arrived > furthest and not isinstance(trouble, _TooSlow) else failures + 1
            furthest = max(furthest, arrived)
            if failures >= patience.attempts:
                kept = files.keep()
                raise FetchError(f"{shown(url)}: {trouble} ({failures} attempts): {trouble.advice}{kept}") from trouble
            wait_s = max(patience.first_wait_s * 2 ** (failures - 1), trouble.retry_after_s)
            wait_s = min(wait_s, patience.longest_wait_s)
            logger.warning("%s: %s; trying again in %.0f s", shown(url), trouble, wait_s)
            time.sleep(wait_s)
        except FetchError:
            files.keep()
            raise


class _TooSlow(TemporaryError):
    """Bytes arrive, but hardly; that some did is no reason to hope."""


def _attempt(url: str, files: DownloadFiles, digest: Digest, patience: Patience) -> bool:
    """One transfer into files.part. Returns whether it went on from an earlier one."""
    files.part.parent.mkdir(parents=True, exist_ok=True)
    note = files.read_note()
    have = files.size() if note["version"] else 0
    if have:
        logger.info("Going on with %s after %s bytes", shown(url), f"{have:,}")
        digest.catch_up(files.part, have)  # before the server waits for us
        if have == note["total"]:
            return True
    transfer = open_transfer(url, have, note["version"], patience.timeout_s)
    try:
        _check_size(url, files, transfer, digest.expected)
        if transfer.start == 0:
            digest.restart()
            files.begin(transfer)
        _copy(url, transfer, files, digest, patience)
    finally:
        transfer.close()
    return transfer.start > 0


def _copy(url: str, transfer: Transfer, files: DownloadFiles, digest: Digest, patience: Patience) -> None:
    position, total = transfer.start, transfer.total
    if total is None and not transfer.gzipped_in_transit:
        total = digest.expected.size
    window_s = window_bytes = 0
    bar = tqdm(
        total=total, initial=position, desc=shown(url), unit="B", unit_scale=True,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,
    )  # fmt: skip
    with bar, open(files.part, "r+b" if position else "wb") as file:
        file.seek(position)
        file.truncate()
        while True:
            began = time.monotonic()
            chunk = transfer.read(CHUNK_BYTES)
            if not chunk:
                break
            window_s += time.monotonic() - began  # waiting for the network, not for the disk
            window_bytes += len(chunk)
            file.write(chunk)
            digest.update(chunk)
            position += len(chunk)
            bar.update(len(chunk))
            if window_s >= patience.timeout_s:
                if window_bytes < patience.min_bytes_per_s * window_s:
                    raise _TooSlow(f"{window_bytes:,} bytes arrived in {window_s:.0f} s")
                window_s = window_bytes = 0
    if total is not None and position != total:
        if position > total:
            files.part.unlink()  # no prefix of the right file either
        raise TemporaryError(f"{position:,} of {total:,} bytes arrived")


def _check_size(url: str, files: DownloadFiles, transfer: Transfer, expected: Expected) -> None:
    """Before the bytes come: are they those of the file that is expected, and is there room for them?"""
    if transfer.total is None:
        return
    if expected.size not in (None, transfer.total) and not transfer.gzipped_in_transit:
        files.remove()
        raise FetchError(
            f"{shown(url)}: the server has {transfer.total:,} bytes, {expected.authority} says {expected.size:,}: a "
            "release may be under way there: start again later"
        )
    missing = transfer.total - transfer.start
    free = shutil.disk_usage(files.part.parent).free + (files.size() if transfer.start == 0 else 0)  # makes way
    if missing > free:
        raise FetchError(
            f"{files.part.parent}: no room for {shown(url)}: {missing:,} bytes to come, {free:,} free: {MAKE_ROOM}"
        )


@contextmanager
def _full_disk(url: str, files: DownloadFiles) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = files.part.parent
        raise FetchError(f"{where}: no space left for {shown(url)}: {MAKE_ROOM}{files.keep()}") from error
