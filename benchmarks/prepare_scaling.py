"""Whether the cost of step 1 grows linearly: CPU time and bytes a record at 1, 10 and 100 million, on one core.

    python -m benchmarks.prepare_scaling [--records 1000000 10000000 100000000] [--output table.md]

Rows `copies` and `clusters` are the searches over all records, on generated keys: exact copies among them; and the
join with a table of clusters, the draw of splits and the indices. Rows `shard` and `merge` are step 1 itself, as
`--shard 0/1` and `--merge 1`, on generated proteins of 330 residues on average, up to --most_proteins of them. Bytes
are what the process asks the system for, cached or not. Each row is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import runpy
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.measuring import ROOT, measured_afresh, publish, say, where_measured
from common.cli import run
from common.flags import flag, parse_arguments
from extras.prepare.duplicates import find_copies
from extras.prepare.encode import KEY
from extras.prepare.splits import draw_splits, join, write_indices

ROWS = ("copies", "clusters", "shard", "merge")
FILES = 10
BLOCK = 1 << 20
RESIDUES = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY", np.uint8)
WANTED = 3_300_000_000  # records, of the largest collection of proteins that has been trained on (Dayhoff)
CORES = 16  # of a node, in the sum


@dataclass
class Arguments:
    records: list[int] = field(
        default_factory=lambda: [10**6, 10**7, 10**8], metadata={"help": "numbers of records to measure"}
    )
    most_proteins: int = flag(4_000_000, "Step 1 itself is measured up to so many records.")
    work_dir: str | None = flag(None, "For keys and outputs, some 10 GB; default: the system's temporary directory.")
    worker: str | None = flag(None, "Measure one row in this process, ROW:RECORDS:DIRECTORY.")
    output: str | None = flag(None, "Also write the table to this file.")


def blocks(records: int):
    """(numbers of the first and the last record, generator) of parts of the records."""
    for first in range(0, records, BLOCK):
        yield first, min(first + BLOCK, records), np.random.default_rng(first)


def write_keys(directory: Path, records: int) -> list[Path]:
    """Files of KEY: a hundredth are copies, a thousandth is held out."""
    path = directory / "keys"
    with open(path, "wb") as file:
        for first, last, rng in blocks(records):
            keys = np.zeros(last - first, KEY)
            keys["hash"] = rng.integers(0, (1 << 64) - 1, last - first, dtype=np.uint64)
            keys["hash"][rng.integers(0, last - first, (last - first) // 100)] = keys["hash"][0]
            keys["split"] = rng.random(last - first) < 0.001
            keys.tofile(file)
    return [path]


def write_proteins(directory: Path, records: int) -> None:
    for number, part in enumerate(np.array_split(np.arange(records), FILES)):
        rng = np.random.default_rng(number)
        with open(directory / f"x{number:03d}.csv", "wb") as file:
            file.write(b"id,text\n")
            for some in np.array_split(part, max(1, len(part) // 10_000)):
                lengths = np.clip(rng.gamma(2.0, 165.0, len(some)).astype(int), 10, 5000)
                text = RESIDUES[rng.integers(0, 20, lengths.sum())].tobytes()
                ends = np.cumsum(lengths)
                rows = zip(some.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True)
                file.write(b"".join(b"P%d,%b\n" % (name, text[begin:end]) for name, begin, end in rows))


def search_clusters(directory: Path, records: int) -> None:
    """Clusters of three on average, half of the members named by the table in another order."""
    names = (rng.integers(0, (1 << 64) - 1, last - first, dtype=np.uint64) for first, last, rng in blocks(records))

    def table():
        for _, _, rng in blocks(records):
            members = rng.integers(0, (1 << 64) - 1, BLOCK, dtype=np.uint64)
            yield rng.integers(0, max(1, records // 3), len(members), dtype=np.uint64), members

    joined = join(names, table(), 0, directory)
    labels = draw_splits(joined.buckets, (records - 2000, 1000, 1000), True, directory / "labels.npy")
    splits = [directory / name for name in ("train", "validation", "test")]
    for split in splits:
        split.mkdir()
    write_indices(joined.buckets, labels, splits, directory)


def step_1(directory: Path, *flags: str) -> None:
    said = ["--input_dir", directory / "csv", "--output_dir", directory / "out", "--preprocessing_num_workers", 1]
    sys.argv = [str(word) for word in ("1.tokenize_uniref_csv.py", *said, "--count_relatives", "False", *flags)]
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(SystemExit):
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")


def measure(worker: str) -> dict:
    row, number, where = worker.split(":")
    records, directory = int(number), Path(where)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    files = write_keys(directory, records) if row == "copies" else []
    if row == "shard":
        (directory / "csv").mkdir()
        write_proteins(directory / "csv", records)
    before, read, written = resource.getrusage(resource.RUSAGE_SELF), *transferred()
    if row == "copies":
        find_copies(files, directory / "copies.npy")
    elif row == "clusters":
        search_clusters(directory, records)
    else:
        step_1(directory, *(("--shard", "0/1") if row == "shard" else ("--merge", "1")))
    after, read_after, written_after = resource.getrusage(resource.RUSAGE_SELF), *transferred()
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "cpu": seconds,
        "read": read_after - read,
        "written": written_after - written,
        "peak": after.ru_maxrss / 1e3,
    }


def transferred() -> tuple[int, int]:
    """Bytes that this process has read and written."""
    said = Path("/proc/self/io").read_text()
    return tuple(int(re.search(rf"{name}: (\d+)", said)[1]) for name in ("rchar", "wchar"))


def table(args: Arguments) -> str:
    results = {}
    for records in args.records:
        with tempfile.TemporaryDirectory(dir=args.work_dir) as directory:
            for row in ROWS:
                if row in ("shard", "merge") and records > args.most_proteins:
                    continue
                job = f"{row}:{records}:{directory}"
                results[row, records] = measured_afresh("benchmarks.prepare_scaling", {"worker": job}, os.environ, job)
                say(f"{row} {records:,}: {results[row, records]}")
                for left in Path(directory).iterdir():
                    if row != "shard":
                        shutil.rmtree(left) if left.is_dir() else left.unlink()
    lines = ["# What step 1 costs a record", "", *where_measured("benchmarks.prepare_scaling", "numpy", "pyarrow"), ""]
    lines += [
        "| | records | CPU, us a record | read, bytes a record | written | peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    for (row, records), found in results.items():
        per = {name: found[name] / records for name in ("cpu", "read", "written")}
        cells = f"{1e6 * per['cpu']:.3f} | {per['read']:.0f} | {per['written']:.0f} | {found['peak']:.0f}"
        lines.append(f"| {row} | {records:,} | {cells} |")
    return "\n".join([*lines, "", *the_sum(results)])


def the_sum(results: dict) -> list[str]:
    """What WANTED records take, from the largest measured number of each row."""
    lines = [f"{WANTED:,} records, by the largest measured number of each row (`merge` has its `copies` in it):", ""]
    lines += ["| | CPU hours | read, TB | written, TB | hours at 2 GB/s |", "|---|---|---|---|---|"]
    hours = {}
    for row, records in sorted(results, key=lambda each: each[1]):
        each = {key: value / records * WANTED for key, value in results[row, records].items()}
        hours[row] = each["cpu"] / 3600
        read, written = each["read"] / 1e12, each["written"] / 1e12
        cells = f"{hours[row]:.1f} | {read:.1f} | {written:.1f} | {(read + written) / 2e-3 / 3600:.1f}"
        lines = [line for line in lines if not line.startswith(f"| {row} ")] + [f"| {row} | {cells} |"]
    if {"shard", "merge"} <= hours.keys():
        lines.append("")
        for nodes in (1, 32):
            minutes = 60 * hours["shard"] / (nodes * CORES)
            shards = f"{hours['shard']:.1f} h / {nodes * CORES} = {minutes:.1f} minutes for the shards"
            merge = f"{hours['merge']:.1f} h for the merge on one core, if the file system keeps up"
            lines.append(f"{nodes} x {CORES} cores: {shards}, {merge}.")
    return lines


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    if args.worker:
        print(json.dumps(measure(args.worker)))
    else:
        publish(table(args), args.output)


if __name__ == "__main__":
    run(main)
