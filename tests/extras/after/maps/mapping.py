"""What the tests of map.py share: the script, called, and embeddings that are made up, as embed.py writes them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.files.content_hash import content_hash
from extras.after.inference.encoder import part_path
from tests.data_fixtures import call, load_script

MAP = load_script("map.py")


def mapped(embeddings: Path, out: Path, *flags) -> dict:
    call(MAP, "--embeddings", embeddings, "--output_dir", out, *flags)
    return json.loads((out / "results.json").read_text())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def groups(count: int, each: int, hidden: int = 12, spread: float = 0.2, seed: int = 0) -> np.ndarray:
    """float32 [count * each, hidden]: groups around directions at right angles, one after the other."""
    noise = np.random.default_rng(seed).normal(size=(count * each, hidden)) * spread
    return (np.repeat(np.eye(hidden)[:count], each, 0) + noise).astype(np.float32)


def write_embeddings(
    directory: Path,
    vectors: np.ndarray,
    ids: list[str] | None = None,
    model: str = "m",
    words: list[str] | None = None,
) -> Path:
    """Tables of 50 proteins each, and DIRECTORY.fasta; words: its descriptions."""
    ids = ids or [f"P{number}" for number in range(len(vectors))]
    headers = [f"{name} {text}" for name, text in zip(ids, words or [""] * len(ids), strict=True)]
    fasta = directory.with_suffix(".fasta")
    fasta.write_text("".join(f">{header}\n{'MKV' * (1 + n % 9)}\n" for n, header in enumerate(headers)))
    facts = {"model_hash": model, "fasta_hash": content_hash(str(fasta)), "settings": '{"proteins_per_part": 50}'}
    (directory / "embeddings").mkdir(parents=True)
    for number, begin in enumerate(range(0, len(ids), 50)):
        part = vectors[begin : begin + 50]
        columns = {
            "id": ids[begin : begin + 50],
            "length": [3 * (1 + n % 9) for n in range(begin, begin + len(part))],
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), part.shape[1]),
        }
        pq.write_table(pa.table(columns).replace_schema_metadata(facts), part_path(directory / "embeddings", number))
    return directory
