"""Datasets too large to look through: what a process needs for one, and the samples that stand for the whole."""

from __future__ import annotations

import datasets
import numpy as np
import pyarrow as pa
import pytest

from benchmarks import open_dataset
from common.data.token_store import TokenStore
from common.models.esm2.alphabet import ESM2_TOKENS
from common.training import baselines
from extras.prepare.dataset_writer import TOKEN_FEATURES, DatasetWriter


def test_open_dataset_private_memory_is_small(tmp_path, monkeypatch):
    """In a process of its own; a few MB, as at 69 million records (benchmarks/open_dataset.py)."""
    monkeypatch.setattr(open_dataset, "RECORDS_PER_SHARD", 40_000)
    open_dataset.make_dataset(tmp_path, 95_000)
    rows = datasets.load_from_disk(str(tmp_path / "train"))
    store = TokenStore(tmp_path / "train", ESM2_TOKENS)
    assert len(rows) == len(store) == 95_000
    some = np.array([0, 39_999, 40_000, 94_999])
    assert [len(rows[int(i)]["input_ids"]) for i in some] == store.lengths(some).tolist()
    sizes = [path.stat() for path in (tmp_path / "train").glob("*.arrow")]
    assert sum(size.st_blocks * 512 for size in sizes) < 0.1 * sum(size.st_size for size in sizes)

    arguments = open_dataset.BenchmarkArguments(records=95_000)
    names = ["first batch, by clusters"]
    found = list(open_dataset.measure_all(tmp_path, arguments, names))
    assert [name for name, _, _ in found] == names
    assert 0 < found[0][2] < 64e6
    for measurement in open_dataset.MEASUREMENTS.values():
        measurement(tmp_path, arguments)


def test_frequencies_of_large_store_are_of_a_sample(tmp_path, monkeypatch):
    """The kinds of residue change along the store: the sample is from all over it."""
    writer = DatasetWriter(tmp_path, TOKEN_FEATURES)
    for part in range(20):
        tokens = [[0, 4 + part, 4 + part, 2]] * 1000
        columns = [pa.array(["P"] * 1000), pa.array(tokens, pa.list_(pa.uint8()))]
        writer.write(pa.record_batch(columns, schema=writer.schema))
    writer.close()
    store = TokenStore(tmp_path, ESM2_TOKENS)
    asked = []

    def frequencies() -> np.ndarray:
        return np.exp(baselines.Baselines(store, ESM2_TOKENS).neighbours.log_frequencies)

    gather = store.gather
    store.gather = lambda records, *where: asked.append(records) or gather(records, *where)
    whole = frequencies()
    assert np.array_equal(np.concatenate(asked), np.arange(20_000))
    monkeypatch.setattr(baselines, "SAMPLE", 4000)
    monkeypatch.setattr(baselines, "RUN", 100)
    asked.clear()
    assert frequencies() == pytest.approx(whole, abs=0.03)  # 40 runs, 2 of each kind
    assert len(asked) == 40
    assert all((np.diff(records) == 1).all() for records in asked)
    assert min(map(np.min, asked)) == 0
    assert max(map(np.max, asked)) == 19_999
