"""FASTA records from a plain or gzipped file, as bytes, with the line number in every complaint."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from common.cli import UserError

BLOCK_BYTES = 4 << 20
NEWLINE = b"\n"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows editors write it
WHITESPACE = b" \t\r\n\v\f"


def read_fasta_batches(path: Path | str, block_bytes: int = BLOCK_BYTES) -> Iterator[pa.RecordBatch]:
    """The records of `read_fasta` in record batches with columns id and text, both string."""
    records = read_fasta(path, block_bytes)
    while batch := list(islice(records, 10_000)):
        columns = [pa.array(column, pa.binary()).cast(pa.string()) for column in zip(*batch, strict=True)]
        yield pa.RecordBatch.from_arrays(columns, names=["id", "text"])


def read_fasta(path: Path | str, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[bytes, bytes]]:
    """Yield (id, sequence) of every record, in file order.

    The id is the first word after `>`. White space (Windows line ends, blank lines) is taken out of the sequence
    and so is one `*` at its end, which marks a stop; letters keep their case and any other ASCII character stays.
    Neither contains white space. Memory is one block, or the largest record.

    Raises UserError, naming file and line: not FASTA, empty file, a record without id or without sequence, a `>`
    inside a sequence, non-ASCII bytes, a gzip file cut short or corrupt.
    """
    path = Path(path)
    line = 1  # of the first byte of `rest`
    rest = b""
    records = 0
    blocks = _read_blocks(path, block_bytes)
    while True:
        try:
            block = next(blocks, b"")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            what = "is cut short" if isinstance(error, EOFError) else f"is corrupt ({error})"
            where = f"after {records:,} records, line {line + rest.count(NEWLINE)}"
            raise UserError(f"{path}: the gzip file {what} {where}: fetch it again") from None
        at_end = not block
        rest += block
        if records == 0:  # also after a first block of blank lines
            begins = rest.lstrip(WHITESPACE)
            line += rest.count(NEWLINE, 0, len(rest) - len(begins))
            rest = begins
            if rest and not rest.startswith(b">"):
                start = rest.split(b"\n", 1)[0][:40].decode("ascii", "replace").strip()
                raise UserError(
                    f"{path}: line {line}: not FASTA: expected a line that starts with '>', found {start!r}"
                )
        # Only what stands before the last header is known to be complete.
        cut = len(rest) if at_end else rest.rfind(b"\n>") + 1
        if cut:
            complete, rest = rest[:cut], rest[cut:]
            line_of_first = line
            parts = complete[1:].split(b"\n>")
            for number, part in enumerate(parts):
                header, _, body = part.partition(b"\n")
                words = header.split(None, 1)
                sequence = body.translate(None, WHITESPACE)
                if sequence.endswith(b"*"):
                    sequence = sequence[:-1]
                if not words or not sequence or b">" in sequence or not (words[0].isascii() and sequence.isascii()):
                    line = line_of_first + sum(p.count(b"\n") + 1 for p in parts[:number])
                    raise _complaint(path, line, records + 1, words, body)
                records += 1
                yield words[0], sequence
            line += complete.count(b"\n")
        if at_end:
            break
    if records == 0:
        raise UserError(f"{path}: empty file: expected FASTA records ('>id', then the sequence)")


def _read_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    with open(path, "rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"  # the name may lie
        raw.seek(0)
        with gzip.open(raw, "rb") if gzipped else raw as file:
            if first := file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK):
                yield first
            while block := file.read(block_bytes):
                yield block


def _complaint(path: Path, line: int, record: int, words: list[bytes], body: bytes) -> UserError:
    """What is wrong with a record that begins at `line`."""
    where = f"{path}: line {line}: record {record:,}"
    if not words:
        return UserError(f"{where} has no id after '>': give it one or remove the record")
    name = words[0].decode("ascii", "backslashreplace")[:60]
    if not words[0].isascii():
        return UserError(f"{where}: non-ASCII bytes in the id {name}: rename it")
    if b">" in body:
        line += 1 + body[: body.index(b">")].count(b"\n")
        return UserError(f"{path}: line {line}: '>' inside the sequence of {name}: a header must start its own line")
    if not body.isascii():
        position = next(i for i, byte in enumerate(body) if byte >= 128)
        line += 1 + body[:position].count(b"\n")
        return UserError(
            f"{path}: line {line}: non-ASCII byte 0x{body[position]:02x} in the sequence of {name}: remove it"
        )
    return UserError(f"{where} ({name}) has no sequence: remove the record or fetch the file again")
