"""Parse CSV and TSV with pyarrow: a row for each line, or an error that names the row.

A quote that is not closed makes one value of everything up to the next quote, whole rows included, in whatever column
it is. So rows are counted against line ends, block by block. In TSV, which UniProt and others write without quoting,
quotes are ordinary characters but for a pair around a whole value.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from common.cli import UserError, one_line
from extras.prepare.sources.compression import STRADDLING, file_of_chunks, too_long

STRAY_QUOTE = (
    "a text that continues after a line end, after a quote that is not closed: fix or remove the quote (or, if texts "
    "may have line ends, give --line_ends_in_text to 1.tokenize_uniref_csv.py)"
)
READ_BYTES = 1 << 20  # at once: stays in the processor's cache
LINE_END = re.compile(rb"\r\n?")
PAIR = r'^"(.*)"$'


class Readable(Protocol):
    """What a table is parsed from."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Table:
    """How to parse a file whose header has been read.

    where: begins the errors; names: of all columns; columns: the wanted ones, given as `kind` (string or binary);
    line_ends: quoted values may have some; block_bytes: of a block, which holds at least a row.
    """

    where: str
    names: list[str]
    columns: list[str]
    kind: pa.DataType
    block_bytes: int
    delimiter: str = ","
    line_ends: bool = False

    def rows(
        self, file: Readable, misshapen: Callable[[int, str], None] | None = None
    ) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        """(numbers of the rows, from 1, int64 [n], their wanted columns) of each block; empty lines are left out.

        misshapen: called with the number of each row of more or fewer columns and what is wrong, which is left out
        then; without it, pa.ArrowInvalid, which names the row. UserError for a value that goes over a line end, unless
        `line_ends`, and for a row longer than a block.
        """
        parsed = self._of_any_lines(file, misshapen) if self.line_ends else self._of_lines(file, misshapen)
        for numbers, batch in parsed:
            if self.delimiter == "\t":
                columns = [pc.replace_substring_regex(column, PAIR, r"\1") for column in batch.columns]
                batch = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
            yield numbers, batch

    def _of_lines(
        self, file: Readable, misshapen: Callable[[int, str], None] | None
    ) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        done = 0
        for block in self._blocks(file):
            if block is None:
                raise too_long(f"{self.where}: after row {done}", self.block_bytes)
            skipped: dict[int, str] = {}
            lines = block.count(b"\n") + (not block.endswith(b"\n"))  # most blocks have no empty ones
            if not block or (block.isspace() and not _filled_lines(block)):
                continue
            try:
                read = pa.csv.read_csv(
                    pa.BufferReader(block), self._read_options(len(block) + 1), *self._options(skipped, misshapen)
                )
            except pa.ArrowInvalid as error:
                self._check_quotes(block, done)
                raise pa.ArrowInvalid(_numbered(error, done)) from None
            if read.num_rows + len(skipped) != lines:
                lines = _filled_lines(block)
            if read.num_rows + len(skipped) != lines:
                self._check_quotes(block, done)
            for number, what in skipped.items():
                misshapen(done + number, what)
            numbers = np.delete(np.arange(lines), np.array([*skipped], np.int64) - 1)
            yield done + 1 + numbers, read.combine_chunks().to_batches()[0] if read.num_rows else self._none
            done += lines

    def _of_any_lines(
        self, file: Readable, misshapen: Callable[[int, str], None] | None
    ) -> Iterator[tuple[np.ndarray, pa.RecordBatch]]:
        stream = file_of_chunks(iter(lambda: file.read(READ_BYTES), b""))
        if not stream.peek(1):
            return
        skipped: dict[int, str] = {}
        parsed = reported = 0
        try:
            options = self._read_options(self.block_bytes), *self._options(skipped, misshapen)
            with pa.csv.open_csv(stream, *options) as reader:
                for batch in reader:
                    for number, what in list(skipped.items())[reported:]:
                        misshapen(number, what)
                    reported = len(skipped)
                    numbers = np.arange(parsed + 1, parsed + batch.num_rows + 1)
                    left_out = np.array([*skipped], np.int64) - np.arange(len(skipped))
                    yield numbers + np.searchsorted(left_out, numbers, side="right"), batch
                    parsed += batch.num_rows
        except pa.ArrowInvalid as error:
            if STRADDLING in str(error):
                raise too_long(f"{self.where}: after row {parsed + len(skipped)}", self.block_bytes) from None
            raise pa.ArrowInvalid(_numbered(error, 0)) from None
        for number, what in list(skipped.items())[reported:]:
            misshapen(number, what)

    @property
    def _none(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([], self.kind) for _ in self.columns], names=self.columns)

    def _read_options(self, block_bytes: int) -> pa.csv.ReadOptions:
        # With threads, errors do not name the row.
        return pa.csv.ReadOptions(block_size=block_bytes, use_threads=False, column_names=self.names)

    def _options(
        self, skipped: dict[int, str], misshapen: Callable[[int, str], None] | None
    ) -> tuple[pa.csv.ParseOptions, pa.csv.ConvertOptions]:
        def leave_out(row: pa.csv.InvalidRow) -> str:
            skipped[row.number] = f"Expected {row.expected_columns} columns, got {row.actual_columns}"
            return "skip"

        parse = pa.csv.ParseOptions(
            delimiter=self.delimiter,
            quote_char=False if self.delimiter == "\t" else '"',
            newlines_in_values=self.line_ends,
            invalid_row_handler=leave_out if misshapen else None,
        )
        # The wanted columns only: pyarrow would infer types of the others, and fail at a later row of another type.
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(self.columns, self.kind),
            include_columns=self.columns,
            strings_can_be_null=False,
        )
        return parse, convert

    def _blocks(self, file: Readable) -> Iterator[bytes | None]:
        """Blocks of whole lines, which end with a line feed alone; None for a line longer than a block."""
        rest = b""
        while data := file.read(max(1, min(READ_BYTES, self.block_bytes - len(rest)))):
            data = rest + data
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end:
                yield LINE_END.sub(b"\n", data[:end]) if b"\r" in data else data[:end]
            elif len(data) >= self.block_bytes:
                yield None
            rest = data[end:]
        yield rest

    def _check_quotes(self, block: bytes, done: int) -> None:
        """UserError for the first row of a block that goes over a line end. done: rows before the block."""
        lines = io.StringIO(block.decode("utf-8", "replace"), newline="\n")
        reader, before, empty = csv.reader(lines, delimiter=self.delimiter), 0, 0
        for row in reader:
            if reader.line_num > before + 1:
                raise UserError(f"{self.where}: row {done + before - empty + 1}: {STRAY_QUOTE}")
            before, empty = reader.line_num, empty + (not row)


def _filled_lines(block: bytes) -> int:
    """Lines that are not empty; they end with a line feed alone."""
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    empty = np.count_nonzero(np.diff(ends, prepend=-1) == 1)
    return len(ends) - int(empty) + (not block.endswith(b"\n") and bool(block))


def _numbered(error: pa.ArrowInvalid, done: int) -> str:
    """The error's message, with the row's number in the file and without its text."""
    message = re.sub(r"^CSV parse error: |(?<=got \d): .*|(?<=got \d\d): .*", "", one_line(error))
    return re.sub(r"Row #(\d+)", lambda match: f"row {done + int(match[1])}", message)[:200]
