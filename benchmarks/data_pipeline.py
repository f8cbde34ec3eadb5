"""How fast the data steps are, beside the guides' way of doing them: same input, same run, a fresh process each.

    pip install pyfastx
    python -m benchmarks.data_pipeline [--fasta proteins.fasta.gz] [--output table.md]

Inputs of 0.2 and 2 million records are made by repeating real ones under new ids, with four residues changed so that
no two are equal. Time is the whole process from start to end, so it includes unpacking, imports and flushing to the
disk (ours); memory is the peak of the resident set. Rounds are interleaved and the median is reported.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from benchmarks.measuring import ROOT, publish, say, where_measured
from common.cli import UserError, run
from common.flags import flag, parse_arguments
from extras.prepare.sample import write_sample
from extras.prepare.sources.fasta import read_fasta

SUBSET = 16_000
GUIDES = [sys.executable, "-m", "benchmarks.guides"]
REAL_SAMPLE = ROOT.parent / "shared/data/uniref90_sample_8k.fasta.gz"


@dataclass
class BenchmarkArguments:
    fasta: str | None = flag(None, "FASTA file whose records are repeated (default: the real sample, or a generated)")
    records: list[int] = field(
        default_factory=lambda: [200_000, 2_000_000], metadata={"help": "sizes of the inputs to measure"}
    )
    rounds: int = flag(3, "Measure everything so many times and report the median.")
    work_dir: str | None = flag(None, "For inputs and outputs, some GB; default: the system's temporary directory.")
    output: str | None = flag(None, "Also write the table to this file.")


@dataclass
class Case:
    """One way to do a step. `command` writes to `output`, which must not exist before; the first case of a step is
    ours, the second the one it is compared with."""

    what: str
    command: list[str]
    output: Path
    records: int | None = None  # where not those of the step
    bytes: int = 0  # of the output


@dataclass
class Step:
    """A row of cases for one input."""

    title: str
    records: int
    cases: list[Case]
    seconds: list[list[float]] = field(default_factory=list)  # [round][case]
    peak_mb: list[list[float]] = field(default_factory=list)


def fasta_to_csv(fasta: Path, records: int, work: Path) -> Step:
    ours, guides = work / "ours", work / "guides"
    script = str(ROOT / "0.download_data.py")
    cases = [
        Case(
            "`0.download_data.py`, one shuffle over all records",
            [sys.executable, script, "--source", str(fasta), "--output_dir", str(ours)],
            ours,
        ),
        Case(
            "pyfastx and the csv module, shuffled within 500,000 records",
            [*GUIDES, "csv", str(fasta), str(guides)],
            guides,
        ),
    ]
    return Step("FASTA.gz to CSV", records, cases)


def csv_to_arrow(fasta: Path, records: int, work: Path) -> Step:
    """From the CSV files of step 0. The guides' method gets the first SUBSET records, for it is slow."""
    made, subset = work / f"csv-{records}", work / f"subset-{records}"
    source = ["--source", str(fasta), "--output_dir", str(made)]
    subprocess.run([sys.executable, str(ROOT / "0.download_data.py"), *source], check=True, capture_output=True)
    subset.mkdir()
    with open(made / "csv/x000.csv") as lines, open(subset / "x000.csv", "w") as some:
        some.writelines(islice(lines, SUBSET + 1))
    ours, guides = work / "ours", work / "guides"
    script = str(ROOT / "1.tokenize_uniref_csv.py")
    cases = [
        Case(
            "`1.tokenize_uniref_csv.py`",
            [sys.executable, script, "--input_dir", str(made / "csv"), "--output_dir", str(ours)],
            ours,
        ),
        Case(
            "`datasets.map`, EsmTokenizer, padded to 512; without imports",
            [*GUIDES, "arrow", str(subset), str(guides)],
            guides,
            records=min(SUBSET, records),
        ),
    ]
    return Step("CSV to Arrow", records, cases)


STEPS: list[Callable[[Path, int, Path], Step]] = [fasta_to_csv, csv_to_arrow]


