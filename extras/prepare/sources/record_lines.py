"""Columns of records to lines of bytes: the inverse of extras.prepare.sources.records.columns."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from extras.prepare.sources.records import FIELDS, NEWLINE, TAB, Lines


def fields_of(lines: Lines) -> tuple[str, ...]:
    """Names of the fields of lines, of which there is at least one."""
    return FIELDS[: lines[0].as_buffer().to_pybytes().count(TAB) + 1]


def lines_of(batch: pa.RecordBatch, with_clusters: bool) -> Lines:
    """Lines of records in columns. with_clusters: a field for the cluster even where the batch has none."""
    parts = [batch.column(name).cast(pa.binary()) for name in batch.schema.names]
    if with_clusters:
        parts[2:] = [parts[2].fill_null(b"")] if len(parts) > 2 else [b""]
    lines = pc.binary_join_element_wise(*parts, bytes([TAB]))
    return pc.binary_join_element_wise(lines, bytes([NEWLINE]), b"").cast(pa.large_binary())
