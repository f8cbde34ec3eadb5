"""Clean the rows of a table of proteins: one rule for all formats with columns; every error names file and row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from extras.prepare.sources.compression import find_too_long, strip_compression, too_long
from extras.prepare.sources.records import characters, texts
from extras.prepare.sources.residues import IS_WHITESPACE, Cleaner

NOT_UTF8 = "\ufffd"
REMEDY = "fix or remove the row, or give --on_bad_record skip"
Blocks = Iterable[tuple[np.ndarray, pa.RecordBatch]]


def clean_rows(
    path: Path, blocks: Blocks, cleaner: Cleaner, max_record: int, header: dict[str, str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Record batches with string columns `id`, `text` and, where the blocks have one, `cluster`.

    blocks: (numbers of the rows from 1, int64 [n]; binary columns `text` and maybe `id` and `cluster`). text becomes
    clean (extras.prepare.sources.residues), ASCII, not empty; without ids, a record has the file's name and its row's
    number; an empty cluster is null. cleaner: its `bad_records` is called with the error of each other row, which is
    left out. header: {column: its name in the file}: a row of these names is a bad one. max_record: maximum bytes of a
    text; a longer one is always a UserError.
    """
    for rows, batch in blocks:
        if "id" not in batch.schema.names:
            batch = batch.add_column(0, "id", numbered(path, rows))
        batch = _without_nulls(batch)
        if (row := find_too_long(batch.column("text"), max_record)) is not None:
            raise too_long(f"{path}: row {rows[row]}", max_record)
        batch, rows = _without(batch, rows, _complaints(batch, header or {}), path, cleaner)
        text = batch.column("text")
        data, ends, refused = cleaner(*characters(text), lambda n, rows=rows: f"row {rows[n]}")
        lengths = np.diff(ends)
        if len(data) != pc.sum(pc.binary_length(text)).as_py():
            batch = batch.set_column(1, "text", texts(data, ends, pa.binary()))
        empty = dict.fromkeys(np.flatnonzero(lengths == 0).tolist(), "the text is empty")
        batch, _ = _without(batch, rows, empty | dict.fromkeys(refused, ""), path, cleaner)
        # A view: all bytes have been looked at, so that Arrow need not validate them again.
        columns = [column.view(pa.string()) for column in batch.columns]
        yield pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def numbered(path: Path, rows: np.ndarray) -> pa.Array:
    """Ids of records without one: the file's name without its suffix, and the row's number; binary [n]."""
    stem = re.sub(r"\s+", "_", Path(strip_compression(path.name)).stem)
    return pc.binary_join_element_wise(stem, pa.array(rows).cast(pa.string()), "-").cast(pa.binary())


def _without_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    """With the empty text for a missing id or text, and a missing value for an empty cluster."""
    columns = [column.fill_null(b"") if column.null_count else column for column in batch.columns[:2]]
    if batch.num_columns > len(columns):
        cluster = batch.column("cluster")
        empty = pc.equal(pc.binary_length(cluster), 0)
        columns.append(pc.if_else(empty, pa.scalar(None, pa.binary()), cluster) if pc.any(empty).as_py() else cluster)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _without(
    batch: pa.RecordBatch, rows: np.ndarray, bad: dict[int, str], path: Path, cleaner: Cleaner
) -> tuple[pa.RecordBatch, np.ndarray]:
    """Leave out bad rows, with their numbers in `rows`. bad: what is wrong with each; "": it has been said."""
    for i, complaint in sorted(bad.items()):
        if complaint:
            cleaner.bad_records(UserError(f"{path}: row {rows[i]}: {complaint}: {REMEDY}"))
    if not bad:
        return batch, rows
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[list(bad)] = False
    return batch.filter(pa.array(keep)), rows[keep]


def _is_printable(column: pa.Array) -> bool:
    """Whether all bytes of a binary array are printable ASCII, which few files are not."""
    data, offsets = characters(column)
    data = data[offsets[0] : offsets[-1]]
    return not len(data) or (data.min() >= ord(" ") and data.max() < 127)


def _complaints(batch: pa.RecordBatch, header: dict[str, str]) -> dict[int, str]:
    """The problem of each row that is not text, or the header once more."""
    complaints: dict[int, str] = {}
    # A pass for minimum and maximum instead of one for each of the bytes that are complained about.
    for name in batch.schema.names:
        if name != "text" and not _is_printable(batch.column(name)):
            complaints |= dict.fromkeys(_not_utf8(batch.column(name)), f"the {name} is not UTF-8")
    if not _is_printable(batch.column("text")):
        data, offsets = characters(batch.column("text"))
        data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
        places = np.flatnonzero((data >= 128) | ((data < ord(" ")) & ~IS_WHITESPACE[data]))
        rows, first = np.unique(np.searchsorted(offsets, places, side="right") - 1, return_index=True)
        for row, place in zip(rows.tolist(), places[first], strict=True):
            kind = "non-ASCII" if data[place] >= 128 else "control"
            complaints[row] = f"{kind} byte 0x{data[place]:02x} in the text"
        damaged = pc.match_substring(batch.column("text"), NOT_UTF8)
        complaints |= dict.fromkeys(np.flatnonzero(damaged).tolist(), "bytes in the text that are not UTF-8")
    for row in _headers(batch, header):
        complaints[row] = "the header once more"
    return complaints


def _not_utf8(column: pa.Array) -> list[int]:
    """Rows of a binary array with bytes that are not UTF-8, or were not before they were replaced."""
    rows = []
    for row, value in enumerate(column.to_pylist()):
        try:
            if value is not None and NOT_UTF8 in value.decode():
                rows.append(row)
        except UnicodeDecodeError:
            rows.append(row)
    return rows


def _headers(batch: pa.RecordBatch, header: dict[str, str]) -> list[int]:
    """Rows whose values are the names of their columns, whatever the case."""
    if not header or not batch.num_rows:
        return []
    candidates = np.ones(batch.num_rows, bool)
    for role, name in header.items():
        candidates &= np.diff(characters(batch.column(role))[1]) == len(name)
    return [
        row
        for row in np.flatnonzero(candidates).tolist()
        if all(batch.column(role)[row].as_py().lower() == name.encode() for role, name in header.items())
    ]
