"""Plain text: documents separated by one or more empty lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from common.cli import UserError
from extras.prepare.sources.compression import HEAD_BYTES, detect_non_text
from extras.prepare.sources.find_files import File
from extras.prepare.sources.record_counts import estimated
from extras.prepare.sources.sequence_files import BLOCK_BYTES, Unit, open_stream

BLANK_LINES = re.compile(rb"\n[ \t\r\n]*\n")


def column(unit: Unit) -> None:
    with open_stream(unit.file) as (_, stream):
        _check(unit, stream)


def records(file: File) -> float:
    return estimated(file, _paragraphs)


def _paragraphs(lines: list[bytes]) -> int:
    filled = [bool(line.strip()) for line in lines]
    return sum(now and not before for before, now in zip([False, *filled], filled, strict=False))


def texts(unit: Unit) -> Iterator[pa.Array]:
    left, searched, number, longest = bytearray(), 0, 1, unit.file.content.longest
    with open_stream(unit.file) as (_, stream):
        _check(unit, stream)
        while chunk := stream.read(min(BLOCK_BYTES, longest)):
            left += chunk
            ends = [match.span() for match in BLANK_LINES.finditer(left, searched)]
            documents, begin = [], 0
            for end, following in ends:
                documents.append(bytes(left[begin:end].strip(b"\r\n")))
                begin = following
            if documents := [document.decode() for document in documents if document.strip()]:
                yield pa.array(documents)
            number += left.count(b"\n", 0, begin)
            del left[:begin]
            if len(left) > longest:
                raise UserError(
                    f"{unit}: line {number}: no empty line in {longest:,} bytes: in plain text they separate "
                    "documents; with a document a line, make it JSON lines; or raise --max_record_length"
                )
            searched = len(left.rstrip(b" \t\r\n"))
    if left.strip():
        yield pa.array([left.strip(b"\r\n").decode()])


def _check(unit: Unit, stream: BinaryIO) -> None:
    if problem := detect_non_text(stream.peek(HEAD_BYTES)[:HEAD_BYTES]):
        raise UserError(f"{unit}: not plain text: {problem}")