def make_input(fasta: Path, records: int, path: Path) -> None:
    """Write `records` records: those of `fasta` again and again, each time with new ids and beginnings."""
    sample = list(read_fasta(fasta))
    with gzip.open(path, "wb", compresslevel=6) as file:
        for begin in range(0, records, len(sample)):
            some = sample[: records - begin]
            prefix = bytes(b"ACDEFGHIKLMNPQRSTVWY"[begin // len(sample) // 20**place % 20] for place in range(4))
            file.write(b"".join(b">%s_%d\n%s\n" % (name, begin, wrapped(prefix + text[4:])) for name, text in some))


def in_a_process(function: Callable, *arguments) -> None:
    """So that this process stays small: the peak memory of its children counts from its own."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise UserError(f"{function.__name__} failed, see above")


def wrapped(text: bytes) -> bytes:
    """In lines of 60, as UniProt has them."""
    return b"\n".join(text[i : i + 60] for i in range(0, len(text), 60))


def measure(case: Case) -> tuple[float, float]:
    """(seconds, peak memory in MB) of one run in a fresh process; its output is removed."""
    with open(case.output.with_suffix(".log"), "w") as log:
        started = time.perf_counter()
        process = subprocess.Popen(case.command, stdout=log, stderr=log, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    case.bytes = sum(path.stat().st_size for path in case.output.rglob("*") if path.is_file())
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{case.what}: {case.output.with_suffix('.log').read_text().strip().splitlines()[-1]}")
    shutil.rmtree(case.output)
    if timed := re.search(r"^seconds ([\d.]+)$", case.output.with_suffix(".log").read_text(), re.MULTILINE):
        seconds = float(timed[1])  # the method has left its imports out, in its own favour
    return seconds, usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def table(steps: list[Step], rounds: int) -> Iterator[str]:
    hardware, command = where_measured("benchmarks.data_pipeline", "pyarrow", "isal", "pyfastx")
    yield f"{hardware}\n\n{command}, median of {rounds} rounds. Ratio: records a second against the guides' method.\n"
    yield "| step | records | method | seconds | records/s | ratio | peak memory, MB |"
    yield "|---|---|---|---|---|---|---|"
    for step in steps:
        seconds = [statistics.median(times) for times in zip(*step.seconds, strict=True)]
        peaks = [max(peaks) for peaks in zip(*step.peak_mb, strict=True)]
        counts = [case.records or step.records for case in step.cases]
        rates = [count / took for count, took in zip(counts, seconds, strict=True)]
        for case, count, took, rate, peak in zip(step.cases, counts, seconds, rates, peaks, strict=True):
            yield (
                f"| {step.title} | {count:,} | {case.what} | {took:.1f} | {rate:,.0f} "
                f"| {rate / rates[1]:.1f} | {peak:,.0f} |"
            )
    yield from at_scale(steps)


def at_scale(steps: list[Step]) -> Iterator[str]:
    """What CSV to Arrow comes to for all of UniRef50, from the largest input."""
    step = max((step for step in steps if step.title == "CSV to Arrow"), key=lambda step: step.records)
    yield "\n69 million records, CSV to Arrow, extrapolated from the records a second a core to 8 cores:\n"
    yield "| method | records/s a core | minutes | bytes a record | GB |"
    yield "|---|---|---|---|---|"
    for number, case in enumerate(step.cases):
        count = case.records or step.records
        rate = count / statistics.median(times[number] for times in step.seconds) / os.cpu_count()
        size = case.bytes / count
        yield f"| {case.what} | {rate:,.0f} | {69e6 / rate / 8 / 60:,.1f} | {size:,.0f} | {69e6 * size / 1e9:.1f} |"
    yield "\nThe guides' own figures for 10 million records on 8 cores: 57 minutes, 30.8 GB (3,080 bytes a record)."


def sample_of(fasta: str | None, work: Path) -> Path:
    """The records that inputs are made of: those given, real ones if they lie beside the checkout, or generated."""
    sample = Path(fasta) if fasta else REAL_SAMPLE
    if not fasta and not sample.exists():
        sample = work / "sample.fasta.gz"
        write_sample(sample, num_proteins=8000)
    return sample


def main() -> None:
    args = parse_arguments(__doc__, BenchmarkArguments)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as directory:
        work = Path(directory)
        sample = sample_of(args.fasta, work)
        steps = []
        for records in args.records:
            in_a_process(make_input, sample, records, work / f"{records}.fasta.gz")
            steps += [make(work / f"{records}.fasta.gz", records, work) for make in STEPS]
        for number in range(args.rounds):
            for step in steps:
                measured = [measure(case) for case in step.cases]
                step.seconds.append([seconds for seconds, _ in measured])
                step.peak_mb.append([peak for _, peak in measured])
            say(f"round {number + 1} of {args.rounds} done")
        lines = list(table(steps, args.rounds))
    publish("\n".join(["# Data pipeline", "", *lines]), args.output)


if __name__ == "__main__":
    run(main)
