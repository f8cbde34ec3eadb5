"""Steps 0 and 1 on every input format: CPU time of one pass to Arrow, beside two steps through CSV and `datasets.map`.

    python -m benchmarks.prepare_inputs [--fasta proteins.fasta.gz] [--records 200000] [--output table.md]

Inputs are real or generated records under new ids (benchmarks/data_pipeline.py), with a cluster of four each where the
format has columns. CPU time is user and system time of the whole process, less that of one that prepares a hundred
records, so that imports do not count. The readers alone are measured in this process, beside pyarrow's own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq

from benchmarks.data_pipeline import GUIDES, SUBSET, in_a_process, make_input, sample_of
from benchmarks.measuring import ROOT, publish, say, where_measured
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments
from extras.prepare.sources.protein_records import RecordFlags, read_records

FORMATS = ("fasta.gz", "csv", "tsv", "jsonl", "parquet", "feather", "plain.parquet")  # the last without clusters
FEW = 100


@dataclass
class BenchmarkArguments(Flags):
    fasta: str | None = flag(None, "FASTA file whose records are repeated (default: the real sample, or a generated)")
    records: int = flag(200_000, "records of the input")
    rounds: int = flag(3, "Measure everything so many times and report the median.")
    work_dir: str | None = flag(None, "For inputs and outputs, some GB; default: the system's temporary directory.")
    before: str | None = flag(None, "A checkout of an earlier version, whose steps 0 and 1 are measured in turns.")
    guides: bool = flag(True, "Also measure datasets.map, on a part of the records.")
    output: str | None = flag(None, "Also write the table to this file.")


def read(path: Path) -> Iterator[pa.RecordBatch]:
    flags = RecordFlags()
    return read_records(path, flags.cleaner(path), flags)


def write_formats(fasta: Path, directory: Path) -> None:
    """The records of a FASTA file in the other formats, as proteins.FORMAT, each in a directory of its own."""
    table = pa.Table.from_batches(read(fasta))
    clusters = pa.array([f"C{number // 4}" for number in range(len(table))])
    table = table.rename_columns(["ur90_id", "sequence"]).add_column(0, "ur50_id", clusters)
    paths = {name: directory / name / f"proteins.{name}" for name in FORMATS}
    for path in paths.values():
        path.parent.mkdir()
    paths["fasta.gz"].symlink_to(fasta)
    pq.write_table(table, paths["parquet"], row_group_size=20_000)
    pq.write_table(table.drop_columns("ur50_id"), paths["plain.parquet"], row_group_size=20_000)
    pyarrow.feather.write_feather(table, paths["feather"])
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        options = pa.csv.WriteOptions(delimiter=delimiter, quoting_style="none")
        pa.csv.write_csv(table, paths[name], options)
    with open(paths["jsonl"], "w") as file:
        for row in zip(*(column.to_pylist() for column in table.columns), strict=True):
            file.write(json.dumps(dict(zip(table.column_names, row, strict=True))) + "\n")


def cpu_seconds(*commands: list[str], root: Path = ROOT) -> float:
    """User and system time of commands, one after the other, in a checkout."""
    total = 0.0
    for command in commands:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=root, text=True)
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise UserError(f"{' '.join(command[1:4])}: {said.strip().splitlines()[-1]}")
        total += usage.ru_utime + usage.ru_stime
    return total


def one_pass(source: Path, scratch: Path) -> float:
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        return cpu_seconds(step_1("--source", str(source), out))


def two_steps(source: Path, scratch: Path, root: Path = ROOT, of_both: bool = True) -> float:
    """of_both: not of step 1 alone."""
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        step_0 = [sys.executable, "0.download_data.py", "--source", str(source), "--output_dir", out]
        before = cpu_seconds(step_0, root=root)
        return cpu_seconds(step_1("--input_dir", f"{out}/csv", out), root=root) + of_both * before


def step_1(flag: str, given: str, out: str) -> list[str]:
    command = [sys.executable, "1.tokenize_uniref_csv.py", flag, given, "--output_dir", f"{out}/processed"]
    return [*command, "--count_relatives", "False"]


def datasets_map(source: Path, scratch: Path) -> float:
    """The guides' way on the first SUBSET records."""
    with tempfile.TemporaryDirectory(dir=scratch) as out:
        part = Path(out) / "part/proteins.csv"
        part.parent.mkdir()
        with open(part, "w") as file:
            file.write("id,text\n")
            rows = (row for batch in read(source) for row in zip(*batch.columns[:2], strict=True))
            file.writelines(f"{name},{text}\n" for name, text in islice(rows, SUBSET))
        return cpu_seconds([*GUIDES, "arrow", str(part.parent), f"{out}/made"])


