"""Cluster proteins with MMseqs2 as a job of its own, to a table for step 1's --cluster_table.

    python -m extras.prepare.cluster_mmseqs --input_dir DIR/csv --output_dir DIR/clusters [--method linclust]

DIR/clusters/table/clusters.parquet has the columns ur50_id and ur90_id: a number for each cluster, and the records'
ids.
`cluster` finds what step 1's --cluster does, by comparing all with all; `linclust` takes time that grows with the
records alone, and misses many relatives. Killed, the same command goes on with the steps that MMseqs2 has finished.
Versions, flags and numbers are in DIR/clusters/table/.complete.json.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.lib.format import open_memmap

from common.cli import UserError, log_every, run
from common.files.content_hash import combined_hash
from common.flags import flag, parse_arguments
from extras.prepare.cluster_splits import (
    COMPONENTS,
    COVERAGE,
    PROGRAM,
    PROTEINS,
    mmseqs_version,
    run_mmseqs,
    write_numbered,
)
from extras.prepare.cluster_table import SCHEMA
from extras.prepare.encode import usable_threads
from extras.prepare.fetch import directory_sources
from extras.prepare.output_directory import Build, building, refuse_inputs
from extras.prepare.sources.protein_records import RecordFlags, all_columns, read_records

logger = logging.getLogger(__name__)
Method = Literal["cluster", "linclust"]
# Connected components of the pairs that each finds; see COMPONENTS.
METHODS: dict[str, tuple[str | int, ...]] = {"cluster": COMPONENTS, "linclust": ("--cluster-mode", 1)}


@dataclass
class Arguments(RecordFlags):
    input_dir: str = flag("csv", "the --input_dir of step 1")
    output_dir: str = flag("clusters", "the table goes to OUTPUT_DIR/table/clusters.parquet")
    identity: float = flag(0.5, "least identity of two proteins, over 80 % of both")
    method: Method = flag(
        "cluster", "all with all, or in linear time with many relatives missed", choices=get_args(Method)
    )
    threads: int = flag(8, "of MMseqs2")
    split_memory_limit: str = flag("0", "memory that MMseqs2 splits its work for, as 64G; 0: all that the machine has")
    mpi_runner: str | None = flag(
        None, "command that starts MMseqs2 on several nodes, as 'mpirun -np 4', if it has MPI"
    )
    overwrite: bool = flag(False, "replace an existing table")
    verify: bool = flag(False, "read a complete output and compare its checksums")

    def check(self) -> None:
        if not 0 < self.identity <= 1:
            raise UserError(f"--identity {self.identity}: above 0 and up to 1, as 0.5")
        self.require_at_least(1, "threads")


def describe(args: Arguments, files: list[Path]) -> dict:
    return {
        "input": {"files": len(files), "content": combined_hash(files)},
        "identity": args.identity,
        "coverage": COVERAGE,
        "method": args.method,
        "mmseqs_flags": METHODS[args.method],
        "on_bad_record": args.on_bad_record,
    } | args.changing


def batches_of(args: Arguments, files: list[Path]) -> Iterator[pa.RecordBatch]:
    for path in files:
        yield from read_records(path, args.cleaner(path), args, False)


def make_database(args: Arguments, files: list[Path], build: Build) -> int:
    """The records as a database of MMseqs2, named by their numbers; once. Returns how many there are."""
    if (records := build.done("records")) is None:
        fasta = build.scratch / "records.fasta"
        records = write_numbered(fasta, batches_of(args, files))
        command = [PROGRAM, "createdb", fasta, build.scratch / "records", *PROTEINS]
        run_mmseqs(command, build.scratch / "log", "createdb")
        fasta.unlink()
        build.note("records", records)
    return records


def find_clusters(args: Arguments, build: Build) -> None:
    """Run MMseqs2, which keeps finished steps in its directory `work`."""
    scratch = build.scratch
    command = [PROGRAM, args.method, scratch / "records", scratch / "found", scratch / "work"]
    command += ["--min-seq-id", args.identity, "-c", COVERAGE, "--cov-mode", 0, *METHODS[args.method]]
    command += ["--threads", usable_threads(args.threads), "--split-memory-limit", args.split_memory_limit]
    command += ["--mpi-runner", args.mpi_runner] if args.mpi_runner else []
    build.results["command"] = shlex.join(map(str, command[:2] + command[5:]))
    logger.info("%s (its log: %s)", shlex.join(map(str, command)), scratch / "log")
    resumed = (scratch / "work").exists()
    _run(command, scratch, again=resumed)
    tsv = [PROGRAM, "createtsv", scratch / "records", scratch / "records", scratch / "found", scratch / "found.tsv"]
    run_mmseqs(tsv, scratch / "log", "createtsv")


def _run(command: list, scratch: Path, again: bool) -> None:
    """again: if it fails, once more without what a killed run left, of which a step may be cut short."""
    for left in scratch.glob("found*"):  # MMseqs2 ends when its result is there
        left.unlink()
    try:
        with log_every("Clustering"):
            run_mmseqs(command, scratch / "log", "--method " + str(command[1]))
    except UserError as error:
        if not again:
            raise
        logger.warning("%s: starting anew, without the steps of the stopped run", error)
        shutil.rmtree(scratch / "work")
        _run(command, scratch, again=False)


def write_table(args: Arguments, files: list[Path], records: int, build: Build) -> None:
    """The ids of all records beside the number of the record that represents their cluster."""
    cluster_of = open_memmap(build.scratch / "cluster_of.npy", "w+", np.int64, (records,))
    cluster_of[:] = -1
    names = pa.csv.ReadOptions(column_names=["cluster", "member"])
    with pa.csv.open_csv(build.scratch / "found.tsv", names, pa.csv.ParseOptions(delimiter="\t")) as reader:
        for batch in reader:
            cluster_of[batch.column("member").to_numpy()] = batch.column("cluster").to_numpy()
    if len(unnamed := np.flatnonzero(cluster_of < 0)):
        logger.warning("%s records are in no cluster of MMseqs2: each is one of its own", f"{len(unnamed):,}")
        cluster_of[unnamed] = unnamed
    first = 0
    with pa.parquet.ParquetWriter(build.paths["table"] / "clusters.parquet", SCHEMA, compression="zstd") as writer:
        for rows in batches_of(args, files):
            numbers = pa.array(cluster_of[first : first + rows.num_rows]).cast(pa.string())
            writer.write_batch(
                pa.RecordBatch.from_arrays([numbers, rows.column("id").cast(pa.string())], schema=SCHEMA)
            )
            first += rows.num_rows
    sizes = np.bincount(cluster_of)
    build.results |= {"records": records, "clusters": int((sizes > 0).sum()), "largest_cluster": int(sizes.max())}
    build.results["clusters_of_one"] = int((sizes == 1).sum())


def main() -> None:
    args = parse_arguments(__doc__, Arguments, program="python -m extras.prepare.cluster_mmseqs")
    version = mmseqs_version()
    refuse_inputs(Path(args.output_dir), {"--input_dir": args.input_dir})
    files = [source.path for source in directory_sources(args.input_dir, args.content)]
    all_columns(files, args)
    with building(Path(args.output_dir), ["table"], describe(args, files), args.overwrite, args.verify) as build:
        if not build.paths:
            return
        build.results["mmseqs"] = version
        records = make_database(args, files, build)
        find_clusters(args, build)
        write_table(args, files, records, build)
        counts = (f"{build.results[name]:,}" for name in ("records", "clusters", "clusters_of_one", "largest_cluster"))
        logger.info("%s records in %s clusters, %s of them of one; the largest has %s", *counts)


if __name__ == "__main__":
    run(main, resumable=True)
