"""1.tokenize_uniref_csv.py and what it stands on: token ids, splits, the Arrow directory, blocks and workers."""

import bz2
import csv
import gzip
import itertools
import json
import lzma
import math
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import List, Value
from transformers import EsmTokenizer

from common.cli import UserError
from common.models.esm2.alphabet import PAD, TOKENS, UNK, encode
from extras.prepare import splits, tokenize_proteins
from extras.prepare.dataset_writer import ROWS_PER_BATCH, TOKEN_FEATURES, DatasetWriter
from extras.prepare.encode import encode_rows, in_order
from extras.prepare.sample import write_sample
from extras.prepare.sources.csv_records import count_rows, read_rows
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.splits import split_labels, split_sizes
from tests.data_fixtures import (
    DOWNLOAD,
    REAL_SAMPLE,
    TOKENIZE,
    call,
    everything_in,
    load,
    needs_real_sample,
    proteins,
    write_csv,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "vocab.txt").write_text("\n".join(TOKENS))
    return EsmTokenizer(str(directory / "vocab.txt"))


# --- token ids


def ids_equal_the_tokenizers(source, tmp_path, tokenizer):
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--max_records_per_partition", 3000)
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "processed")
    found = dict(itertools.chain(*load(tmp_path / "processed").values()))
    records = [(name.decode(), sequence.decode().upper()) for name, sequence in read_fasta(source)]
    assert len(found) == len(records)
    some = records[:: max(1, len(records) // 2000)]  # transformers' tokenizer is a hundred times as slow
    expected = tokenizer([sequence for _, sequence in some])["input_ids"]
    assert all(list(found[name]) == ids for (name, _), ids in zip(some, expected, strict=True))


@needs_real_sample
def test_tokenize_ids_equal_transformers_on_the_real_sample(tmp_path, tokenizer):
    ids_equal_the_tokenizers(REAL_SAMPLE, tmp_path, tokenizer)


def test_tokenize_ids_equal_transformers_on_a_generated_sample(tmp_path, tokenizer):
    write_sample(tmp_path / "s.fasta", num_proteins=300)
    ids_equal_the_tokenizers(tmp_path / "s.fasta", tmp_path, tokenizer)


def test_tokenize_every_token_lower_case_and_unknown(tmp_path, caplog):
    rows = [("all", "LAGVSERTIDPKQNFYMHWCXBUZO.-"), ("lower", "mkvla"), ("odd", "M*K1V?J" + "LA" * 20)]
    write_csv(tmp_path / "csv", rows)
    with caplog.at_level("INFO"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path, "--gaps", "keep")
    found = dict(itertools.chain(*load(tmp_path).values()))
    assert list(found["all"]) == [0, *range(4, 31), 2]
    assert list(found["lower"]) == encode("MKVLA").tolist()
    assert list(found["odd"]) == [0, 20, UNK, 15, UNK, 7, UNK, UNK, *([4, 5] * 20), 2]
    assert "4 characters in 1 records are not residues: <unk> (row 3)" in caplog.text


@pytest.mark.parametrize("length", [3, 10, 50])
def test_tokenize_truncates_and_pads_as_transformers(tmp_path, tokenizer, length):
    rows = proteins(200)
    write_csv(tmp_path / "csv", rows)
    flags = ("--input_dir", tmp_path / "csv", "--max_seq_length", length)
    call(TOKENIZE, *flags, "--output_dir", tmp_path / "cut")
    call(TOKENIZE, *flags, "--output_dir", tmp_path / "padded", "--pad_to_max_length", "True")
    names, texts = zip(*rows, strict=True)
    for out, pad in (("cut", False), ("padded", "max_length")):
        expected = tokenizer(list(texts), truncation=True, max_length=length, padding=pad)["input_ids"]
        found = dict(itertools.chain(*load(tmp_path / out).values()))
        assert [list(found[name]) for name in names] == expected


@pytest.mark.parametrize("flags", [(), ("--max_seq_length", 64), ("--max_seq_length", 64, "--pad_to_max_length")])
def test_tokenize_chunks(tmp_path, flags):
    rows = proteins(300)
    write_csv(tmp_path / "csv", rows)
    sizes = ("--validation_size", 0.1, "--test_size", 0)
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "lines", *sizes)
    call(
        TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "chunks", "--line_by_line", "False",
        *sizes, *flags,
    )  # fmt: skip
    length = 64 if flags else 1024
    lines, chunks = load(tmp_path / "lines"), load(tmp_path / "chunks")
    for split in ("train", "validation"):
        tokens = list(itertools.chain(*(ids for _, ids in lines[split])))
        found = list(itertools.chain(*(ids for _, ids in chunks[split])))
        padding = -len(tokens) % length if "--pad_to_max_length" in flags else 0
        assert found == tokens + [PAD] * padding
        assert [name for name, _ in chunks[split]] == [f"chunk-{i}" for i in range(-(-len(tokens) // length))]
        assert {len(ids) for _, ids in chunks[split][:-1]} <= {length}
    assert chunks["test"] == []


# --- splits


def test_tokenize_splits_are_disjoint_complete_and_in_order(tmp_path):
    rows = proteins(1000)
    write_csv(tmp_path / "csv", rows[:600], "x999.csv")
    write_csv(tmp_path / "csv", rows[600:], "x1000.csv")  # comes after x999
    sizes = ("--validation_size", 50, "--test_size", "0.03")
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "a", *sizes)
    found = load(tmp_path / "a")
    assert {split: len(part) for split, part in found.items()} == {"train": 920, "validation": 50, "test": 30}
    names = {split: [name for name, _ in part] for split, part in found.items()}
    assert sorted(itertools.chain(*names.values())) == sorted(name for name, _ in rows)
    for part in names.values():
        assert part == sorted(part, key=lambda name: int(name[1:]))
    texts = dict(rows)
    assert all(list(ids) == encode(texts[name]).tolist() for name, ids in itertools.chain(*found.values()))

    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "b", *sizes, "--seed", 1)
    assert [name for name, _ in load(tmp_path / "b")["validation"]] != names["validation"]
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "c", *sizes, "--train_size", 300)
    smaller = load(tmp_path / "c")
    assert {split: len(part) for split, part in smaller.items()} == {"train": 300, "validation": 50, "test": 30}
    assert len({name for part in smaller.values() for name, _ in part}) == 380


@pytest.mark.parametrize("size", ["0", "0.0"])
def test_tokenize_empty_split_opens(tmp_path, size):
    write_csv(tmp_path / "csv", proteins(20))
    flags = ("--validation_size", size, "--test_size", size)
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path, *flags)
    found = datasets.load_from_disk(str(tmp_path / "arrow"))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 20, "validation": 0, "test": 0}
    assert len(datasets.load_from_disk(str(tmp_path / "arrow/test"))) == 0


