"""Read the sequences of a source's files piece by piece: what a stream is made of.

A unit is what is read from one end to the other: a file, or a row group of a parquet file where files are few.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from common.cli import UserError, one_line
from common.files.alphabet import BYTE_TO_ID, UNK, check_residues, encode_many
from common.files.csv_header import column_named, read_header
from common.files.csv_records import STRAY_QUOTE, characters, first_with_line_end
from common.files.fasta import read_fasta_lines
from common.files.records import columns
from common.files.sources import REMOTE, File, brief, hub_advice, refused

logger = logging.getLogger(__name__)

COLUMNS = ("sequence", "text")
ROWS_AT_ONCE = 4096
TEXTS = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
TEXTS += (pa.types.is_string_view, pa.types.is_binary_view, pa.types.is_null)
BLOCK_BYTES = 4 << 20  # of CSV and JSON lines
ATTEMPTS = 6  # failures in a row, without a row in between, that end the run
FIRST_WAIT_S = 1.0


@dataclass(frozen=True)
class Unit:
    file: File
    row_group: int | None = None  # None: the whole file

    def __str__(self) -> str:
        return self.file.path + ("" if self.row_group is None else f", row group {self.row_group}")


def units_of(files: tuple[File, ...], wanted: int) -> list[Unit]:
    """The units of some files: the files themselves when there are `wanted` or more, else parquet's row groups."""
    if len(files) >= wanted:
        return [Unit(file) for file in files]
    units = []
    for file in files:
        if file.kind != "parquet":
            units.append(Unit(file))
            continue
        units += [Unit(file, group) for group in range(_row_groups(file))]
    return units


def _row_groups(file: File) -> int:
    patience = _Patience(file.path)
    while True:
        try:
            with _reporting(file.path), _open(file) as handle:
                return pa.parquet.ParquetFile(handle).num_row_groups
        except _Network as trouble:
            patience.wait_after(trouble.error)


