"""Tokenise text in parallel processes, unit by unit, to pieces (dataset_writer.py) for every split.

A unit is a file, or a row group of a parquet file. Its directory gets its final name when it is complete, and is noted
in the build's journal: after a kill, only the units in progress are read again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data.counter_rng import MEMBER, derive_key, hash_counters
from extras.families.text.tokenizers import Tokenizer, load_tokenizer, tokenize
from extras.prepare.dataset_writer import PieceWriters
from extras.prepare.output_directory import Build
from extras.prepare.sources.sequence_files import ROW_BITS, Unit, read_rows

DOCUMENTS_AT_ONCE = 512


def token_features(tokenizer: Tokenizer) -> dict:
    """The column of tokenised text: a list with 64-bit offsets, as 10,000 books may have more than 2^31 tokens."""
    return {"input_ids": {"feature": {"dtype": str(tokenizer.dtype), "_type": "Value"}, "_type": "LargeList"}}


@dataclass(frozen=True)
class UnitOfText:
    """A unit, and all that a process needs to tokenise it.

    number: of the unit; split: of its documents, except a share `held_out`, drawn by a hash of (seed, number, row),
    which goes to the split `validation`.
    """

    unit: Unit
    number: int
    split: str
    tokenizer: str
    revision: str | None
    seed: int
    held_out: float
    validation: str

    def make(self, tokenizer: Tokenizer, scratch: Path) -> dict:
        """Pieces by split name, and counts of documents, tokens and bytes of text."""
        writers = PieceWriters(scratch, f"unit-{self.number:06d}", token_features(tokenizer))
        counts = {"documents": 0, "tokens": 0, "bytes": 0}
        for split, texts in self._by_split():
            ids, bounds = tokenize(tokenizer, texts)
            bounds = bounds[np.append(True, np.diff(bounds) > 0)]  # empty documents are skipped
            lists = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(ids))
            writers[split].write(pa.RecordBatch.from_arrays([lists], schema=writers.schema))
            size = int(pc.sum(pc.binary_length(texts)).as_py() or 0)
            counts = dict(zip(counts, np.add([*counts.values()], [len(lists), len(ids), size]).tolist(), strict=True))
        return counts | {"pieces": writers.close()}

    def _by_split(self) -> Iterator[tuple[str, pa.Array]]:
        """Blocks of documents, by split."""
        row = 0
        for block in read_rows(self.unit, 0):
            for first in range(0, len(block), DOCUMENTS_AT_ONCE):
                texts = block[first : first + DOCUMENTS_AT_ONCE]
                records = (self.number << ROW_BITS) + row + np.arange(len(texts))
                row += len(texts)
                chosen = hash_counters(derive_key(self.seed, MEMBER), records) < np.uint64(self.held_out * 2**63) * 2
                for split, mask in ((self.split, ~chosen), (self.validation, chosen)):
                    if mask.any():
                        yield split, texts.filter(pa.array(mask))


def tokenize_units(units: list[UnitOfText], tokenizer: Tokenizer, build: Build, workers: int) -> Iterator[dict]:
    """The result of `UnitOfText.make` for every unit, in order; noted results are reused.

    workers: number of processes; 1: this process.
    """
    keys = [f"unit {unit.number}" for unit in units]
    missing = [number for number, key in enumerate(keys) if build.done(key) is None]
    workers = min(workers, len(missing))
    if workers <= 1:
        results = (units[number].make(tokenizer, build.scratch) for number in missing)
        yield from _in_turn(keys, missing, results, build)
        return
    # Spawned, not forked: this process has Arrow threads. Each worker opens the tokenizer.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _open, (units[0].tokenizer, units[0].revision)) as pool:
        running = {number: pool.submit(_make, units[number], build.scratch) for number in missing}
        try:
            yield from _in_turn(keys, missing, (running[number].result() for number in missing), build)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_turn(keys: list[str], missing: list[int], made: Iterator[dict], build: Build) -> Iterator[dict]:
    to_make = set(missing)
    for number, key in enumerate(keys):
        if number in to_make:
            build.note(key, next(made))
        yield build.done(key)


_opened: dict[str, Tokenizer] = {}  # of this process


def _open(name: str, revision: str | None) -> None:
    _opened["tokenizer"] = load_tokenizer(name, revision)[0]


def _make(unit: UnitOfText, scratch: Path) -> dict:
    return unit.make(_opened["tokenizer"], scratch)
