"""Turn a source (file, http, https, ftp or s3 URL) into a local file; downloads resume, retry and are size-checked."""

from __future__ import annotations

import ftplib
import hashlib
import http.client
import json
import logging
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from common.cli import UserError

logger = logging.getLogger(__name__)
SCHEMES = ("http", "https", "ftp", "s3")
CHUNK_BYTES = 1 << 20
# Everything the network can do to us; errors of the disk are raised outside the `try` that catches these.
NETWORK_ERRORS = (OSError, EOFError, http.client.HTTPException, ftplib.Error)


class TransferError(UserError):
    """The source could not be fetched, for now; what has arrived is kept, to go on from."""


@dataclass
class Transfer:
    """An open download. `version` identifies the remote file's content ('' where the server doesn't say)."""

    read: Callable[[int], bytes]
    close: Callable[[], None]
    start: int  # position of the first byte that `read` gives: 0 if the server would not resume
    total: int | None  # bytes of the whole file
    version: str


def is_url(source: str) -> bool:
    """True for a source that has to be downloaded."""
    return "://" in source


def local_file(source: str) -> Path:
    """The path of a local source. UserError where it is no readable file."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"{source}: no such file: --source takes a FASTA file (plain or .gz) or a URL")
    if not path.is_file():
        raise UserError(f"{source}: not a file: --source takes one FASTA file (plain or .gz) or a URL")
    return path


@contextmanager
def download_directory(path: Path) -> Iterator[Path]:
    """A directory for downloads that is removed once they are used up, or turned out to be unusable.

    It stays when a transfer fails or the process is stopped, so that the next run goes on where this one ended.
    """
    try:
        yield path
    except UserError as error:
        if not isinstance(error, TransferError):
            shutil.rmtree(path, ignore_errors=True)
        raise
    shutil.rmtree(path, ignore_errors=True)


def download(url: str, directory: Path, timeout_s: float = 60.0, attempts: int = 6, first_wait_s: float = 1.0) -> Path:
    """Fetch `url` into `directory` and return the file's path; a complete file that is already there is returned.

    A broken transfer goes on where it ended (Range, FTP REST) if the remote file is still the same one (ETag,
    Last-Modified, MDTM); otherwise it starts over. `attempts` failures in a row without a byte in between, with
    waits of first_wait_s, twice that, four times that ..., end in a TransferError. The size is checked.
    """
    scheme = urlsplit(url).scheme.lower()
    if scheme not in SCHEMES:
        raise UserError(f"{url}: cannot fetch {scheme}:// (only {', '.join(SCHEMES)}, or a local file)")
    directory.mkdir(parents=True, exist_ok=True)
    name = Path(unquote(urlsplit(url).path)).name or "source"
    target = directory / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}"
    part, note = target.with_name(target.name + ".part"), target.with_name(target.name + ".json")
    failures = 0
    while not target.exists():
        known = _read_note(note)
        have = part.stat().st_size if part.exists() and known["version"] else 0
        if have == 0 or have != known["total"]:
            problem, arrived = _transfer(url, scheme, part, note, have, known["version"], timeout_s)
            if problem is not None:
                failures = 1 if arrived else failures + 1
                if failures >= attempts:
                    _remove_if_nothing_arrived(part, note, directory)
                    raise TransferError(f"{url}: {problem} ({failures} attempts): check the network and start again")
                wait_s = first_wait_s * 2 ** (failures - 1)
                logger.warning("%s: %s; trying again in %.0f s", url, problem, wait_s)
                time.sleep(wait_s)
                continue
        part.rename(target)
    note.unlink(missing_ok=True)
    return target


def _transfer(
    url: str, scheme: str, part: Path, note: Path, have: int, version: str, timeout_s: float
) -> tuple[str | None, bool]:
    """One attempt. Returns (what went wrong, or None; whether bytes arrived)."""
    start_transfer = {"ftp": _open_ftp, "s3": _open_s3}.get(scheme, _open_http)
    try:
        transfer = start_transfer(url, have, version, timeout_s)
    except UserError:
        _remove_if_nothing_arrived(part, note, part.parent)
        raise
    except NETWORK_ERRORS as error:
        return _describe(error), False
    position = transfer.start
    if position == 0:  # (re)started: note what the bytes belong to before the first one is written
        part.unlink(missing_ok=True)
        note.write_text(json.dumps({"version": transfer.version, "total": transfer.total}))
    bar = tqdm(
        total=transfer.total, initial=position, desc=url, unit="B", unit_scale=True,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,
    )  # fmt: skip
    with bar, open(part, "r+b" if position else "wb") as file:
        file.seek(position)
        file.truncate()
        try:
            while True:
                try:
                    chunk = transfer.read(CHUNK_BYTES)
                except NETWORK_ERRORS as error:
                    return _describe(error), position > transfer.start
                if not chunk:
                    break
                file.write(chunk)
                position += len(chunk)
                bar.update(len(chunk))
        finally:
            transfer.close()
    if transfer.total is not None and position != transfer.total:
        if position > transfer.total:
            part.unlink()  # no prefix of the right file either
        return f"{position:,} of {transfer.total:,} bytes arrived", position > transfer.start
    return None, True


def _open_http(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    headers = {"User-Agent": "esm2-pretraining-data", "Accept-Encoding": "identity"}
    if start:  # If-Range: the rest of that same version, or all of a newer one
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # our part is longer than the file
            return _open_http(url, 0, "", timeout_s)
        if 400 <= error.code < 500 and error.code not in (408, 429):
            raise UserError(f"{url}: HTTP {error.code} {error.reason}: check the address") from None
        raise
    length = response.headers.get("Content-Length")
    first = 0
    if response.status == 206:
        first = int(re.match(r"bytes (\d+)-", response.headers.get("Content-Range", "bytes 0-"))[1])
        if first != start:
            raise http.client.HTTPException(f"asked for bytes from {start}, was sent those from {first}")
    etag = response.headers.get("ETag", "")
    version = response.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
    return Transfer(response.read1, response.close, first, first + int(length) if length else None, version)


def _open_ftp(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    parts = urlsplit(url)
    path = unquote(parts.path)
    ftp = ftplib.FTP(timeout=timeout_s)
    ftp.connect(parts.hostname, parts.port or ftplib.FTP_PORT)
    try:
        ftp.login(unquote(parts.username or "anonymous"), unquote(parts.password or "anonymous@"))
        ftp.voidcmd("TYPE I")
        total = ftp.size(path)
        now = f"{total} {ftp.sendcmd(f'MDTM {path}')}"
        start = start if now == version else 0
        connection = ftp.transfercmd(f"RETR {path}", rest=start or None)
    except ftplib.error_perm as error:
        ftp.close()
        raise UserError(f"{url}: FTP {error}: check the address") from None
    except BaseException:
        ftp.close()
        raise

    def close() -> None:
        connection.close()
        ftp.close()

    return Transfer(connection.recv, close, start, total, now)


def _open_s3(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise UserError(f"{url}: reading from S3 needs boto3: pip install boto3") from None
    parts = urlsplit(url)
    where = {"Bucket": parts.netloc, "Key": unquote(parts.path).lstrip("/")}
    try:
        client = boto3.client("s3", config=Config(connect_timeout=timeout_s, read_timeout=timeout_s))
        head = client.head_object(**where)
        start = start if head["ETag"] == version else 0
        body = (
            client.get_object(**where, Range=f"bytes={start}-")["Body"]
            if start
            else client.get_object(**where)["Body"]
        )
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if 400 <= status < 500 and status != 429:
            raise UserError(f"{url}: {error}: check the address and your AWS credentials") from None
        raise ConnectionError(str(error)) from error
    except BotoCoreError as error:
        if "credentials" in str(error).lower():
            raise UserError(f"{url}: {error}: set up AWS credentials (aws configure)") from None
        raise ConnectionError(str(error)) from error

    def read(count: int) -> bytes:
        try:
            return body.read(count)
        except (BotoCoreError, ClientError) as error:
            raise ConnectionError(str(error)) from error

    return Transfer(read, body.close, start, head["ContentLength"], head["ETag"])


def _read_note(note: Path) -> dict:
    """Which remote file the bytes that have arrived belong to; unknown after a kill in mid-write."""
    try:
        return json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return {"version": "", "total": None}


def _describe(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return " ".join(str(reason).split()) or type(error).__name__


def _remove_if_nothing_arrived(part: Path, note: Path, directory: Path) -> None:
    if not part.exists() or part.stat().st_size == 0:
        part.unlink(missing_ok=True)
        note.unlink(missing_ok=True)
        if not any(directory.iterdir()):
            directory.rmdir()
