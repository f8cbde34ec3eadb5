"""Read a table of cluster members (UniRef50 cluster, UniRef90 member): parquet, or CSV or TSV, plain or gzipped.

With a header, the columns are `ur50_id` and `ur90_id`, in any order and beside any others. Without one there are two
columns, a UniRef50_... and a UniRef90_... name in each line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from common.cli import UserError
from common.files.csv_records import characters
from common.files.hashing import hash_bytes

COLUMNS = ("ur50_id", "ur90_id")
BLOCK_BYTES = 4 << 20
WANTED = f"expected the columns {' and '.join(COLUMNS)}, or two columns UniRef50_... and UniRef90_... without a header"


def read_table(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Hashes of the clusters' names and of the members' names, uint64 [n] each, block by block."""
    if not path.is_file():
        raise UserError(f"--cluster_table {path}: no such file")
    with open(path, "rb") as file:
        magic = file.read(4)
    row = 1
    try:
        for clusters, members in _parquet(path) if magic == b"PAR1" else _text(path, magic[:2] == b"\x1f\x8b"):
            for names in (clusters, members):
                if bad := np.flatnonzero(np.diff(characters(names)[1]) == 0).tolist():
                    raise UserError(f"--cluster_table {path}: row {row + bad[0]}: a name is empty: remove the row")
            yield hash_names(clusters), hash_names(members)
            row += len(members)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"--cluster_table {path}: {' '.join(str(error).split())[:200]}: fetch it again") from None


def hash_names(names: pa.Array) -> np.ndarray:
    """uint64 [n] of a string or binary array."""
    return hash_bytes(*characters(names))


def _parquet(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    with pa.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if not all(name in names for name in COLUMNS):
            raise UserError(f"--cluster_table {path}: its columns are {', '.join(names)}: {WANTED}")
        for batch in file.iter_batches(batch_size=1 << 16, columns=list(COLUMNS)):
            yield tuple(batch.column(name).cast(pa.binary()).fill_null(b"") for name in COLUMNS)


def _text(path: Path, is_gzip: bool) -> Iterator[tuple[pa.Array, pa.Array]]:
    with _open(path, is_gzip) as stream:
        first = stream.read(1 << 16).split(b"\n")[0].decode("utf-8", "replace").strip("\ufeff\r\n")
    delimiter = "\t" if "\t" in first else ","
    fields = [field.strip('"') for field in first.split(delimiter)]
    has_header = all(name in fields for name in COLUMNS)
    if not has_header and [field[:9] for field in fields] != ["UniRef50_", "UniRef90_"]:
        raise UserError(f"--cluster_table {path}: its first line is {first[:80]!r}: {WANTED}")
    with _open(path, is_gzip) as stream:
        read = pa.csv.ReadOptions(block_size=BLOCK_BYTES, column_names=None if has_header else COLUMNS)
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(COLUMNS, pa.binary()), include_columns=COLUMNS, strings_can_be_null=False
        )
        options = pa.csv.ParseOptions(delimiter=delimiter)
        with pa.csv.open_csv(stream, read_options=read, convert_options=convert, parse_options=options) as reader:
            for batch in reader:
                yield tuple(batch.columns)


def _open(path: Path, is_gzip: bool) -> pa.NativeFile:
    return pa.CompressedInputStream(str(path), "gzip") if is_gzip else pa.OSFile(str(path))
