"""What of a URL may be seen, and what tells it from others: where something lies, never the key to it.

A presigned URL opens what it names to everyone who reads it, and is another one each time it is signed.
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

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
