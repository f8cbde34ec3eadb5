"""The number of records of files: exact where that is cheap, else estimated within a few percent."""

from __future__ import annotations

import gzip

import pytest

from extras.prepare.sources import record_counts
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.record_counts import count_records
from tests.data.stream_fixtures import proteins, write


def counted(path) -> int:
    return count_records(open_source(str(path), streaming=False).splits["train"])


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv", "a.tsv.gz", "a.fasta", "a.fa.gz"])
def test_count_records_of_small_files_is_exact(tmp_path, name):
    texts = proteins(200)
    path = write(tmp_path / name, texts)
    if name == "a.tsv.gz":
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b",", b"\t")))
    assert counted(path) == 200


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv.gz", "a.fasta", "a.fa.gz"])
def test_count_records_estimates_large_files(tmp_path, monkeypatch, name):
    monkeypatch.setattr(record_counts, "HEAD_BYTES", 4_000_000)
    path = write(tmp_path / name, proteins(5_000) * 20)
    assert counted(path) == pytest.approx(100_000, rel=0.02)


@pytest.mark.parametrize(("head_bytes", "off"), [(16 << 20, 0), (60_000, 0.03)])
def test_count_records_of_many_files(tmp_path, monkeypatch, head_bytes, off):
    """Else some are looked at, and all count."""
    monkeypatch.setattr(record_counts, "HEAD_BYTES", head_bytes)
    for number in range(30):
        write(tmp_path / f"{number}.fasta", proteins(40 + number, seed=number))
        write(tmp_path / f"{number}.parquet", proteins(10))
    assert counted(tmp_path) == pytest.approx(300 + sum(range(40, 70)), rel=off)


def test_count_records_of_empty_file(tmp_path):
    (tmp_path / "a.csv").write_text("id,sequence\n")
    assert counted(tmp_path / "a.csv") == 0
