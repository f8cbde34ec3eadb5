"""Open a download over http, https, ftp or s3 behind one `read`, and tell temporary errors from final ones.

On urllib, ftplib and boto3, because no library resumes safely (tests/extras/prepare/local_servers.py breaks off after
300,000 of 1,000,000 bytes). `curl -C -` (7.88) joins the head of an old file to the tail of a newer one, or with
If-Range ends in error 33; its --retry starts over; it outlives a killed parent and is not in the images. http_get of
huggingface_hub 1.33 starts over and waits at 1,000 bytes/s without end; fsspec needs aiohttp. All take the same time
for 600 MB.
"""

from __future__ import annotations

import ftplib
import hashlib
import http.client
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import urllib3

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
NETWORK_ERRORS = (OSError, EOFError, http.client.HTTPException, ftplib.Error, urllib3.exceptions.HTTPError)
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
    """An open download."""

    url: str
    stream: Any  # of the library
    start: int  # position of the first byte that `read` returns: 0 if the server does not resume
    total: int | None  # bytes of the whole file
    version: str  # ETag or date of the remote file; "" where the server sends none

    def read(self, count: int) -> bytes:
        """Up to `count` bytes as soon as there are any, b"" at the end. Raises TemporaryError."""
        with _network_errors(self.url):
            return self.stream.read1(count)

    def close(self) -> None:
        self.stream.close()


def open_transfer(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    """Request `url` from byte `start` on if it is still that `version`, else from its beginning.

    timeout_s: to connect, and for each read. Raises FetchError or TemporaryError.
    """
    opener = {"http": _open_http, "https": _open_http, "ftp": _open_ftp, "s3": _open_s3}[urlsplit(url).scheme.lower()]
    with _network_errors(url):
        transfer = opener(url, start, version, timeout_s)
        if transfer and (not transfer.start or transfer.version in (version, "")):
            return transfer
        if transfer:
            transfer.close()
        return opener(url, 0, "", timeout_s)  # the remote file is another one, or shorter than the partial file


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


def _open_http(url: str, start: int, version: str, timeout_s: float) -> Transfer | None:
    headers = {"User-Agent": "esm2-pretraining-data", "Accept-Encoding": "identity"}
    if start:  # If-Range: the rest of that version, or all of a newer one
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    request = urllib.request.Request(quote(url, safe="%/:=&?~#+!$,;'@()*[]"), headers=headers)
    try:
        # A new opener: urlopen's caches certificates and proxies for the life of the process.
        response = urllib.request.build_opener(_SafeRedirects()).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:
            return None
        _raise_for_status(url, error.code, error.reason, error.headers.get("Retry-After"))
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "x-gzip"):  # gzip stays, as in s3: readers detect it
        response.close()
        raise FetchError(
            f"{shown(url)}: the server sends Content-Encoding {encoding} unrequested: download it by other means"
        )
    length = response.headers.get("Content-Length")
    first, total = 0, int(length) if length else None
    if response.status == 206:
        first, total = _content_range(response.headers.get("Content-Range"))
        if first != start:
            response.close()
            raise http.client.HTTPException(f"requested bytes from {start}, received bytes from {first}")
    etag = response.headers.get("ETag", "")
    version_now = response.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
    return Transfer(url, response, first, total, version_now)


def _content_range(header: str | None) -> tuple[int | None, int | None]:
    """The first byte and the size of the whole file, each None where the header does not say."""
    match = re.match(r"bytes (\d+)-(\d+)/(\d+|\*)", header or "")
    if match is None:
        return None, None
    return int(match[1]), int(match[2]) + 1 if match[3] == "*" else int(match[3])


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirect from https to http, where anyone on the network could replace the content, nor to ftp."""

    def redirect_request(self, request, file, code, message, headers, url):
        scheme = urlsplit(url).scheme
        if scheme != "https" and (scheme != "http" or urlsplit(request.full_url).scheme == "https"):
            file.close()
            unsafe = ", which is not encrypted" if scheme == "http" else ""
            raise FetchError(
                f"{shown(request.full_url)}: redirects to {shown(url)}{unsafe}: give that address, with a --sha256, "
                "if you trust it"
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


class _FtpData:
    """The data connection of a transfer; closes the control connection, too."""

    def __init__(self, data: socket.socket, control: ftplib.FTP):
        self.read1, self.data, self.control = data.recv, data, control

    def close(self) -> None:
        self.data.close()
        self.control.close()


def _open_ftp(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    parts = urlsplit(url)
    path = unquote(parts.path)
    ftp = ftplib.FTP(timeout=timeout_s)
    try:
        ftp.connect(parts.hostname or "", parts.port or ftplib.FTP_PORT)
        ftp.login(unquote(parts.username or "anonymous"), unquote(parts.password or "anonymous@"))
        ftp.voidcmd("TYPE I")
        total = ftp.size(path)
        try:
            version_now = f"{total} {ftp.sendcmd(f'MDTM {path}')}"
        except ftplib.error_perm:  # an old server: without a date, a changed file cannot be detected
            version_now = ""
        start = start if version_now and version_now == version else 0
        data = ftp.transfercmd(f"RETR {path}", rest=start or None)
    except ftplib.error_perm as error:
        ftp.close()
        raise FetchError(f"{shown(url)}: FTP {error}: check the address") from None
    except BaseException:
        ftp.close()
        raise
    return Transfer(url, _FtpData(data, ftp), start, total, version_now)


# --- s3


def _open_s3(url: str, start: int, version: str, timeout_s: float) -> Transfer | None:
    import boto3
    from botocore import exceptions as aws
    from botocore.config import Config

    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise FetchError(f"{shown(url)}: expected s3://BUCKET/KEY")
    request = {"Bucket": bucket, "Key": key} | ({"Range": f"bytes={start}-"} if start else {})
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
        if start and status == 416:
            return None
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
    first, total = _content_range(response["ContentRange"]) if start else (0, response["ContentLength"])
    stream = response["Body"].__enter__()  # of urllib3: botocore's read blocks until all bytes came
    return Transfer(url, stream, first, total, response["ETag"])
