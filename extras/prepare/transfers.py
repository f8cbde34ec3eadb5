"""Open a download over http, https, ftp or s3 behind one `read`, and tell temporary errors from final ones.

Own code on urllib, ftplib and boto3: curl is not in the images, and resumes neither s3 nor with a check of the file's
version; fsspec neither resumes a file nor detects a stall.
"""

from __future__ import annotations

import ftplib
import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from common.cli import UserError

# Query parameters that grant access: signatures of S3, CloudFront and Google, and common names of tokens and keys. A
# presigned URL gives access to every reader, and changes with each signature: neither shown nor compared.
KEYS = re.compile(
    r"x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|signature|sig|expires|key-pair-id|policy"
    r"|.*(token|password|passwd|secret|credential|auth|api_?key).*|key",
    re.IGNORECASE,
)
# Azure's parameters, only in a URL with a signature: elsewhere these names may mean anything.
SIGNED = {"sv", "sr", "se", "st", "sp", "si", "sip", "spr", "ss", "srt", "skoid", "sktid", "skt", "ske", "sks", "skv"}


def shown(url: str) -> str:
    """A URL for log lines, progress bars and errors, without user and query: `https://host/path?...`."""
    location, query = _split(url)
    return f"{location}?..." if query else location


def identity(url: str) -> str:
    """A URL without user and access keys, other parameters hashed: equal for URLs of the same content."""
    location, query = _split(url)
    parameters = parse_qsl(query, True)
    azure = SIGNED if "sig" in dict(parameters) else ()
    parameters = [(name, value) for name, value in parameters if not KEYS.fullmatch(name) and name not in azure]
    if not parameters:
        return location
    return f"{location}?{hashlib.sha256(urlencode(parameters).encode()).hexdigest()[:16]}"


