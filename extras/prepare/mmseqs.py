"""Step 1 with --cluster: MMseqs2 makes the table that --cluster_table would have been given.

Records go to it under their numbers, so that ids may be anything, and be there twice.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute

from common.cli import UserError
from common.files.json_files import sync, sync_directory
from common.heartbeat import log_every
from extras.prepare.output_directory import Build

logger = logging.getLogger(__name__)
PROGRAM = "mmseqs"
COVERAGE = 0.8  # of both sequences, as in UniRef50's clusters
INSTALL = "apt-get install mmseqs2, conda install -c bioconda mmseqs2, or cluster elsewhere and give --cluster_table"


def mmseqs_version() -> str:
    """What the program calls itself. UserError where there is none."""
    if shutil.which(PROGRAM) is None:
        raise UserError(f"--cluster needs MMseqs2, and there is no {PROGRAM} on PATH: {INSTALL}")
    return subprocess.run([PROGRAM, "version"], capture_output=True, text=True, check=False).stdout.strip()


def cluster_records(
    build: Build, files: list[Path], read: Callable[[Path], Iterable[pa.RecordBatch]], identity: float, threads: int
) -> Path:
    """The table of clusters (representative, member: numbers of records) of all the files' records, made once.

    identity: of two sequences of a cluster, over COVERAGE of both; read: a file's batches of `id` and `text`.
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
    command = [PROGRAM, "easy-cluster", fasta, directory / "clusters", directory / "work"]
    command += ["--min-seq-id", identity, "-c", COVERAGE, "--cov-mode", 0, "--threads", threads]
    with log_every("Clustering"):
        _run([str(word) for word in command], directory / "log")
    shutil.rmtree(directory / "work", ignore_errors=True)
    for left in (fasta, directory / "clusters_all_seqs.fasta", directory / "clusters_rep_seq.fasta"):
        left.unlink(missing_ok=True)
    with open(table, "rb") as made:
        sync(made)
    sync_directory(directory)
    build.results["mmseqs"] = version
    build.note(PROGRAM, version)
    return table


def write_numbered(path: Path, batches: Iterable[pa.RecordBatch]) -> int:
    """Write texts as FASTA under the numbers 0, 1, ...; what is no letter becomes X, any residue. Returns how many."""
    count = 0
    with open(path, "w", encoding="ascii") as file:
        for rows in batches:
            texts = pa.compute.replace_substring_regex(rows.column("text"), "[^A-Za-z]", "X")
            file.writelines(f">{n}\n{text}\n" for n, text in enumerate(texts.to_pylist(), count))
            count += rows.num_rows
    return count


def numbers(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Array]:
    """The names that `write_numbered` gives, batch by batch."""
    count = 0
    for rows in batches:
        yield pa.array(range(count, count + rows.num_rows)).cast(pa.string())
        count += rows.num_rows


def _run(command: list[str], log: Path) -> None:
    with open(log, "wb") as out:
        # A session of its own: it is a tree of programs, which ends with us, all of it.
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    if status != 0:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
        said = [line for line in said if line and not line.startswith(("references:", "- "))]  # to cite
        first = next((n for n, line in enumerate(said) if line.startswith("Error")), len(said))
        last = "; ".join(said[max(0, first - 1) :])  # the line before has the cause, as often as not
        raise UserError(f"--cluster: {command[0]} {command[1]} ended with status {status}: {last[-300:]}")
