"""Files that a user names: only regular ones are opened, and packed ones are unpacked, whatever their names say.

gzip, bzip2, xz and zstd are told by their first bytes. What is no text is called by its name.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from isal import igzip, isal_zlib

from common.cli import UserError, one_line
from common.data import LONGEST_PROTEIN as LONGEST_PROTEIN
from common.data import check_record_length as check_record_length
from extras.sources.records import characters

# How long a record may be: what bounds the memory that a reader takes, whatever a compressed file unpacks to.

LONGEST_DOCUMENT = 16 << 20  # bytes of a document: five times War and Peace
HELP = "longest record of the input, in bytes; memory grows with it"
STRADDLING = "straddling object"  # pyarrow's CSV and JSON readers about a row that is longer than a block


def too_long(where: str, longest: int) -> UserError:
    """The error for a record or line of more than `longest` bytes. where: file and line or record."""
    return UserError(
        f"{where}: longer than {longest:,} bytes: remove the record, or raise --max_record_length if it is meant to be"
    )


def first_too_long(text: pa.Array, longest: int) -> int | None:
    """The first text (string or binary) of more bytes, counted from 0, if one is."""
    lengths = np.diff(characters(text)[1])
    return int(np.argmax(lengths > longest)) if len(lengths) and lengths.max() > longest else None


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")  # of names; what is in the file decides
TO_A_FILE = "write what comes of it to a file, and give that"
LOOKED_AT = 512  # bytes, to tell what a file is
XZ_BYTES = 256 << 20  # to unpack a file of xz's; its level 9 takes 65 MiB
PACKED_BYTES = 1 << 16  # read at once of such a file
# What a reader of a packed file may raise.
TROUBLE = (EOFError, zlib.error, isal_zlib.error, igzip.BadGzipFile, lzma.LZMAError, OSError)
UTF_16 = "it is UTF-16: convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
OTHERS = {
    b"PK\x03\x04": "it is a zip archive: unpack it: unzip FILE",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"PAR1\x15": "it is a parquet file: give it a name that ends in .parquet",
}


def _unzstd(raw: BinaryIO, mode: str) -> BinaryIO:
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))


class _Unxz(io.RawIOBase):
    """As lzma.open, in bounded memory: a file itself says how much it takes to unpack it, which may be 4 GB."""

    def __init__(self, raw: BinaryIO):
        self.raw, self.packed, self.decoder = raw, b"", None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        data = b""
        while not data:
            if not self.packed and (self.decoder is None or self.decoder.needs_input):
                self.packed = self.raw.read(PACKED_BYTES)
                if not self.packed:
                    if self.decoder is not None:
                        raise EOFError("cut short")
                    return 0
            if self.decoder is None:
                self.packed = self.packed.lstrip(b"\0")  # between streams, of which a file may have several
                if not self.packed:
                    continue
                self.decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_BYTES)
            data, self.packed = self.decoder.decompress(self.packed, len(buffer)), b""
            if self.decoder.eof:
                self.decoder, self.packed = None, self.decoder.unused_data
        buffer[: len(data)] = data
        return len(data)


def _unxz(raw: BinaryIO, mode: str) -> BinaryIO:
    return io.BufferedReader(_Unxz(raw))


# What a packed file begins with; what it is packed by, and what reads it.
PACKED = {
    rb"\x1f\x8b": ("gzip", igzip.open),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": ("bzip2", bz2.open),
    rb"\xfd7zXZ\0": ("xz", _unxz),
    rb"\x28\xb5\x2f\xfd": ("zstd", _unzstd),
}


def check_file(path: Path, given: str) -> None:
    """UserError unless `path` leads to a regular file; nothing is opened, as a pipe's other end may never come.

    given: how the user named it, for the beginning of the line; `-` as its last word is standard input.
    """
    if given == "-" or given.endswith(" -"):
        raise UserError(f"{given}: standard input can be read once only, a stopped run could not go on: {TO_A_FILE}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{given}: {'a link to what is not there' if path.is_symlink() else 'no such file'}") from None
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise UserError(f"{given}: not a file but a directory")
    kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
    raise UserError(f"{given}: not a file but a {kind}, which can be read once only: {TO_A_FILE}")


@contextmanager
def open_unpacked(path: Path | str) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked: an object with read, readline and peek.

    UserError for what is no regular file, and while it is open for a packed file that is cut short or corrupt.
    """
    with open_both(path) as (_, file):
        yield file


@contextmanager
def open_both(path: Path | str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The same, and the file itself, whose position tells about how much of it was read."""
    check_file(Path(path), str(path))
    with open(path, "rb") as raw, unpacked_both(raw, str(path)) as both:
        yield both


@contextmanager
def unpacked_both(raw: BinaryIO, name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Both of an open file of that name."""
    with unpacked(raw) as file:
        try:
            yield raw, file
        except TROUBLE as error:
            if (what := damage(error)) is None:
                raise
            raise UserError(f"{name}: the compressed file {what}: fetch it again") from None


def unpacked(raw: BinaryIO) -> BinaryIO:
    """An open file itself, or what unpacks it; the file's own position tells how much of it was read."""
    start = raw.read(LOOKED_AT)
    raw.seek(0)
    found = _packing(start)
    return found[1](raw, "rb") if found else raw


def damage(error: BaseException) -> str | None:
    """What one of TROUBLE says of a packed file; None for trouble of the system's, or of a server that sends it."""
    if isinstance(error, OSError) and (error.errno is not None or hasattr(error, "response")):
        return None
    if isinstance(error, EOFError) or "Truncated" in str(error):
        return "is cut short"
    return f"is corrupt ({one_line(error)})"


def what_it_is(start: bytes) -> str | None:
    """What a file is that begins like this when it is unpacked, and how to make text of it; None for text."""
    if found := _packing(start):
        twice = "gzipped twice" if found[0] == "gzip" else f"packed twice, inside by {found[0]}"
        return f"it is {twice}: unpack it once: gunzip FILE (or what its name asks for)"
    for magic, told in OTHERS.items():
        if start.startswith(magic):
            return told
    if start[257:262] == b"ustar":
        return "it is a tar archive: unpack it: tar -xf FILE"
    if start[:15].lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page: a server's answer in place of the file: fetch it again"
    if any(byte < 32 and byte not in b"\t\n\v\f\r" for byte in start.partition(b"\n")[0]):
        return "it is a binary file: expected text"
    return None


def _packing(start: bytes) -> tuple | None:
    return next((told for magic, told in PACKED.items() if re.match(magic, start)), None)


def refuse_twice(given: str, paths: list[Path]) -> None:
    """UserError where a file lies beside a packed one of its name (`a.csv`, `a.csv.gz`): most likely one is the other,
    and its proteins would come twice. Nobody but the user knows; to take one and be silent would hide it if not."""
    by_name: dict[str, Path] = {}
    for path in sorted(paths, key=str):
        other = by_name.setdefault(unpacked_name(str(path)), path)
        if other is not path:
            raise UserError(f"{given}: both {other.name} and {path.name}: one file, plain and packed? Remove one")


def unpacked_name(name: str) -> str:
    """A file's name without the ending of what it is packed by."""
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]