@pytest.mark.parametrize(
    ("records", "asked", "expected", "warns"),
    [
        (69_000_000, (10_000_000, 50_000, 50_000), (10_000_000, 50_000, 50_000), False),
        (69_000_000, (None, 50_000, 50_000), (68_900_000, 50_000, 50_000), False),
        (8000, (None, 50_000, 50_000), (7200, 400, 400), True),
        (8000, (None, 0.2, 0.3), (4000, 1600, 2400), False),  # fractions at their word
        (8000, (None, 0.5, 0.5), (1, 4000, 3999), True),
        (8000, (10_000_000, 50_000, 50_000), (7922, 39, 39), True),
        (8000, (7999, 1, 0), (7999, 1, 0), False),
        (8000, (0.5, 0.1, 100), (4000, 800, 100), False),
        (3, (None, 50_000, 50_000), (1, 1, 1), True),
        (3, (10_000_000, 50_000, 50_000), (1, 1, 1), True),
        (3, (None, 0, 0), (3, 0, 0), False),
        (100, (None, 1e-6, 0), (99, 1, 0), False),
        (100, (10_000, 1, 1), (98, 1, 1), True),
        (100, (0, 50, 50), (0, 50, 50), False),
        # Given sizes are used exactly, and defaults share the rest.
        (2000, (100, None, None), (100, 950, 950), False),
        (2000, (0.9, None, None), (1800, 100, 100), False),
        (69_000_000, (100, None, None), (100, 50_000, 50_000), False),
        (69_000_000, (None, None, None), (68_900_000, 50_000, 50_000), False),
        (8000, (None, None, None), (7200, 400, 400), False),
        (8000, (None, 1000, None), (6600, 1000, 400), False),
        (8000, (None, 500, 7000), (500, 500, 7000), False),
        (8000, (None, None, 0), (7600, 400, 0), False),
        (8000, (7000, 500, None), (7000, 500, 500), False),
        (8000, (8000, None, None), (7200, 400, 400), True),
        (8000, (10_000_000, None, 100), (7599, 400, 1), True),
        (3, (None, None, None), (1, 1, 1), False),
    ],
)
def test_split_sizes(caplog, records, asked, expected, warns):
    found = split_sizes(records, *asked)
    assert sum(found) <= records
    if expected[1:] == (4000, 3999):  # all but one record
        assert found[0] == 1
        assert sum(found) == 8000
    else:
        assert found == expected
    assert ("scaled down" in caplog.text) == warns


