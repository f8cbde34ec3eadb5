"""Step 1 with --cluster_table: splits of whole clusters and the index of the training records' clusters.

The table (UniRef50 cluster, UniRef90 member) is parquet, or CSV or TSV, plain or packed. With a header, the columns
are `ur50_id` and `ur90_id`, in any order and beside any others. Without one there are two columns, a UniRef50_... and
a UniRef90_... name in each line.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from common.cli import UserError, one_line
from common.files.hashing import hash_bytes
from extras.prepare.cluster_index import Buckets, draw_splits, join, without_copies, write_index
from extras.prepare.clusters import DIRECTORY
from extras.prepare.mmseqs import numbers
from extras.prepare.output_directory import Build
from extras.prepare.shuffle import boot_id
from extras.prepare.splits import SPLITS
from extras.sources.compression import LONGEST_PROTEIN, STRADDLING, check_file, open_unpacked
from extras.sources.csv_records import read_rows
from extras.sources.parquet_pages import read_columns
from extras.sources.records import BadRecords, Policy, characters

logger = logging.getLogger(__name__)
WINDOW = 1 << 16
COLUMNS = ("ur50_id", "ur90_id")
BLOCK_BYTES = 4 << 20  # of a text: a row must fit
WANTED = (
    f"expected the columns {' and '.join(COLUMNS)}, or two columns UniRef50_... and UniRef90_... without a header, or "
    "the _cluster.tsv of mmseqs2"
)


class ClusterSplits(NamedTuple):
    """counts: usable records of every file; sizes: records of every split; labels: windows of uint8 (splits.py)."""

    counts: list[int]
    sizes: tuple[int, ...]
    labels: Iterator[np.ndarray]
    bad_records: BadRecords


def split_by_clusters(
    build: Build,
    files: list[Path],
    table: Path,
    sizes_of: Callable[[int], tuple[int, int, int]],
    all_left: bool,
    seed: int,
    policy: Policy,
    by_number: bool = False,
    max_record: int = LONGEST_PROTEIN,
) -> ClusterSplits:
    """Done once: what a killed run completed is taken up.

    sizes_of: number of records -> sizes of the splits; all_left: train takes whatever the others leave; by_number: the
    table has the records' numbers (mmseqs.py), not their ids; max_record: as for `read_rows`.
    """
    directory = build.scratch / DIRECTORY
    found = build.done("clustered")
    # publish_index needs the buckets, which are not flushed to the disk: another boot makes them anew.
    if found is None or (found["boot"] != boot_id() and build.done("indexed") is None):

        def draw(joined: Buckets) -> np.ndarray:
            return draw_splits(joined, sizes_of(joined.rows), all_left, directory / "labels.npy")

        read = functools.partial(read_rows, bad_records=(bad := BadRecords(policy)), max_record=max_record)
        found = _make(directory, files, table, draw, seed, bad, read, numbers if by_number else _ids)
        build.note("clustered", found)
    labels = np.load(directory / "labels.npy", mmap_mode="r")
    build.results["not_in_cluster_table"] = found["missing"]
    if found["missing"]:
        logger.warning(
            "%s of %s records are not in %s: each is a cluster of its own",
            *(f"{n:,}" for n in (found["missing"], len(labels))),
            table,
        )
    if found["repeated"]:
        logger.warning("%s: %s rows put a member into a second cluster: left out", table, f"{found['repeated']:,}")
    windows = (np.asarray(labels[first : first + WINDOW]) for first in range(0, len(labels), WINDOW))
    return ClusterSplits(found["counts"], found["sizes"], windows, BadRecords(policy, **found["bad"]))


def publish_index(build: Build, copies: np.ndarray) -> None:
    """Put the index of the training records beside their split, once. copies: bool, one for each record in a split."""
    directory, target = build.scratch / DIRECTORY, build.paths["arrow"] / SPLITS[0] / DIRECTORY
    if build.done("indexed") is None:
        labels = without_copies(np.load(directory / "labels.npy", mmap_mode="r"), copies, directory / "kept.npy")
        (directory / "index").mkdir(exist_ok=True)
        clusters = write_index(Buckets(directory / "joined"), labels, directory / "index", directory)
        build.note("indexed", clusters)
    build.results["train_clusters"] = build.done("indexed")
    logger.info("%s clusters of training records", f"{build.results['train_clusters']:,}")
    if not target.exists():
        (directory / "index").rename(target)


def _make(
    directory: Path,
    files: list[Path],
    table: Path,
    draw: Callable,
    seed: int,
    bad: BadRecords,
    read: Callable[[Path], Iterator[pa.RecordBatch]],
    names_of: Callable,
) -> dict:
    shutil.rmtree(directory, ignore_errors=True)
    counts = []

    def batches() -> Iterator[pa.RecordBatch]:
        for path in files:
            counts.append(0)
            for rows in read(path):
                counts[-1] += rows.num_rows
                yield rows

    joined = join(map(hash_names, names_of(batches())), read_table(table), seed, directory)
    if 2 * joined.missing > joined.buckets.rows:  # with each record a cluster of its own, relatives would be split
        raise UserError(
            f"--cluster_table {table}: names only {joined.buckets.rows - joined.missing:,} of the "
            f"{joined.buckets.rows:,} records: is it the table of these proteins, and its columns the right way round "
            "(cluster, then member)?"
        )
    labels = draw(joined.buckets)
    return {
        "boot": boot_id(),
        "counts": counts,
        "sizes": [int((labels == split).sum()) for split in range(len(SPLITS))],
        "bad": bad.state,
        "repeated": joined.repeated,
        "missing": joined.missing,
    }


def _ids(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
    return (without_prefix(rows.column("id")) for rows in batches)


# ---- the table ----------------------------------------------------------------------------------------------


def read_table(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Hashes of the clusters' names and of the members' names, uint64 [n] each, block by block."""
    check_file(path, f"--cluster_table {path}")
    with open(path, "rb") as file:
        magic = file.read(4)
    row = 1
    try:
        for clusters, members in _parquet_rows(path) if magic == b"PAR1" else _text_rows(path):
            for names in (clusters, members):
                if bad := np.flatnonzero(np.diff(characters(names)[1]) == 0).tolist():
                    raise UserError(f"--cluster_table {path}: row {row + bad[0]}: a name is empty: remove the row")
            yield hash_names(clusters), hash_names(without_prefix(members))
            row += len(members)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if STRADDLING in str(error):
            error = f"after row {row - 1:,} one of more than {BLOCK_BYTES:,} bytes"
        raise UserError(f"--cluster_table {path}: {one_line(error)[:200]}: fetch it again") from None


