"""Open a download: http, https, ftp and s3 behind one `read`; tells troubles that pass from those that do not."""

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
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from common.cli import UserError

# What of a URL may be seen, and what tells it from others: where something lies, never the key to it.
#
# A presigned URL opens what it names to everyone who reads it, and is another one each time it is signed.

# Parameters that grant access: signatures of S3, CloudFront and Google, and what others call theirs.
KEYS = re.compile(
    r"x-(amz|goog)-.*|awsaccesskeyid|googleaccessid|signature|sig|expires|key-pair-id|policy"
    r"|.*(token|password|passwd|secret|credential|auth|api_?key).*|key",
    re.IGNORECASE,
)
# Azure's other ones; where nothing is signed they may mean anything.
SIGNED = {"sv", "sr", "se", "st", "sp", "si", "sip", "spr", "ss", "srt", "skoid", "sktid", "skt", "ske", "sks", "skv"}


def shown(url: str) -> str:
    """A URL for log lines, progress bars and errors: `https://host/path?...`."""
    parts = _split(url)
    return _without_user(parts)._replace(query="...", fragment="").geturl() if parts.query else _place(parts)


def identity(url: str) -> str:
    """What tells its content from that of other URLs: without user and what grants access, other parameters hashed."""
    parts = _split(url)
    asked = parse_qsl(parts.query, True)
    keys = SIGNED if "sig" in dict(asked) else ()
    asked = [(name, value) for name, value in asked if not KEYS.fullmatch(name) and name not in keys]
    mark = f"?{hashlib.sha256(urlencode(asked).encode()).hexdigest()[:16]}" if asked else ""
    return _place(parts) + mark


def _split(url: str) -> SplitResult:
    """Of what is no URL nothing but its scheme: it is refused, and may hold a key all the same."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit(f"{url.partition('://')[0]}://...")


def _place(parts: SplitResult) -> str:
    return _without_user(parts)._replace(query="", fragment="").geturl()


def _without_user(parts: SplitResult) -> SplitResult:
    return parts._replace(netloc=parts.netloc.rpartition("@")[2])


SCHEMES = ("http", "https", "ftp", "s3")
# Everything the network can do to us, as the standard library says it.
NETWORK_ERRORS = (OSError, EOFError, http.client.HTTPException, ftplib.Error)
BUSY = (408, 425, 429)  # besides 5xx: statuses that another attempt may cure
CONFIGURE = "run `aws configure`, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
CERTIFICATES = "check the address; where a network has certificates of its own, set {} to their file"


class FetchError(UserError):
    """A source cannot be had, or is not what it should be."""


class TemporaryError(Exception):
    """What another attempt may cure. `retry_after_s`: the wait the server asks for, 0 where it does not."""

    def __init__(self, reason: str, retry_after_s: float = 0.0, advice: str = "check the network and start again"):
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.advice = advice


@dataclass
class Transfer:
    """An open download. `read(n)` gives what has arrived, up to n bytes, b"" at the end, or raises TemporaryError."""

    read: Callable[[int], bytes]
    close: Callable[[], None]
    start: int  # position of the first byte that `read` gives: 0 if the server would not resume
    total: int | None  # bytes of the whole file
    version: str  # identifies the remote file's content; "" where the server doesn't say
    gzipped_in_transit: bool = False  # the server has compressed what it sends; all positions are of that


def open_transfer(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    """Ask for `url` from byte `start` on if it still is that `version`, for all of it otherwise.

    timeout_s: of the connection, and of every silence after it. Raises FetchError or TemporaryError.
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
    """Turn the network's errors into FetchError, where trying again is no use, or TemporaryError."""
    try:
        yield
    except NETWORK_ERRORS as error:
        reason = getattr(error, "reason", None)
        cause = reason if isinstance(error, urllib.error.URLError) and isinstance(reason, Exception) else error
        said = " ".join(str(reason or error).split()) or type(error).__name__
        if isinstance(cause, ssl.SSLCertVerificationError):
            advice = CERTIFICATES.format("SSL_CERT_FILE")
            raise FetchError(f"{shown(url)}: bad TLS certificate: {cause.verify_message}: {advice}") from error
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            raise FetchError(f"{shown(url)}: the server does not speak TLS there: check the address") from error
        if isinstance(error, http.client.InvalidURL):
            raise FetchError(
                f"{shown(url)}: no valid address: there is a blank or a control character in it"
            ) from error
        raise TemporaryError(said) from error


# --- http and https


