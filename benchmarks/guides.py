"""The guides' data steps, for benchmarks/data_pipeline.py to compare with.

    guides.py csv FASTA.gz DIR    pyfastx iterates over the file, each 500,000 records are shuffled among themselves,
                                  the csv module writes them; without pyfastx's index, which takes it longer
    guides.py arrow DIR OUT       `datasets.map` with transformers' EsmTokenizer, every record cut and padded to 512
                                  tokens, one process a core, then `save_to_disk`; prints the seconds of the two,
                                  without imports and without reading the CSV files

The first needs `pip install pyfastx`.
"""

from __future__ import annotations

import csv
import os
import random
import sys
import tempfile
import time
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


def csv_to_arrow(source: str, target: str) -> float:
    from datasets import load_dataset
    from transformers import EsmTokenizer

    from common.models.esm2.alphabet import TOKENS

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "vocab.txt").write_text("\n".join(TOKENS))
        tokenizer = EsmTokenizer(f"{scratch}/vocab.txt", model_max_length=1024)
        files = [str(path) for path in sorted(Path(source).glob("*.csv"))]
        dataset = load_dataset("csv", data_files=files, split="train", cache_dir=f"{scratch}/cache")

        def encode(rows: dict) -> dict:
            return tokenizer(
                rows["text"], padding="max_length", truncation=True, max_length=512, return_special_tokens_mask=True
            )

        started = time.perf_counter()
        columns = dataset.column_names
        encoded = dataset.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=columns)
        encoded.save_to_disk(target, num_proc=os.cpu_count())
        return time.perf_counter() - started


if __name__ == "__main__":
    step, source, target = sys.argv[1:]
    if step == "csv":
        fasta_to_csv(source, Path(target))
    else:
        print(f"\nseconds {csv_to_arrow(source, target):.3f}")
