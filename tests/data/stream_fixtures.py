"""Files of a few proteins, and what a plan of streams makes of them."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from common.models.esm2 import alphabet
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.streams import Stream, plan_streams

COUNT = 600
PACKED = {"seed": 3, "max_seq_length": 128, "tokens_per_pack": 512}
PADDED = {"seed": 3, "max_seq_length": 128, "sequences_per_pack": 4}


def proteins(count: int = COUNT, seed: int = 1) -> list[str]:
    generator = np.random.default_rng(seed)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    return ["".join(generator.choice(letters, generator.integers(5, 120))) for _ in range(count)]


def write(path, texts: list[str], column: str = "sequence", row_group: int = 50):
    """The proteins in the format that the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        table = pa.table({"id": [str(i) for i in range(len(texts))], column: texts})
        pa.parquet.write_table(table, path, row_group_size=row_group)
        return path
    if name.endswith(".arrow"):
        table = pa.table({"id": [str(i) for i in range(len(texts))], column: texts})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=row_group)
        return path
    if name.endswith(".jsonl"):
        text = "".join(json.dumps({"id": i, column: t}) + "\n" for i, t in enumerate(texts))
    elif name.endswith((".csv", ".tsv")):
        text = f"id,{column}\n" + "".join(f"{i},{t}\n" for i, t in enumerate(texts))
    else:
        text = "".join(f">{i} a protein\n{t}\n" for i, t in enumerate(texts))
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


def plan_of(path, packs_per_step: int = 4, **packing):
    return plan_streams(open_source(str(path), streaming=False).splits["train"], packs_per_step, **packing or PACKED)


def texts_of(ids: np.ndarray) -> list[str]:
    """The sequences of a pack that were not cropped, `<unk>` as `?`."""
    letters = dict(enumerate(alphabet.TOKENS)) | {alphabet.UNK: "?"} | dict.fromkeys((alphabet.CLS, alphabet.EOS), "")
    return ["".join(map(letters.get, part)) for part in np.split(ids, np.flatnonzero(ids == alphabet.CLS)[1:])]


def first_epoch(plan) -> list[str]:
    """All proteins of epoch 0, stream by stream."""
    found = []
    for index in range(plan.num_streams):
        for pack, ids, _ in Stream(plan, index):
            if pack.epoch > 0:
                break
            found += texts_of(ids)
    return found
