"""Stream `id,text` CSV files; every complaint names file and row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from common.cli import UserError

BLOCK_BYTES = 8 << 20
COLUMNS = ("id", "text")


def csv_files(directory: Path) -> list[Path]:
    """The *.csv files of a directory, x999 before x1000. UserError if there are none."""
    if not directory.is_dir():
        raise UserError(f"--input_dir {directory}: no such directory: run 0.download_data.py first")
    files = [path for path in directory.glob("*.csv") if not path.name.startswith(".")]
    if not files:
        raise UserError(f"--input_dir {directory}: no *.csv files in it: run 0.download_data.py first")
    return sorted(files, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", path.name)])


def count_rows(path: Path, block_bytes: int = BLOCK_BYTES) -> int:
    """Rows after the header."""
    return sum(batch.num_rows for batch in _batches(path, ("id",), block_bytes))


def read_rows(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[pa.RecordBatch]:
    """Record batches with `id` and `text`, both string; text is not empty and ASCII. Memory is a few blocks."""
    first_row = 1
    for batch in _batches(path, COLUMNS, block_bytes):
        _check_text(path, first_row, batch.column("text"))
        try:
            ids = batch.column("id").cast(pa.string())
        except pa.ArrowInvalid:
            bad = next(i for i, name in enumerate(batch.column("id")) if not _is_utf8(name.as_py()))
            raise UserError(f"{path}: row {first_row + bad}: the id is not UTF-8: rename it") from None
        text = batch.column("text").cast(pa.string())
        yield pa.RecordBatch.from_arrays([ids, text], names=COLUMNS)
        first_row += batch.num_rows


def characters(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a string or binary array end to end, uint8 [C], and where each row begins, int32 [N + 1]; views."""
    _, offsets, data = text.buffers()
    offsets = np.frombuffer(offsets, np.int32)[text.offset : text.offset + len(text) + 1]
    return np.frombuffer(data or b"", np.uint8), offsets


def _batches(path: Path, columns: tuple[str, ...], block_bytes: int) -> Iterator[pa.RecordBatch]:
    read = pa.csv.ReadOptions(block_size=block_bytes, use_threads=False)  # threads lose the row number of an error
    # Binary: pyarrow's own complaint about bytes that are no UTF-8 does not say where they are.
    convert = pa.csv.ConvertOptions(column_types=dict.fromkeys(COLUMNS, pa.binary()), strings_can_be_null=False)
    try:
        with pa.csv.open_csv(path, read_options=read, convert_options=convert) as reader:
            names = reader.schema.names
            if any(names.count(column) != 1 for column in COLUMNS):
                raise UserError(f"{path}: row 0: the header is {','.join(names)[:80]!r}: expected id,text")
            for batch in reader:
                yield batch.select(columns)
    except pa.ArrowInvalid as error:
        message = re.sub(r"^CSV parse error: ", "", " ".join(str(error).split()))
        # pyarrow counts the header as row 1
        message = re.sub(r"Row #(\d+)", lambda match: f"row {int(match[1]) - 1}", message)
        raise UserError(f"{path}: {message[:200]}: mend the file, or write it again with 0.download_data.py") from None


def _check_text(path: Path, first_row: int, text: pa.Array) -> None:
    data, offsets = characters(text)
    lengths = np.diff(offsets)
    if not lengths.all():
        row = first_row + int(np.argmin(lengths))
        raise UserError(f"{path}: row {row}: the text is empty: remove the row")
    data = data[offsets[0] : offsets[-1]]
    if len(data) and data.max() >= 128:
        bad = int(np.argmax(data >= 128))
        row = first_row + int(np.searchsorted(offsets - offsets[0], bad, side="right")) - 1
        raise UserError(f"{path}: row {row}: non-ASCII byte 0x{data[bad]:02x} in the text: remove it")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
