"""Checksums of files as they arrive, against those given (--md5, --sha256) or published (RELEASE.metalink)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit
from xml.etree import ElementTree

from common.cli import UserError

HEX_DIGITS = {"md5": 32, "sha256": 64}
BLOCK_BYTES = 4 << 20
# UniProt's server and its two official mirrors; every directory with data has a RELEASE.metalink.
UNIPROT_HOSTS = ("ftp.uniprot.org", "ftp.ebi.ac.uk", "ftp.expasy.org")
METALINK = "RELEASE.metalink"


@dataclass(frozen=True)
class Expected:
    """What a file should be: `sums` by algorithm (hex, lower case), `size` in bytes or None, and who says so."""

    sums: dict[str, str] = field(default_factory=dict)
    size: int | None = None
    authority: str = ""


def parse_sum(algorithm: str, text: str) -> str:
    """The checksum in lower case. UserError where it cannot be one."""
    if not re.fullmatch(rf"[0-9a-fA-F]{{{HEX_DIGITS[algorithm]}}}", text):
        raise UserError(f"--{algorithm} {text}: expected {HEX_DIGITS[algorithm]} hexadecimal digits")
    return text.lower()


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
            while data := file.read(min(BLOCK_BYTES, end - self.position)):
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


def metalink_beside(url: str) -> str | None:
    """The address of the metalink that lists a file of UniProt's; None for files of others."""
    parts = urlsplit(url)
    if parts.hostname not in UNIPROT_HOSTS or "/uniprot/" not in parts.path:
        return None
    return parts._replace(path=str(PurePosixPath(parts.path).parent / METALINK), query="", fragment="").geturl()


def read_metalink(text: bytes, name: str) -> Expected | None:
    """What a metalink (version 3.0, http://www.metalinker.org) says of the file `name`; None if that is nothing.

    <metalink><files><file name="..."><size>...</size><verification><hash type="md5">...
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    for file in root.iterfind(".//{*}file"):
        if PurePosixPath(file.get("name", "")).name != name:
            continue
        sums = {
            kind: (each.text or "").strip().lower()
            for each in file.iterfind(".//{*}verification/{*}hash")
            if (kind := each.get("type", "").lower().replace("-", "")) in HEX_DIGITS
        }
        size = file.findtext("{*}size", "").strip()
        if sums or size.isdigit():
            return Expected(sums, int(size) if size.isdigit() else None, METALINK)
    return None