@pytest.mark.parametrize(
    "asked", [(None, -1, 5), (None, 1.5, 5), (-0.5, 5, 5), (None, math.nan, 5), (math.inf, 5, 5), (0, 0, 0)]
)
def test_split_sizes_refuses_invalid_sizes(asked):
    with pytest.raises(UserError, match="_size"):
        split_sizes(100, *asked)


def test_split_labels_are_uniform(monkeypatch):
    """Windows far smaller than the input: position tells nothing about the split, and the counts are exact."""
    monkeypatch.setattr(splits, "WINDOW", 7)
    drawn = np.stack([np.concatenate(list(split_labels(30, (20, 4, 3), seed))) for seed in range(3000)])
    for label, count in enumerate((20, 4, 3, 3)):
        assert ((drawn == label).sum(axis=1) == count).all()
        expected = 3000 * count / 30
        chi_square = (((drawn == label).sum(axis=0) - expected) ** 2 / (expected * (1 - count / 30))).sum()
        assert chi_square < 65  # about 29 degrees of freedom, standard deviation 7.6
    together = (drawn[:, 0] == 1) & (drawn[:, 1] == 1)  # neighbours: without replacement, else independent
    assert together.mean() == pytest.approx(4 / 30 * 3 / 29, abs=0.006)


# --- the Arrow directory


def test_tokenize_output_opens_in_datasets(tmp_path):
    write_csv(tmp_path / "csv", proteins(100))
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path)
    loaded = datasets.load_from_disk(str(tmp_path / "arrow"))
    assert list(loaded) == ["train", "validation", "test"]
    train = datasets.load_from_disk(str(tmp_path / "arrow/train"))
    assert train.features == {"id": Value("string"), "input_ids": List(Value("uint8"))}
    assert train.data.schema.field("input_ids").type == pa.list_(pa.uint8())
    assert train._fingerprint != loaded["test"]._fingerprint
    assert train.select(range(5)).map(lambda row: {"n": len(row["input_ids"])}, load_from_cache_file=False)["n"] == [
        len(ids) for ids in train[:5]["input_ids"]
    ]
    train.save_to_disk(str(tmp_path / "again"))
    for name in ("state.json", "dataset_info.json"):  # the same keys and types as `datasets` writes
        ours, theirs = (
            json.loads((path / name).read_text()) for path in (tmp_path / "arrow/train", tmp_path / "again")
        )
        assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}


