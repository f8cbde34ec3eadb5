"""Open a user's files: regular files only, decompressed (gzip, bzip2, xz, zstd) by content, not by extension.

Files that are not text are detected, too, for an error that names their format. And limits on the length of a record,
which bound a reader's memory whatever a compressed file decompresses to.
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
from extras.prepare.sources.records import characters

LONGEST_DOCUMENT = 16 << 20  # bytes of a document: five times War and Peace
HELP = "longest record of the input, in bytes; memory grows with it"
STRADDLING = "straddling object"  # in errors of pyarrow's CSV and JSON readers for a row longer than a block


def too_long(where: str, longest: int) -> UserError:
    """The error for a record or line of more than `longest` bytes. where: file and line or record."""
    return UserError(
        f"{where}: longer than {longest:,} bytes: remove the record, or raise --max_record_length if it is meant to be"
    )


def find_too_long(text: pa.Array, longest: int) -> int | None:
    """Index of the first text (string or binary) of more than `longest` bytes, if there is one."""
    lengths = np.diff(characters(text)[1])
    return int(np.argmax(lengths > longest)) if len(lengths) and lengths.max() > longest else None


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")  # of names; the content decides
TO_A_FILE = "write its output to a file, and give that"
HEAD_BYTES = 512  # of a file, to detect its format
XZ_BYTES = 256 << 20  # memory limit of the xz decoder; level 9 needs 65 MiB
XZ_READ_BYTES, XZ_CHUNK_BYTES = 1 << 16, 1 << 20
# Errors of the decompressors.
DECOMPRESS_ERRORS = (EOFError, zlib.error, isal_zlib.error, igzip.BadGzipFile, lzma.LZMAError, OSError)
PARQUET = "parquet: give it a name that ends in .parquet"
UTF_16 = "it is UTF-16: convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE"
OTHERS = {
    b"PK\x03\x04": "it is a zip archive: unpack it: unzip FILE",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
    b"PAR1": f"it is {PARQUET}",
    b"ARROW1": "it is an Arrow file: give it a name that ends in .arrow",
}


def _unzstd(raw: BinaryIO, mode: str) -> BinaryIO:
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"))


class _Chunks(io.RawIOBase):
    """A file of the bytes that an iterator yields."""

    def __init__(self, chunks: Iterator[bytes]):
        self.chunks, self.ready = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.ready:
            if (chunk := next(self.chunks, None)) is None:
                return 0
            self.ready = memoryview(chunk)
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def file_of_chunks(chunks: Iterator[bytes]) -> BinaryIO:
    return io.BufferedReader(_Chunks(chunks))


def _unxz(raw: BinaryIO, mode: str) -> BinaryIO:
    return file_of_chunks(_xz_chunks(raw))


def _xz_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """The decompressed bytes of an xz file, within XZ_BYTES of memory: its header may ask for up to 4 GB."""
    packed, decoder = b"", None
    while True:
        if not packed and (decoder is None or decoder.needs_input):
            packed = raw.read(XZ_READ_BYTES)
            if not packed:
                break
        if decoder is None:
            packed = packed.lstrip(b"\0")  # padding between the streams of a file
            if not packed:
                continue
            decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_BYTES)
        yield decoder.decompress(packed, XZ_CHUNK_BYTES)
        packed = b""
        if decoder.eof:
            packed, decoder = decoder.unused_data, None
    if decoder is not None:
        raise EOFError("cut short")


# First bytes of a compressed file: its format, and what opens it.
COMPRESSIONS = {
    rb"\x1f\x8b": ("gzip", igzip.open),
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": ("bzip2", bz2.open),
    rb"\xfd7zXZ\0": ("xz", _unxz),
    rb"\x28\xb5\x2f\xfd": ("zstd", _unzstd),
}


def check_file(path: Path, given: str) -> None:
    """UserError unless `path` is a regular file, or a link to one. Nothing is opened: a pipe may block forever.

    given: how the user named it, for the message; `-` as its last word is standard input.
    """
    if given == "-" or given.endswith(" -"):
        raise UserError(
            f"{given}: standard input can be read only once, so a stopped run could not resume: {TO_A_FILE}"
        )
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise UserError(f"{given}: {'a broken link' if path.is_symlink() else 'no such file'}") from None
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise UserError(f"{given}: not a file but a directory")
    kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
    raise UserError(f"{given}: not a file but a {kind}, which can be read only once: {TO_A_FILE}")


@contextmanager
def open_decompressed(path: Path | str) -> Iterator[BinaryIO]:
    """The file's decompressed bytes, an object with read, readline and peek.

    UserError if it is not a regular file and, while it is open, for a truncated or corrupt compressed file.
    """
    check_file(Path(path), str(path))
    with open(path, "rb") as raw, decompressing(raw, str(path)) as file:
        yield file


@contextmanager
def decompressing(raw: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of an open file called `name`. While it is open, UserError if it is damaged."""
    with decompress(raw) as file:
        try:
            yield file
        except DECOMPRESS_ERRORS as error:
            if (what := describe_damage(error)) is None:
                raise
            raise UserError(f"{name}: the compressed file {what}: fetch it again") from None


def decompress(raw: BinaryIO) -> BinaryIO:
    """An open file itself, or its decompressor."""
    start = raw.read(HEAD_BYTES)
    raw.seek(0)
    packing = _packing(start)
    return packing[1](raw, "rb") if packing else raw


def describe_damage(error: BaseException) -> str | None:
    """What an error of DECOMPRESS_ERRORS means for the file; None for errors of the system or of a server."""
    if isinstance(error, OSError) and (error.errno is not None or hasattr(error, "response")):
        return None
    if isinstance(error, EOFError) or "Truncated" in str(error):
        return "is cut short"
    return f"is corrupt ({one_line(error)})"


def detect_non_text(start: bytes) -> str | None:
    """The format of a decompressed file that begins with `start`, and how to convert it to text; None for text."""
    if packing := _packing(start):
        twice = "gzipped twice" if packing[0] == "gzip" else f"compressed twice, inside with {packing[0]}"
        return f"it is {twice}: decompress it once: gunzip FILE (or what its name asks for)"
    for magic, advice in OTHERS.items():
        if start.startswith(magic):
            return advice
    if start[257:262] == b"ustar":
        return "it is a tar archive: unpack it: tar -xf FILE"
    if start[:15].lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a web page: a server's answer in place of the file: fetch it again"
    if any(byte < 32 and byte not in b"\t\n\v\f\r" for byte in start.partition(b"\n")[0]):
        return "it is a binary file: expected text"
    return None


def _packing(start: bytes) -> tuple | None:
    return next((opener for magic, opener in COMPRESSIONS.items() if re.match(magic, start)), None)


def check_duplicates(given: str, paths: list[Path]) -> None:
    """UserError for a file beside a compressed one of the same name (`a.csv`, `a.csv.gz`): most likely they have the
    same records, which would be read twice. Reading only one of them could lose records."""
    by_name: dict[str, Path] = {}
    for path in sorted(paths, key=str):
        other = by_name.setdefault(strip_compression(str(path)), path)
        if other is not path:
            raise UserError(
                f"{given}: both {other.name} and {path.name}: the same file, plain and compressed? Remove one"
            )


def strip_compression(name: str) -> str:
    """A file's name without the suffix of its compression."""
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]
