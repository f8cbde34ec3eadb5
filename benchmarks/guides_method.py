"""The guides' way from FASTA to CSV, for benchmarks/data_pipeline.py to compare with.   guides_method.py fasta.gz DIR

pyfastx iterates over the file, each 500,000 records are shuffled among themselves, the csv module writes them. Without
pyfastx's index, which takes it longer. Needs `pip install pyfastx`.
"""

from __future__ import annotations

import csv
import random
import sys
from pathlib import Path

RECORDS = 500_000


def fasta_to_csv(source: str, directory: Path) -> None:
    import pyfastx

    directory.mkdir(parents=True)
    generator = random.Random(42)
    records, number = [], 0
    for name, sequence in pyfastx.Fasta(source, build_index=False):
        records.append((name, sequence))
        if len(records) == RECORDS:
            write(records, directory / f"x{number:03d}.csv", generator)
            records, number = [], number + 1
    if records:
        write(records, directory / f"x{number:03d}.csv", generator)


def write(records: list[tuple[str, str]], path: Path, generator: random.Random) -> None:
    generator.shuffle(records)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "text"))
        writer.writerows(records)


if __name__ == "__main__":
    fasta_to_csv(sys.argv[1], Path(sys.argv[2]))
