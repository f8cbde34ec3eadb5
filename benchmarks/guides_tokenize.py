"""The guides' way from CSV to Arrow, for benchmarks/data_pipeline.py to compare with.   guides_tokenize.py DIR OUT

`datasets.map` with transformers' EsmTokenizer, every record cut and padded to 512 tokens, one process a core, then
`save_to_disk`. Prints the seconds of the two, without imports and without reading the CSV files.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from datasets import load_dataset
from transformers import EsmTokenizer

from common.models.esm2.alphabet import TOKENS


def tokenize(source: str, target: str) -> float:
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
    print(f"\nseconds {tokenize(sys.argv[1], sys.argv[2]):.3f}")