def reading(read_all: Callable[[], object]) -> float:
    """CPU seconds of all threads of this process."""
    began = time.process_time()
    read_all()
    return time.process_time() - began


def pyarrow_reading(path: Path) -> Callable[[], object]:
    one_thread = pa.csv.ReadOptions(use_threads=False)
    if path.suffix == ".csv":
        return lambda: sum(batch.num_rows for batch in pa.csv.open_csv(path, one_thread))
    return lambda: sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches(4096, use_threads=False))


def passes(full: Path, few: Path, scratch: Path, args: BenchmarkArguments) -> dict[str, list[float]]:
    """CPU seconds of each way, by round, less those of FEW records."""
    ways: dict[str, Callable[[Path], float]] = {
        f"{name}, one pass": lambda root, name=name: one_pass(root / name / f"proteins.{name}", scratch)
        for name in FORMATS
    }
    for name in ("fasta.gz", "parquet"):
        ways[f"{name}, steps 0 and 1"] = lambda root, name=name: two_steps(root / name / f"proteins.{name}", scratch)
    if args.before:
        root = Path(args.before)
        gz = lambda of, both: two_steps(of / "fasta.gz/proteins.fasta.gz", scratch, root, both)  # noqa: E731
        ways["csv, step 1 of --before"] = lambda of: gz(of, False)
        ways["fasta.gz, steps 0 and 1 of --before"] = lambda of: gz(of, True)
    if args.guides:
        ways["`datasets.map`, padded to 512"] = lambda root: datasets_map(root / "parquet/proteins.parquet", scratch)
    taken: dict[str, list[float]] = {what: [] for what in ways}
    for number in range(args.rounds):
        for what, way in ways.items():
            taken[what].append(way(full) - way(few))
        say(f"round {number + 1} of {args.rounds} done")
    return taken


def table(args: BenchmarkArguments, full: Path, few: Path, scratch: Path) -> Iterator[str]:
    sources = {name: full / name / f"proteins.{name}" for name in FORMATS}
    megabytes = sum(batch.column("text").nbytes for batch in read(sources["parquet"])) / 1e6
    medians = {what: statistics.median(times) for what, times in passes(full, few, scratch, args).items()}
    hardware, command = where_measured("benchmarks.prepare_inputs", "pyarrow", "isal")
    yield f"{hardware}\n\n{command}, median of {args.rounds} rounds, {args.records:,} records.\n"
    yield "| input | CPU, s | MB of sequence a CPU second | beside FASTA.gz in two steps |"
    yield "|---|---|---|---|"
    rates = {
        what: (megabytes * min(1, SUBSET / args.records) if "map" in what else megabytes) / cpu
        for what, cpu in medians.items()
    }
    for what, rate in rates.items():
        yield f"| {what} | {medians[what]:.2f} | {rate:.1f} | {rate / rates['fasta.gz, steps 0 and 1']:.2f} |"
    yield "\n| reader alone | CPU, s | beside pyarrow's |\n|---|---|---|"
    for name in ("csv", "parquet"):
        ours, theirs = (
            statistics.median(reading(way) for _ in range(2 * args.rounds + 1))
            for way in (lambda path=sources[name]: sum(1 for _ in read(path)), pyarrow_reading(sources[name]))
        )
        yield f"| {name} | {ours:.2f} | {theirs / ours:.2f} |"


def main() -> None:
    args = parse_arguments(__doc__, BenchmarkArguments)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as directory:
        work = Path(directory)
        sample = sample_of(args.fasta, work)
        for name, records in (("full", args.records), ("few", FEW)):
            (work / name).mkdir()
            in_a_process(make_input, sample, records, work / f"{name}.fasta.gz")
            write_formats(work / f"{name}.fasta.gz", work / name)
        lines = list(table(args, work / "full", work / "few", work))
    publish("\n".join(["# Inputs of steps 0 and 1", "", *lines]), args.output)


if __name__ == "__main__":
    run(main)