def read_sequences(
    unit: Unit, first_row: int, wait_s: float = FIRST_WAIT_S
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The rows of a unit from `first_row` on, in blocks: characters uint8 [C] and where each row begins [n + 1].

    A missing value is an empty row. Network trouble is retried with growing waits and goes on at the row where it
    broke off; UserError after ATTEMPTS in vain, and for files that aren't what their names say.
    """
    row, patience = first_row, _Patience(str(unit), wait_s)
    while True:
        try:
            with _reporting(str(unit)):
                for text in _blocks(unit, row):
                    data, offsets = characters(text)
                    block = data[offsets[0] : offsets[-1]]
                    check_residues(str(unit), np.count_nonzero(BYTE_TO_ID[block] == UNK), len(block))
                    yield data, offsets
                    row, patience.failures = row + len(text), 0
                return
        except _Network as trouble:
            patience.wait_after(trouble.error)


def _blocks(unit: Unit, first_row: int) -> Iterator[pa.Array]:
    """Arrays of strings, the first `first_row` rows of the unit left out."""
    readers = {"parquet": _parquet, "json": _json, "csv": _csv, "fasta": _fasta}
    with closing(readers[unit.file.kind](unit)) as blocks:
        for text in blocks:
            if first_row >= len(text):
                first_row -= len(text)
                continue
            if isinstance(text, pa.ChunkedArray):
                text = text.combine_chunks()
            text = _as_text(unit, text)
            yield (text.fill_null("") if text.null_count else text)[first_row:]
            first_row = 0


def _as_text(unit: Unit, text: pa.Array) -> pa.Array:
    """A string or binary array of whatever Arrow keeps texts in; UserError for what is no text."""
    if pa.types.is_string(text.type) or pa.types.is_binary(text.type):
        return text
    kind = text.type.value_type if pa.types.is_dictionary(text.type) else text.type
    if not any(is_text(kind) for is_text in TEXTS):
        raise UserError(f"{unit}: the column of proteins holds {text.type}: expected texts")
    return text.cast(pa.string())


def _parquet(unit: Unit) -> Iterator[pa.Array]:
    with _open(unit.file) as handle:
        file = pa.parquet.ParquetFile(handle)
        groups = range(file.num_row_groups) if unit.row_group is None else [unit.row_group]
        column = _column(unit, file.schema_arrow.names)
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=list(groups), columns=[column], use_threads=False):
            yield batch.column(0)


def _json(unit: Unit) -> Iterator[pa.Array]:
    options = pa.json.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
    with _local_stream(unit) as stream:
        column = _column(unit, _names_of_first_object(stream))
    # No other field is looked at: it may have any type, another one in each row, or come late.
    parse = pa.json.ParseOptions(
        explicit_schema=pa.schema([(column, pa.string())]), unexpected_field_behavior="ignore"
    )
    with (
        _local_stream(unit) as stream,
        pa.json.open_json(stream, read_options=options, parse_options=parse) as reader,
    ):
        for batch in reader:
            yield batch.column(column)


def _names_of_first_object(stream: pa.NativeFile) -> list[str]:
    line = b""
    while not line.strip() and (block := stream.read(BLOCK_BYTES)):
        line = (line + block).lstrip().partition(b"\n")[0]
    try:
        return [*json.loads(line).keys()]
    except (ValueError, AttributeError) as error:
        raise pa.ArrowInvalid(f"its first line is no JSON object ({one_line(error)})") from None


def _csv(unit: Unit) -> Iterator[pa.Array]:
    read = pa.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
    delimiter = "\t" if unit.file.path.lower().removesuffix(".gz").endswith(".tsv") else ","
    with io.BufferedReader(_local_stream(unit)) as stream:
        names = read_header(stream, str(unit), delimiter)
        column = _column(unit, names)
        # The one column, as text: others would be parsed as numbers or dates, until a row that is none ends the run.
        convert = pa.csv.ConvertOptions(
            column_types={column: pa.string()}, include_columns=[column], strings_can_be_null=False
        )
        read.column_names = names
        if not stream.peek(1):
            return
        parse = pa.csv.ParseOptions(delimiter=delimiter)
        row = 0
        with pa.csv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert) as reader:
            for batch in reader:
                if (bad := first_with_line_end(batch.columns)) is not None:
                    raise UserError(f"{unit}: row {row + bad + 1}: {STRAY_QUOTE}")
                again = pa.compute.equal(batch.column(0), column)
                if (found := pa.compute.index(again, True).as_py()) >= 0:
                    raise UserError(f"{unit}: row {row + found + 1}: the header once more: remove the row")
                row += batch.num_rows
                yield batch.column(0)


def _fasta(unit: Unit) -> Iterator[pa.Array]:
    for lines in read_fasta_lines(_local_path(unit)):
        yield columns(lines).column("text")


def _column(unit: Unit, names: list[str]) -> str:
    if (column := column_named(names, COLUMNS)) is not None:
        return column
    found = ", ".join(names)[:80]
    raise UserError(f"{unit}: no column {' or '.join(COLUMNS)}, only {found}: rename the one that holds the proteins")


def _open(file: File):
    """A binary file to seek in."""
    if not file.path.startswith(REMOTE):
        return pa.memory_map(file.path)
    from huggingface_hub import HfFileSystem

    return HfFileSystem().open(file.path, "rb", block_size=8 << 20)


def _local_stream(unit: Unit) -> pa.NativeFile:
    """The file's bytes in order, gunzipped."""
    return pa.input_stream(_local_path(unit), compression="gzip" if unit.file.path.endswith(".gz") else None)


def _local_path(unit: Unit) -> str:
    """Formats that are read from end to end anyway are fetched to the Hub's cache first."""
    path = unit.file.path
    if not path.startswith(REMOTE):
        return path
    from huggingface_hub import hf_hub_download

    owner, rest, name = path.removeprefix(REMOTE + "datasets/").split("/", 2)
    repo, revision = rest.split("@")
    return hf_hub_download(f"{owner}/{repo}", name, repo_type="dataset", revision=revision)


class _Patience:
    """Growing waits between attempts, and their end."""

    def __init__(self, what: str, first_wait_s: float = FIRST_WAIT_S):
        self.what, self.first_wait_s, self.failures = what, first_wait_s, 0

    def wait_after(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == ATTEMPTS or refused(error):
            repo = "/".join(self.what.removeprefix(REMOTE).split("/")[1:3]).split("@")[0]
            raise UserError(f"{self.what}: {hub_advice(repo, error)} (attempts: {self.failures})")
        wait_s = self.first_wait_s * 2 ** (self.failures - 1)
        logger.warning("%s: %s; trying again in %.0f s", self.what, brief(error), wait_s)
        time.sleep(wait_s)


class _Network(Exception):
    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Damaged files become a UserError, what may be better the next time a _Network."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: cannot be read: {brief(error)}: mend the file or leave it out") from None
    except (OSError, RuntimeError) as error:
        if what.startswith(REMOTE):
            raise _Network(error) from error
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or brief(error)  # of Arrow: a damaged file has no errno
        raise UserError(f"{what}: cannot be read: {reason}: mend the file or leave it out") from None


class MemoryStore:
    """A few proteins held in memory, with the interface of a TokenStore: held-out ones of a source that is streamed.

    Token ids of n records, end to end: ids uint8 [T], offsets int64 [n + 1].
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        self.ids, self.offsets = ids, offsets

    @classmethod
    def read(cls, files: tuple[File, ...], max_records: int) -> MemoryStore:
        """The first `max_records` proteins of some files, empty rows left out."""
        ids, lengths, missing = [], [], max_records
        for unit in units_of(files, wanted=1):
            for text, offsets in read_sequences(unit, 0):
                proteins, offsets = encode_many(text, offsets)
                sizes = np.diff(offsets)
                kept = sizes > 2  # not only <cls> and <eos>
                kept &= np.cumsum(kept) <= missing
                ids.append(proteins[np.repeat(kept, sizes)])
                lengths.append(sizes[kept])
                missing -= int(kept.sum())
                if not missing:
                    break
            if not missing:
                break
        offsets = np.append(0, np.cumsum(np.concatenate(lengths or [np.zeros(0, np.int64)])))
        return cls(np.concatenate(ids or [np.zeros(0, np.uint8)]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of the records int64 [n], `<cls>` and `<eos>` included."""
        return self.offsets[np.asarray(indices) + 1] - self.offsets[indices]

    def gather(self, indices: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n records, end to end: ids uint8, offsets int64 [n + 1]."""
        begin = (self.offsets[indices] + starts).tolist()
        pieces = [self.ids[a : a + n] for a, n in zip(begin, lengths.tolist(), strict=True)]
        return np.concatenate(pieces or [self.ids[:0]]), np.append(0, np.cumsum(lengths))