def _open_http(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    headers = {"User-Agent": "esm2-pretraining-data", "Accept-Encoding": "identity"}
    if start:  # If-Range: the rest of that same version, or all of a newer one
        headers |= {"Range": f"bytes={start}-", "If-Range": version}
    request = urllib.request.Request(quote(url, safe="%/:=&?~#+!$,;'@()*[]"), headers=headers)
    try:
        # An opener of its own: the one behind urlopen keeps certificates and proxies for the life of the process.
        response = urllib.request.build_opener(_NoDowngrade()).open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # what we have is longer than the file
            return _open_http(url, 0, "", timeout_s)
        _raise_for_status(url, error.code, error.reason, error.headers.get("Retry-After"))
    if urlsplit(response.url).scheme not in ("http", "https"):
        response.close()
        raise FetchError(f"{shown(url)}: redirects to {shown(response.url)}: give that address")
    encoding = response.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        response.close()
        raise FetchError(
            f"{shown(url)}: the server sends Content-Encoding {encoding}, unasked: download it by other means"
        )
    length = response.headers.get("Content-Length")
    total = int(length) if length else None
    first = 0
    if response.status == 206:
        sent = re.match(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        first = int(sent[1]) if sent else None
        if first != start:
            response.close()
            raise http.client.HTTPException(f"asked for bytes from {start}, was sent those from {first}")
        total = int(sent[2]) if sent[2] != "*" else first + total if total is not None else None
    etag = response.headers.get("ETag", "")
    now = response.headers.get("Last-Modified", "") if etag.startswith("W/") or not etag else etag
    if first and now and now != version:  # a server that does not know If-Range sends the rest of another file
        response.close()
        return _open_http(url, 0, "", timeout_s)
    return Transfer(response.read1, response.close, first, total, now, "gzip" in encoding)


class _NoDowngrade(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but none from https to http: what was to come from a known server would come from anybody."""

    def redirect_request(self, request, file, code, message, headers, url):
        if urlsplit(request.full_url).scheme == "https" and urlsplit(url).scheme == "http":
            file.close()
            raise FetchError(
                f"{shown(request.full_url)}: redirects to {shown(url)}, which is not encrypted: give that address, "
                "with a --sha256, if you trust it"
            )
        return super().redirect_request(request, file, code, message, headers, url)


def _raise_for_status(url: str, status: int, said: str, retry_after: str | None) -> None:
    """TemporaryError for what passes, FetchError for the rest."""
    said = f"HTTP {status} {said}"
    if status in BUSY or status >= 500:
        raise TemporaryError(said, _seconds(retry_after), "the server is busy or down: start again later")
    if status in (401, 403):
        raise FetchError(f"{shown(url)}: {said}: access is denied: check the address, and whether it needs a login")
    raise FetchError(f"{shown(url)}: {said}: check the address")


def _seconds(retry_after: str | None) -> float:
    """Retry-After, which is a number of seconds or a date."""
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
            now = f"{total} {ftp.sendcmd(f'MDTM {path}')}"
        except ftplib.error_perm:  # an old server: without a date there is no telling whether the file has changed
            now = ""
        start = start if now and now == version else 0
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

    return Transfer(connection.recv, close, start, total, now)


# --- s3


def _open_s3(url: str, start: int, version: str, timeout_s: float) -> Transfer:
    import boto3
    from botocore import exceptions as aws
    from botocore.config import Config
    from urllib3.exceptions import HTTPError as StreamError

    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket or not key:
        raise FetchError(f"{shown(url)}: expected s3://BUCKET/KEY")
    asked = {"Bucket": bucket, "Key": key}
    if start:
        asked |= {"Range": f"bytes={start}-", "IfMatch": version}
    config = Config(
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        retries={"total_max_attempts": 1},  # the caller's business
        response_checksum_validation="when_required",  # reading below botocore, we check sizes and sums ourselves
    )
    try:
        answer = boto3.client("s3", config=config).get_object(**asked)
    except aws.ClientError as error:
        details = error.response.get("Error", {})
        metadata = error.response.get("ResponseMetadata", {})
        status, code = metadata.get("HTTPStatusCode", 500), details.get("Code", "")
        if start and status in (412, 416):  # another version now, or a shorter one
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
    except aws.BotoCoreError as error:  # no credentials, half of them, a profile that isn't there, a login expired
        raise FetchError(f"{shown(url)}: {error}: {CONFIGURE}") from None
    sent = re.match(r"bytes (\d+)-\d+/(\d+)", answer.get("ContentRange", ""))
    first, total = (int(sent[1]), int(sent[2])) if sent else (0, answer["ContentLength"])
    stream = answer["Body"].__enter__()  # urllib3's: botocore's own read waits until all it was asked for is there

    def read(count: int) -> bytes:
        try:
            return stream.read1(count)
        except StreamError as error:
            raise TemporaryError(str(error)) from error

    return Transfer(read, stream.close, first, total, answer["ETag"])
