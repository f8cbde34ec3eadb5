"""Download a URL into a directory, through broken connections, restarts, busy servers and full disks; verified.

`transfers` opens a download, `download_files` says whether what has arrived is what should have.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.cli import MAKE_ROOM, NO_ROOM, UserError
from common.prepare.addresses import shown
from common.prepare.download_files import ANYTHING, Digest, DownloadFiles, Expected
from common.prepare.transfers import FetchError, TemporaryError, Transfer, open_transfer

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
