"""Step 1 with --cluster_table or --cluster: splits of whole clusters, and the index of each split's clusters.

The table (UniRef50 cluster, UniRef90 member) is parquet, or CSV or TSV, plain or compressed. With a header, columns
include `ur50_id` and `ur90_id`. Without one it has two columns, a UniRef50_... and a UniRef90_... name in each line.
With --cluster, MMseqs2 makes the table of the records' numbers, so that ids may be anything, and repeat.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from common.cli import UserError, log_every, one_line
from common.data.clusters import DIRECTORY, Clusters
from common.files.safe_files import sync, sync_directory
from extras.prepare.cluster_names import explain
from extras.prepare.output_directory import Build
from extras.prepare.sources.compression import STRADDLING, check_file, open_decompressed
from extras.prepare.sources.parquet_pages import read_columns
from extras.prepare.sources.records import characters, hash_names
from extras.prepare.splits import SPLITS, Buckets, Joined, draw_splits, join, without_copies, write_indices

logger = logging.getLogger(__name__)
WINDOW = 1 << 16
INDEXED = "indexed splits"  # in the journal
COLUMNS = ("ur50_id", "ur90_id")
BLOCK_BYTES = 4 << 20  # of a text file; longest row
MAX_MISSING = 0.1  # largest share of records that a table may lack: each is a cluster of its own
WANTED = (
    f"expected the columns {' and '.join(COLUMNS)}, or two columns UniRef50_... and UniRef90_... without a header, or "
    "the _cluster.tsv of mmseqs2"
)


class ClusterSplits(NamedTuple):
    """sizes: records of every split; labels: windows of uint8 (splits.py)."""

    sizes: tuple[int, ...]
    labels: Iterator[np.ndarray]


def split_by_clusters(
    build: Build,
    join_records: Callable[[Path], Joined],
    source: str,
    sizes_of: Callable[[int], tuple[int, int, int]],
    all_left: bool,
) -> ClusterSplits:
    """Group the records by their clusters and draw the splits, or read those that a killed run made.

    join_records: the records by cluster, in files below a directory (`by_table`, or `of_clusters`); source: of the
    clusters, for messages; sizes_of: number of records -> sizes of the splits; all_left: train takes all other
    records.
    """
    directory = build.scratch / DIRECTORY
    if (clustered := build.done("clustered")) is None:
        shutil.rmtree(directory, ignore_errors=True)
        joined = join_records(directory)
        records = joined.buckets.rows
        labels = draw_splits(joined.buckets, sizes_of(records), all_left, directory / "labels.npy")
        sizes = [int((labels == split).sum()) for split in range(len(SPLITS))]
        clustered = {"sizes": sizes, "repeated": joined.repeated, "missing": joined.missing}
        build.note("clustered", clustered)
    labels = np.load(directory / "labels.npy", mmap_mode="r")
    build.results["not_in_cluster_table"] = clustered["missing"]
    if clustered["missing"]:
        counted = (f"{clustered['missing']:,}", f"{len(labels):,}")
        logger.warning("%s of %s records are not in %s: each is a cluster of its own", *counted, source)
    if clustered["repeated"]:
        logger.warning(
            "%s: %s rows put a member into a second cluster: left out", source, f"{clustered['repeated']:,}"
        )
    windows = (np.asarray(labels[first : first + WINDOW]) for first in range(0, len(labels), WINDOW))
    return ClusterSplits(clustered["sizes"], windows)


def publish_indices(build: Build, copies: np.ndarray) -> None:
    """Move each split's index of clusters into its directory, once. copies: bool, one per record in a split."""
    directory = build.scratch / DIRECTORY
    paths = {split: directory / split for split in SPLITS}
    if build.done(INDEXED) is None:
        labels = without_copies(np.load(directory / "labels.npy", mmap_mode="r"), copies, directory / "kept.npy")
        for path in paths.values():
            path.mkdir(exist_ok=True)
        build.note(INDEXED, write_indices(Buckets(directory / "joined"), labels, list(paths.values()), directory))
    for split, path in paths.items():
        if not (target := build.paths["arrow"] / split / DIRECTORY).exists():
            path.rename(target)
        clusters = Clusters(target)
        largest = int(np.diff(clusters.offsets).max(initial=0))
        build.results |= {f"{split}_clusters": len(clusters), f"{split}_largest_cluster": largest}
        logger.info("%s: %s clusters, of up to %s proteins", split, f"{len(clusters):,}", f"{largest:,}")


# --- the table


def by_table(
    table: Path, ids: Callable[[], Iterator[pa.Array]], seed: int, by_number: bool = False
) -> Callable[[Path], Joined]:
    """For `split_by_clusters`. ids: of all records, block by block; by_number: the table has the records' numbers
    (`cluster_records`)."""

    def join_table(directory: Path) -> Joined:
        names = numbers(ids()) if by_number else map(without_prefix, ids())
        joined = join(map(hash_names, names), read_table(table), seed, directory)
        records = joined.buckets.rows
        if joined.missing > MAX_MISSING * records:  # single-record clusters would put relatives into different splits
            raise UserError(
                f"--cluster_table {table}: names only {records - joined.missing:,} of the {records:,} records: "
                f"{explain(ids(), read_names(table))}"
            )
        return joined

    return join_table