def _split(url: str) -> tuple[str, str]:
    """The URL without user, query and fragment, and its query. Of an invalid URL, which may hold a key, the scheme."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://...", ""
    netloc = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=netloc, query="", fragment="").geturl(), parts.query


SCHEMES = ("http", "https", "ftp", "s3")
NETWORK_ERRORS = (OSError, EOFError, http.client.HTTPException, ftplib.Error)
RETRIED = (408, 425, 429)  # and 5xx
CONFIGURE = "run `aws configure`, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
CERTIFICATES = "check the address; where a network has its own certificates, set {} to their file"


class FetchError(UserError):
    """A source cannot be fetched, or has the wrong content."""


class TemporaryError(Exception):
    """An error that another attempt may cure. retry_after_s: the wait that the server asks for, or 0."""

    def __init__(self, reason: str, retry_after_s: float = 0.0, advice: str = "check the network and start again"):
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.advice = advice


@dataclass
class Transfer:
    """An open download. `read(n)` returns up to n bytes, b"" at the end, or raises TemporaryError."""

    read: Callable[[int], bytes]
    close: Callable[[], None]
    start: int  # position of the first byte that `read` returns: 0 if the server does not resume
    total: int | None  # bytes of the whole file
    version: str  # ETag or date of the remote file; "" where the server sends none
    gzipped_in_transit: bool = False  # Content-Encoding: gzip; positions count compressed bytes


def open_transfer(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    """Request `url` from byte `start` on if it is still that `version`, else from its beginning.

    timeout_s: to connect, and for each read. Raises FetchError or TemporaryError.
    """
    opener = {"http": _open_http, "https": _open_http, "ftp": _open_ftp, "s3": _open_s3}[urlsplit(url).scheme.lower()]
    with _network_errors(url):
        transfer = opener(url, start, version, timeout_s)
    read = transfer.read

    def guarded_read(count: int) -> bytes:
        with _network_errors(url):
            return read(count)

    transfer.read = guarded_read
    return transfer


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    """Turn network errors into FetchError (final) or TemporaryError."""
    try:
        yield
    except NETWORK_ERRORS as error:
        reason = getattr(error, "reason", None)
        cause = reason if isinstance(error, urllib.error.URLError) and isinstance(reason, Exception) else error
        message = " ".join(str(reason or error).split()) or type(error).__name__
        if isinstance(cause, ssl.SSLCertVerificationError):
            advice = CERTIFICATES.format("SSL_CERT_FILE")
            raise FetchError(f"{shown(url)}: bad TLS certificate: {cause.verify_message}: {advice}") from error
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            raise FetchError(f"{shown(url)}: the server does not speak TLS there: check the address") from error
        if isinstance(error, http.client.InvalidURL):
            raise FetchError(f"{shown(url)}: invalid address: it contains a blank or a control character") from error
        raise TemporaryError(message) from error


# --- http and https


def _open_http(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    headers = {"User-Agent": "esm2-pretraining-data", "Accept-Encoding": "identity"}
    if start:  # If-Range: the rest of that version, or all of a newer one
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    request = urllib.request.Request(quote(url, safe="%/:=&?~#+!$,;'@()*[]"), headers=headers)
    try:
        # A new opener: urlopen's caches certificates and proxies for the life of the process.
        response = urllib.request.build_opener(_NoDowngrade()).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # the partial file is longer than the remote one
            return _open_http(url, 0, "", timeout_s)
        _raise_for_status(url, error.code, error.reason, error.headers.get("Retry-After"))
    if urlsplit(response.url).scheme not in ("http", "https"):
        response.close()
        raise FetchError(f"{shown(url)}: redirects to {shown(response.url)}: give that address")
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        response.close()
        raise FetchError(
            f"{shown(url)}: the server sends Content-Encoding {encoding} unrequested: download it by other means"
        )
    length = response.headers.get("Content-Length")
    total = int(length) if length else None
    first = 0
    if response.status == 206:
        match = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        first = int(match[1]) if match else None
        if first != start:
            response.close()
            raise http.client.HTTPException(f"requested bytes from {start}, received bytes from {first}")
        total = int(match[2]) if match[2] != "*" else first + total if total is not None else None
    etag = response.headers.get("ETag", "")
    version_now = response.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
    if first and version_now and version_now != version:  # a server without If-Range sends the rest of a newer file
        response.close()
        return _open_http(url, 0, "", timeout_s)
    return Transfer(response.read1, response.close, first, total, version_now, "gzip" in encoding)


class _NoDowngrade(urllib.request.HTTPRedirectHandler):
    """Follow redirects, except from https to http: anyone on the network could replace the content."""

    def redirect_request(self, request, file, code, message, headers, url):
        if urlsplit(request.full_url).scheme == "https" and urlsplit(url).scheme == "http":
            file.close()
            raise FetchError(
                f"{shown(request.full_url)}: redirects to {shown(url)}, which is not encrypted: give that address, "
                "with a --sha256, if you trust it"
            )
        return super().redirect_request(request, file, code, message, headers, url)


def _raise_for_status(url: str, status: int, reason: str, retry_after: str | None) -> NoReturn:
    """TemporaryError for a busy or failing server, FetchError for any other status."""
    message = f"HTTP {status} {reason}"
    if status in RETRIED or status >= 500:
        raise TemporaryError(message, _seconds(retry_after), "the server is busy or down: start again later")
    if status in (401, 403):
        raise FetchError(f"{shown(url)}: {message}: access is denied: check the address, and whether it needs a login")
    raise FetchError(f"{shown(url)}: {message}: check the address")


def _seconds(retry_after: str | None) -> float:
    """Seconds of a Retry-After header: a number of seconds or a date."""
    try:
        if retry_after is None or retry_after.strip().isdigit():
            return float(retry_after or 0)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0


# --- ftp


def _open_ftp(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    parts = urlsplit(url)
    path = unquote(parts.path)
    ftp = ftplib.FTP(timeout=timeout_s)
    ftp.connect(parts.hostname, parts.port or ftplib.FTP_PORT)
    try:
        ftp.login(unquote(parts.username or "anonymous"), unquote(parts.password or "anonymous@"))
        ftp.voidcmd("TYPE I")
        total = ftp.size(path)
        try:
            version_now = f"{total} {ftp.sendcmd(f'MDTM {path}')}"
        except ftplib.error_perm:  # an old server: without a date, a changed file cannot be detected
            version_now = ""
        start = start if version_now and version_now == version else 0
        connection = ftp.transfercmd(f"RETR {path}", rest=start or None)
    except ftplib.error_perm as error:
        ftp.close()
        raise FetchError(f"{shown(url)}: FTP {error}: check the address") from None
    except BaseException:
        ftp.close()
        raise

    def close() -> None:
        connection.close()
        ftp.close()

    return Transfer(connection.recv, close, start, total, version_now)


# --- s3


def _open_s3(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    import boto3
    from botocore import exceptions as aws
    from botocore.config import Config
    from urllib3.exceptions import HTTPError as StreamError

    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise FetchError(f"{shown(url)}: expected s3://BUCKET/KEY")
    request = {"Bucket": bucket, "Key": key}
    if start:
        request |= {"Range": f"bytes={start}-", "IfMatch": version}
    config = Config(
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        retries={"total_max_attempts": 1},  # the caller retries
        response_checksum_validation="when_required",  # `read` bypasses botocore; the caller verifies sizes and sums
    )
    try:
        response = boto3.client("s3", config=config).get_object(**request)
    except aws.ClientError as error:
        details = error.response.get("Error", {})
        metadata = error.response.get("ResponseMetadata", {})
        status, code = metadata.get("HTTPStatusCode", 500), details.get("Code", "")
        if start and status in (412, 416):  # a newer version, or a shorter file
            return _open_s3(url, 0, "", timeout_s)
        if code in ("NoSuchKey", "NoSuchBucket"):
            raise FetchError(f"{shown(url)}: {code}: {details.get('Message', '')} Check the address.") from None
        if status in (400, 401, 403):
            raise FetchError(
                f"{shown(url)}: {error}: check the address and your AWS credentials ({CONFIGURE})"
            ) from None
        _raise_for_status(url, status, code, metadata.get("HTTPHeaders", {}).get("retry-after"))
    except aws.SSLError as error:
        raise FetchError(
            f"{shown(url)}: bad TLS certificate: {error}: {CERTIFICATES.format('AWS_CA_BUNDLE')}"
        ) from None
    except (aws.ConnectionError, aws.HTTPClientError) as error:
        raise TemporaryError(str(error)) from error
    except aws.ParamValidationError as error:
        raise FetchError(f"{shown(url)}: {' '.join(str(error).split())}: check the address") from None
    except aws.BotoCoreError as error:  # missing or partial credentials, unknown profile, expired login
        raise FetchError(f"{shown(url)}: {error}: {CONFIGURE}") from None
    match = re.match(r"bytes (\d+)-\d+/(\d+)", response.get("ContentRange", ""))
    first, total = (int(match[1]), int(match[2])) if match else (0, response["ContentLength"])
    stream = response["Body"].__enter__()  # of urllib3: botocore's read blocks until all bytes came

    def read(count: int) -> bytes:
        try:
            return stream.read1(count)
        except StreamError as error:
            raise TemporaryError(str(error)) from error

    return Transfer(read, stream.close, first, total, response["ETag"])