def test_dataset_writer_shards_and_record_batches(tmp_path):
    ids = [f"P{i}" for i in range(35_000)]
    tokens = [[0, 5 + i % 20, 2] for i in range(35_000)]
    writer = DatasetWriter(tmp_path, TOKEN_FEATURES, shard_bytes=500_000)
    for begin in range(0, 35_000, 777):
        part = slice(begin, begin + 777)
        columns = [pa.array(ids[part]), pa.array(tokens[part], pa.list_(pa.uint8()))]
        writer.write(pa.RecordBatch.from_arrays(columns, schema=writer.schema))
    writer.close()
    shards = sorted(tmp_path.glob("*.arrow"))
    assert [path.name for path in shards] == [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    assert len(shards) == 2
    assert sum(size for _, _, size in writer.ended) == sum(path.stat().st_size for path in shards)
    rows = [batch.num_rows for path in shards for batch in pa.ipc.open_stream(path.read_bytes())]
    assert rows == [ROWS_PER_BATCH] * 3 + [5000]
    loaded = datasets.load_from_disk(str(tmp_path))
    assert loaded["id"][:] == ids
    assert loaded["input_ids"][:] == tokens


@pytest.mark.parametrize("partitions", [1, 5])
def test_tokenize_bytes_are_independent_of_workers(tmp_path, monkeypatch, partitions):
    rows = proteins(3000)
    rows[2000:] = [(name, text) for (name, _), (_, text) in zip(rows[2000:], rows, strict=False)]  # copies
    for i in range(partitions):
        write_csv(tmp_path / "csv", rows[i::partitions], f"x{i:03d}.csv")
    monkeypatch.setattr("extras.prepare.sources.csv_records.BLOCK_BYTES", 2000)
    monkeypatch.setattr(tokenize_proteins, "usable_threads", lambda asked: asked)  # even on one processor
    for workers in (1, 8):
        flags = ("--preprocessing_num_workers", workers, "--output_dir", tmp_path / str(workers))
        call(TOKENIZE, "--input_dir", tmp_path / "csv", *flags)
    assert everything_in(tmp_path / "1") == everything_in(tmp_path / "8")


def test_in_order_holds_few_results():
    taken = []

    def items():
        for i in range(40):
            taken.append(i)
            yield i

    def slow_at_first(i):
        time.sleep(0.02 if i % 5 == 0 else 0)
        return i

    for i, result in enumerate(in_order(slow_at_first, items(), 3)):
        assert result == i
        assert len(taken) <= i + 8
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda i: 1 // i, [1, 0, 1], 2))


@pytest.mark.parametrize("block_bytes", [100, 1000, 1 << 20])
def test_read_rows_is_independent_of_blocks(tmp_path, monkeypatch, block_bytes):
    """Nor on whether the parser read them or the short cut for plain lines, which ends at the first other one."""
    rows = [*proteins(100), ("with,comma", "MK"), ('quo"te', "NAN"), ("null", "NULLA"), ("émile", "MK"), ("", "MK")]
    write_csv(tmp_path / "csv", rows)
    for name in ("BLOCK_BYTES", "PARSED_BYTES"):
        monkeypatch.setattr(f"extras.prepare.sources.csv_records.{name}", block_bytes)
    found = [tuple(row.values()) for batch in read_rows(tmp_path / "csv/x000.csv") for row in batch.to_pylist()]
    assert found == rows
    assert count_rows(tmp_path / "csv/x000.csv") == len(rows)


@pytest.mark.parametrize("odd", ["a,MK\r\n", "\n", '"a",MK\n', "é,MK\n", 'a,"M\nK"\n', '"a""b",MK\n', ",MK\n"])
@pytest.mark.parametrize("place", [0, 1, 37, 100])
@pytest.mark.parametrize("end", ["", "\n"])
def test_read_rows_equals_the_csv_module(tmp_path, monkeypatch, odd, place, end):
    monkeypatch.setattr("extras.prepare.sources.csv_records.BLOCK_BYTES", 500)
    lines = [f"{name},{text}\n" for name, text in proteins(100)]
    lines.insert(place, odd)
    path = tmp_path / "x.csv"
    path.write_bytes(("id,text\n" + "".join(lines).rstrip("\n") + end).encode())
    with open(path, newline="", encoding="utf-8") as file:
        expected = [(name, text.replace("\n", "")) for name, text in filter(None, csv.reader(file))][1:]
    found = [tuple(row.values()) for batch in read_rows(path, line_ends=True) for row in batch.to_pylist()]
    assert found == expected
    assert count_rows(path, line_ends=True) == len(expected)


def test_read_rows_fast_path_gives_the_same_bytes(tmp_path):
    rows = proteins(1000)
    write_csv(tmp_path / "plain", rows)
    (tmp_path / "quoted").mkdir()
    quoted = (tmp_path / "plain/x000.csv").read_text().replace("P0,", '"P0",')
    (tmp_path / "quoted/x000.csv").write_text(quoted)
    for name in ("plain", "quoted"):
        call(TOKENIZE, "--input_dir", tmp_path / name, "--output_dir", tmp_path / name)
        (tmp_path / name / "arrow/.complete.json").unlink()  # the inputs differ
    assert everything_in(tmp_path / "plain/arrow") == everything_in(tmp_path / "quoted/arrow")


@pytest.mark.parametrize("quote", [False, True])
def test_read_rows_cleans_texts_as_fasta(tmp_path, quote):
    """Whether by the short cut for plain lines or by the parser."""
    titin = "".join(text for _, text in proteins(2000))[:35_000]
    assert len(titin) == 35_000
    rows = [
        ("titin", titin),
        ("twice", "MKV"),
        ("twice", "MKVLA*"),
        ("twice", "MKV"),
        ("odd", " mk v*L1* **".replace("k", "k" + "L" * 20)),
        ("x", "*M " + "LAGVSERTI"),
    ]
    write_csv(tmp_path / "csv", rows)
    if quote:
        text = (tmp_path / "csv/x000.csv").read_text()
        (tmp_path / "csv/x000.csv").write_text(text.replace("odd,", '"odd",').replace("v*L", "v\t*L"))
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path)
    found = sorted(itertools.chain(*load(tmp_path).values()))
    kept = [(name, text.replace(" ", "").rstrip("*")) for name, text in rows]
    assert found == sorted((name, encode(text).tolist()) for name, text in kept)
    assert dict(found)["odd"] == [0, 20, 15, *([4] * 20), 7, UNK, 4, UNK, 2]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_tokenize_detects_compression_by_content(tmp_path, pack):
    write_csv(tmp_path / "plain", proteins(500))
    (tmp_path / "packed").mkdir()
    content = (tmp_path / "plain/x000.csv").read_bytes()
    for number, part in enumerate((content, content.replace(b"P0,", b'"P0",'))):
        (tmp_path / "packed/x000.csv").write_bytes(pack(part))
        for name in ("plain", "packed"):
            call(TOKENIZE, "--input_dir", tmp_path / name, "--output_dir", tmp_path / f"{name}{number}")
        assert load(tmp_path / f"packed{number}") == load(tmp_path / f"plain{number}")
    (tmp_path / "packed/x000.csv").rename(tmp_path / "packed/x000.csv.gz")
    call(TOKENIZE, "--input_dir", tmp_path / "packed", "--output_dir", tmp_path / "named")
    assert load(tmp_path / "named") == load(tmp_path / "plain0")


def test_tokenize_accepts_other_columns_and_orders(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"text",cluster,"id"\r\nMK,1,"a"\r\n\r\nLA,2,b\r\n')
    found = [row for batch in read_rows(tmp_path / "a.csv") for row in batch.to_pylist()]
    assert found == [{"id": "a", "text": "MK", "cluster": "1"}, {"id": "b", "text": "LA", "cluster": "2"}]


def test_encode_rows_of_a_slice():
    rows = pa.RecordBatch.from_pydict({"id": ["a", "b", "c", "d"], "text": ["MKV", "L1", "*", "AG"]}).slice(1, 2)
    encoded = encode_rows(rows, None, pad=False)
    assert encoded.rows.to_pylist() == [{"id": "b", "input_ids": [0, 4, 3, 2]}, {"id": "c", "input_ids": [0, 3, 2]}]
    assert (encoded.tokens, encoded.unknown, encoded.records_with_unknown) == (7, 2, 2)
    assert encode_rows(rows.slice(0, 0), None, pad=False).rows.num_rows == 0