def read_table(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Hashes of the names of clusters and members, uint64 [n] each, block by block."""
    for clusters, members in read_names(path):
        yield hash_names(clusters), hash_names(without_prefix(members))


def read_names(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    """The names of clusters and members, block by block. UserError for a table that cannot be read."""
    check_file(path, f"--cluster_table {path}")
    with open(path, "rb") as file:
        magic = file.read(4)
    row = 1
    try:
        for clusters, members in _parquet_rows(path) if magic == b"PAR1" else _text_rows(path):
            for names in (clusters, members):
                if bad := np.flatnonzero(np.diff(characters(names)[1]) == 0).tolist():
                    raise UserError(f"--cluster_table {path}: row {row + bad[0]}: a name is empty: remove the row")
            yield clusters, members
            row += len(members)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if STRADDLING in str(error):
            error = f"after row {row - 1:,} one of more than {BLOCK_BYTES:,} bytes"
        raise UserError(f"--cluster_table {path}: {one_line(error)[:200]}: fetch it again") from None


def without_prefix(names: pa.Array) -> pa.Array:
    """Names of members without `UniRef90_`, which either the table or the records may lack."""
    return pc.replace_substring_regex(names, "^UniRef90_", "")


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
    with open_decompressed(path) as stream:
        first = stream.read(1 << 16).split(b"\n")[0].decode("utf-8", "replace").strip("\ufeff\r\n")
    delimiter = "\t" if "\t" in first else ","
    fields = [field.strip('"') for field in first.split(delimiter)]
    has_header = all(name in fields for name in COLUMNS)
    uniref = [field[:9] for field in fields] == ["UniRef50_", "UniRef90_"]
    mmseqs = len(fields) == 2 and fields[0] == fields[1] != ""  # a cluster has the name of its first member
    if not (has_header or uniref or mmseqs):
        raise UserError(f"--cluster_table {path}: its first line is {first[:80]!r}: {WANTED}")
    with open_decompressed(path) as stream:
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


PROGRAM = "mmseqs"
COVERAGE = 0.8  # of both sequences, as in UniRef50's clusters
PROTEINS = ("--dbtype", 1)  # MMseqs2 would guess, by the first ten records: all of A, C, G, N and T?
# Connected components of all pairs found. MMseqs2's default, greedy sets around representatives, left 842 of 8,000
# UniRef90 proteins with a relative in another set; these, 2 (docs/data.md). Clustering keeps 20 hits a protein, which
# could cut a large family: 300, as a search keeps. The sensitivity is MMseqs2's own for the identity: -s 7.5 took 7
# times as long and joined one pair of clusters more.
COMPONENTS = ("--cluster-mode", 1, "--single-step-clustering", 1, "--max-seqs", 300)
INSTALL = "apt-get install mmseqs2, conda install -c bioconda mmseqs2, or cluster elsewhere and give --cluster_table"


def mmseqs_version() -> str:
    """The version of MMseqs2. UserError if it is not installed."""
    if shutil.which(PROGRAM) is None:
        raise UserError(f"--cluster needs MMseqs2, and there is no {PROGRAM} on PATH: {INSTALL}")
    return subprocess.run([PROGRAM, "version"], capture_output=True, text=True, check=False).stdout.strip()


def cluster_records(
    build: Build, files: list[Path], read: Callable[[Path], Iterable[pa.RecordBatch]], identity: float, threads: int
) -> Path:
    """The table of clusters (representative, member: numbers of records) of all records, made once.

    identity: least identity in a cluster, over COVERAGE of both sequences; read: batches of `id` and `text`.
    """
    directory = build.scratch / PROGRAM
    table = directory / "clusters_cluster.tsv"
    if (version := build.done(PROGRAM)) is not None:
        build.results["mmseqs"] = version
        return table
    version = mmseqs_version()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    fasta = directory / "records.fasta"
    records = write_numbered(fasta, (rows for path in files for rows in read(path)))
    logger.info("Clustering %s records at %g identity with MMseqs2 %s", f"{records:,}", identity, version)
    command = [PROGRAM, "easy-cluster", fasta, directory / "clusters", directory / "work", *PROTEINS]
    command += ["--min-seq-id", identity, "-c", COVERAGE, "--cov-mode", 0, *COMPONENTS, "--threads", threads]
    with log_every("Clustering"):
        run_mmseqs(command, directory / "log", "--cluster")
    shutil.rmtree(directory / "work", ignore_errors=True)
    for left in (fasta, directory / "clusters_all_seqs.fasta", directory / "clusters_rep_seq.fasta"):
        left.unlink(missing_ok=True)
    with open(table, "rb") as file:
        sync(file)
    sync_directory(directory)
    build.results["mmseqs"] = version
    build.note(PROGRAM, version)
    return table


def write_numbered(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Write texts as FASTA with the names 0, 1, ...; other characters than letters become X. Returns their number."""
    count = 0
    with open(path, "w", encoding="ascii") as file:
        for rows in batches:
            texts = pc.replace_substring_regex(rows.column("text"), "[^A-Za-z]", "X")
            file.writelines(f">{n}\n{text}\n" for n, text in enumerate(texts.to_pylist(), count))
            count += rows.num_rows
    return count


def numbers(blocks: Iterable[pa.Array]) -> Iterator[pa.Array]:
    """The names of `write_numbered`, block by block."""
    count = 0
    for block in blocks:
        yield pa.array(range(count, count + len(block))).cast(pa.string())
        count += len(block)


def run_mmseqs(command: Sequence[str | float | Path], log: Path, purpose: str) -> None:
    """Run it to its end. UserError, which begins with `purpose`, has the last lines of what it said."""
    with open(log, "wb") as out:
        # A new session, so that all of MMseqs2's child processes can be killed with it.
        child = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    if status != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        lines = [line for line in lines if line and not line.startswith(("references:", "- "))]  # citations
        first = next((n for n, line in enumerate(lines) if line.startswith("Error")), len(lines))
        last = "; ".join(lines[max(0, first - 1) :])  # the line before often has the cause
        raise UserError(f"{purpose}: {command[0]} {command[1]} ended with status {status}: {last[-300:]}")