def without_prefix(names: pa.Array) -> pa.Array:
    """Names of members without `UniRef90_`, which one of table and records may have and the other not."""
    return pa.compute.replace_substring_regex(names, "^UniRef90_", "")


def hash_names(names: pa.Array) -> np.ndarray:
    """uint64 [n] of a string or binary array."""
    return hash_bytes(*characters(names))


def _parquet_rows(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    with pa.memory_map(str(path)) as raw, pa.parquet.ParquetFile(raw) as file:
        names = file.schema_arrow.names
        if not all(name in names for name in COLUMNS):
            raise UserError(f"--cluster_table {path}: its columns are {', '.join(names)}: {WANTED}")
        for group in range(file.num_row_groups):
            where = f"--cluster_table {path}: row group {group}"
            for batch in read_columns(raw, where, file.metadata, group, list(COLUMNS), WINDOW, BLOCK_BYTES):
                yield tuple(batch.column(name).cast(pa.binary()).fill_null(b"") for name in COLUMNS)


def _text_rows(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    with open_unpacked(path) as stream:
        first = stream.read(1 << 16).split(b"\n")[0].decode("utf-8", "replace").strip("\ufeff\r\n")
    delimiter = "\t" if "\t" in first else ","
    fields = [field.strip('"') for field in first.split(delimiter)]
    has_header = all(name in fields for name in COLUMNS)
    uniref = [field[:9] for field in fields] == ["UniRef50_", "UniRef90_"]
    mmseqs = len(fields) == 2 and fields[0] == fields[1] != ""  # a cluster's first member is the one it is named for
    if not (has_header or uniref or mmseqs):
        raise UserError(f"--cluster_table {path}: its first line is {first[:80]!r}: {WANTED}")
    with open_unpacked(path) as stream:
        read = pa.csv.ReadOptions(block_size=BLOCK_BYTES, column_names=None if has_header else COLUMNS)
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(COLUMNS, pa.binary()),
            include_columns=COLUMNS,
            strings_can_be_null=False,
        )
        options = pa.csv.ParseOptions(delimiter=delimiter)
        with pa.csv.open_csv(stream, read_options=read, convert_options=convert, parse_options=options) as reader:
            for batch in reader:
                yield tuple(batch.columns)
