"""1.tokenize_uniref_csv.py and what it stands on: token ids, splits, the Arrow directory, restarts, bad input."""

import csv
import itertools
import json
import re
import shutil
import signal
import subprocess
import time

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import List, Value
from transformers import EsmTokenizer

from common import csv_records, encode_files, shards, splits
from common.alphabet import PAD, TOKENS, UNK, encode
from common.bad_records import BadRecords
from common.cli import UserError
from common.csv_records import count_rows, csv_files, read_rows
from common.encode_records import encode_rows, in_order
from common.fasta import read_fasta
from common.sample import write_sample
from common.splits import split_labels, split_sizes
from common.token_writer import ROWS_PER_BATCH, TOKEN_FEATURES, DatasetWriter
from tests.data_fixtures import (
    DOWNLOAD,
    REAL_SAMPLE,
    TOKENIZE,
    call,
    command,
    environment,
    everything_in,
    expect_error,
    needs_real_sample,
)
from tests.killed_runs import run_killed_at
from tests.small_disk import small_disk

SCRIPT = "1.tokenize_uniref_csv.py"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "vocab.txt").write_text("\n".join(TOKENS))
    return EsmTokenizer(str(directory / "vocab.txt"))


def write_csv(directory, rows, name="x000.csv"):
    directory.mkdir(exist_ok=True)
    with open(directory / name, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "text"])
        writer.writerows(rows)
    return directory


def proteins(count: int, seed: int = 0) -> list[tuple[str, str]]:
    generator = np.random.default_rng(seed)
    letters = np.frombuffer(b"LAGVSERTIDPKQNFYMHWCX", np.uint8)
    return [
        (f"P{i}", letters[generator.integers(21, size=generator.integers(1, 80))].tobytes().decode())
        for i in range(count)
    ]


def load(out) -> dict[str, list[tuple[str, list[int]]]]:
    """{split: [(id, input_ids), ...]} through `datasets`."""
    loaded = datasets.load_from_disk(str(out / "arrow"))
    return {split: list(zip(rows["id"], rows["input_ids"], strict=True)) for split, rows in loaded.items()}


# --- token ids


def ids_equal_the_tokenizers(source, tmp_path, tokenizer):
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--max_records_per_partition", 3000)
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "processed")
    found = dict(itertools.chain(*load(tmp_path / "processed").values()))
    records = [(name.decode(), sequence.decode().upper()) for name, sequence in read_fasta(source)]
    assert len(found) == len(records)
    expected = tokenizer([sequence for _, sequence in records])["input_ids"]
    assert all(list(found[name]) == ids for (name, _), ids in zip(records, expected, strict=True))


@needs_real_sample
def test_ids_of_the_real_sample(tmp_path, tokenizer):
    ids_equal_the_tokenizers(REAL_SAMPLE, tmp_path, tokenizer)


def test_ids_of_a_generated_sample(tmp_path, tokenizer):
    write_sample(tmp_path / "s.fasta", num_proteins=300)
    ids_equal_the_tokenizers(tmp_path / "s.fasta", tmp_path, tokenizer)


def test_every_token_lower_case_and_unknown_characters(tmp_path, caplog):
    rows = [("all", "LAGVSERTIDPKQNFYMHWCXBUZO.-"), ("lower", "mkvla"), ("odd", "M*K1V J")]
    write_csv(tmp_path / "csv", rows)
    with caplog.at_level("INFO"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path)
    found = dict(itertools.chain(*load(tmp_path).values()))
    assert list(found["all"]) == [0, *range(4, 31), 2]
    assert list(found["lower"]) == encode("MKVLA").tolist()
    assert list(found["odd"]) == [0, 20, UNK, 15, UNK, 7, UNK, UNK, 2]
    assert "4 characters in 1 records are no residues" in caplog.text


@pytest.mark.parametrize("length", [3, 10, 50])
def test_truncation_and_padding_as_tokenizers_do_it(tmp_path, tokenizer, length):
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
def test_chunks(tmp_path, flags):
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


def test_splits_are_disjoint_complete_and_keep_the_order(tmp_path):
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
def test_an_empty_split_opens(tmp_path, size):
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
    ],
)
def test_sizes(caplog, records, asked, expected, warns):
    found = split_sizes(records, *asked)
    assert sum(found) <= records
    if expected[1:] == (4000, 3999):  # all but one record
        assert found[0] == 1
        assert sum(found) == 8000
    else:
        assert found == expected
    assert ("scaled down" in caplog.text) == warns


@pytest.mark.parametrize("asked", [(None, -1, 5), (None, 1.5, 5), (-0.5, 5, 5)])
def test_impossible_sizes(asked):
    with pytest.raises(UserError, match="_size"):
        split_sizes(100, *asked)


def test_every_record_is_as_likely_to_be_held_out(monkeypatch):
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


def test_what_datasets_sees(tmp_path):
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


def test_shards_and_record_batches(tmp_path):
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
    assert writer.bytes == sum(path.stat().st_size for path in shards)
    rows = [batch.num_rows for path in shards for batch in pa.ipc.open_stream(path.read_bytes())]
    assert rows == [ROWS_PER_BATCH] * 3 + [5000]
    loaded = datasets.load_from_disk(str(tmp_path))
    assert loaded["id"][:] == ids
    assert loaded["input_ids"][:] == tokens


@pytest.mark.parametrize("partitions", [1, 5])
def test_workers_do_not_change_the_bytes(tmp_path, monkeypatch, partitions):
    rows = proteins(3000)
    for i in range(partitions):
        write_csv(tmp_path / "csv", rows[i::partitions], f"x{i:03d}.csv")
    monkeypatch.setattr(csv_records, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(TOKENIZE, "usable_threads", lambda asked: asked)  # even on one processor
    for workers in (1, 8):
        flags = ("--preprocessing_num_workers", workers, "--output_dir", tmp_path / str(workers))
        call(TOKENIZE, "--input_dir", tmp_path / "csv", *flags)
    assert everything_in(tmp_path / "1") == everything_in(tmp_path / "8")


def test_results_come_in_order_and_few_are_held():
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
def test_rows_do_not_depend_on_blocks(tmp_path, monkeypatch, block_bytes):
    """Nor on whether the parser read them or the short cut for plain lines, which ends at the first other one."""
    rows = [*proteins(100), ("with,comma", "MK"), ('quo"te', "NA"), ("null", "NULL"), ("émile", "MK"), ("", "MK")]
    write_csv(tmp_path / "csv", rows)
    for name in ("BLOCK_BYTES", "PARSED_BYTES"):
        monkeypatch.setattr(csv_records, name, block_bytes)
    found = [tuple(row.values()) for batch in read_rows(tmp_path / "csv/x000.csv") for row in batch.to_pylist()]
    assert found == rows
    assert count_rows(tmp_path / "csv/x000.csv") == len(rows)


@pytest.mark.parametrize("odd", ["a,MK\r\n", "\n", '"a",MK\n', "é,MK\n", 'a,"M\nK"\n', '"a""b",MK\n', ",MK\n"])
@pytest.mark.parametrize("place", [0, 1, 37, 100])
@pytest.mark.parametrize("end", ["", "\n"])
def test_plain_lines_and_others_as_the_csv_module_reads_them(tmp_path, monkeypatch, odd, place, end):
    monkeypatch.setattr(csv_records, "BLOCK_BYTES", 500)
    lines = [f"{name},{text}\n" for name, text in proteins(100)]
    lines.insert(place, odd)
    path = tmp_path / "x.csv"
    path.write_bytes(("id,text\n" + "".join(lines).rstrip("\n") + end).encode())
    with open(path, newline="", encoding="utf-8") as file:
        expected = [tuple(row) for row in csv.reader(file) if row][1:]
    found = [tuple(row.values()) for batch in read_rows(path) for row in batch.to_pylist()]
    assert found == expected
    assert count_rows(path) == len(expected)


def test_the_parser_and_the_short_cut_give_the_same_bytes(tmp_path):
    rows = proteins(1000)
    write_csv(tmp_path / "plain", rows)
    (tmp_path / "quoted").mkdir()
    quoted = (tmp_path / "plain/x000.csv").read_text().replace("P0,", '"P0",')
    (tmp_path / "quoted/x000.csv").write_text(quoted)
    for name in ("plain", "quoted"):
        call(TOKENIZE, "--input_dir", tmp_path / name, "--output_dir", tmp_path / name)
        (tmp_path / name / "arrow/.complete.json").unlink()  # the inputs differ
    assert everything_in(tmp_path / "plain/arrow") == everything_in(tmp_path / "quoted/arrow")


def test_titin_spaces_stops_lower_case_and_repeated_ids(tmp_path):
    titin = "".join(text for _, text in proteins(2000))[:35_000]
    assert len(titin) == 35_000
    rows = [("titin", titin), ("twice", "MKV"), ("twice", "MKVLA"), ("twice", "MKV"), ("odd", "mk v*L*"), ("x", " ")]
    write_csv(tmp_path / "csv", rows)
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path)
    found = sorted(itertools.chain(*load(tmp_path).values()))
    assert found == sorted((name, encode(text).tolist()) for name, text in rows)
    assert dict(found)["odd"] == [0, 20, 15, UNK, 7, UNK, 4, UNK, 2]


def test_other_columns_and_orders_are_fine(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"text",cluster,"id"\r\nMK,1,"a"\r\n\r\nLA,2,b\r\n')
    found = [row for batch in read_rows(tmp_path / "a.csv") for row in batch.to_pylist()]
    assert found == [{"id": "a", "text": "MK"}, {"id": "b", "text": "LA"}]


def test_encode_a_slice_of_rows():
    rows = pa.RecordBatch.from_pydict({"id": ["a", "b", "c", "d"], "text": ["MKV", "L1", "*", "AG"]}).slice(1, 2)
    encoded = encode_rows(rows, None, pad=False)
    assert encoded.rows.to_pylist() == [{"id": "b", "input_ids": [0, 4, 3, 2]}, {"id": "c", "input_ids": [0, 3, 2]}]
    assert (encoded.tokens, encoded.unknown, encoded.records_with_unknown) == (7, 2, 2)
    assert encode_rows(rows.slice(0, 0), None, pad=False).rows.num_rows == 0


# --- started again


def test_second_run_does_nothing_and_another_one_is_refused(tmp_path, caplog):
    write_csv(tmp_path / "csv", proteins(50))
    same = ("--input_dir", tmp_path / "csv", "--output_dir", tmp_path)
    call(TOKENIZE, *same)
    first = everything_in(tmp_path / "arrow")
    with caplog.at_level("INFO"):
        call(TOKENIZE, *same, "--preprocessing_num_workers", 2)
    assert "nothing to do" in caplog.text
    with pytest.raises(UserError, match="give --overwrite"):
        call(TOKENIZE, *same, "--max_seq_length", 30)
    write_csv(tmp_path / "csv", proteins(60), "x001.csv")
    with pytest.raises(UserError, match="give --overwrite"):
        call(TOKENIZE, *same)
    assert everything_in(tmp_path / "arrow") == first
    call(TOKENIZE, *same, "--overwrite")
    assert sum(map(len, load(tmp_path).values())) == 110
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrow", "csv"]


def test_killed_and_started_again(tmp_path):
    rows = proteins(1000)
    for i in range(200):
        write_csv(tmp_path / "csv", rows, f"x{i:03d}.csv")
    arguments = ("--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    process = subprocess.Popen(command(SCRIPT, *arguments), env=environment(), stderr=subprocess.DEVNULL)
    while not (tmp_path / "out/.building/scratch/file-00005").exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the script was through before it could be killed"
    assert not (tmp_path / "out/arrow").exists()
    call(TOKENIZE, *arguments)
    call(TOKENIZE, *arguments[:2], "--output_dir", tmp_path / "undisturbed")
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "undisturbed")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["arrow"]


CHUNKS = ("--line_by_line", "False", "--max_seq_length", "50")


@pytest.mark.parametrize(("moments", "flags"), [(20, ()), (6, CHUNKS), (10, ("--cluster_table", "table.tsv"))])
def test_killed_at_many_moments(tmp_path, monkeypatch, moments, flags):
    """Counting, encoding, renaming, copying pieces together: always the same bytes, and no whole file read again."""
    monkeypatch.chdir(tmp_path)
    small = {"common.shards.SMALL_BYTES": 2000}  # some pieces are renamed, some copied together
    monkeypatch.setattr(shards, "SMALL_BYTES", 2000)
    rows = [(f"UniRef90_{name}", text) for name, text in proteins(420)]
    for i, (first, last) in enumerate(itertools.pairwise([0, 200, 210, 220, 420])):
        write_csv(tmp_path / "csv", rows[first:last], f"x{i:03d}.csv")
    (tmp_path / "table.tsv").write_text("".join(f"UniRef50_{i // 3}\tUniRef90_P{i}\n" for i in range(400)))
    arguments = ("--input_dir", tmp_path / "csv", "--validation_size", "20", "--test_size", "20", *flags)
    out = tmp_path / "undisturbed"
    touches = run_killed_at(None, SCRIPT, out, *arguments, "--output_dir", out, settings=small)
    expected = everything_in(out)
    assert flags == CHUNKS or len(list((out / "arrow/train").glob("*.arrow"))) == 3

    resumed, again = 0, []

    def noting(path, *others):
        again.append(path.name)
        return read_rows(path, *others)

    monkeypatch.setattr(encode_files, "read_rows", noting)
    # Of the whole run, and of its end: most touches of the disk are those of the clusters' temporary files.
    chosen = np.concatenate([np.linspace(begin, touches - 1, moments // 2) for begin in (1, max(2, touches - 60))])
    for number, touch in enumerate(sorted(set(chosen.astype(int).tolist()))):
        out = tmp_path / str(touch)
        run_killed_at(touch, SCRIPT, out, *arguments, "--output_dir", out, settings=small)
        if number % 3 == 0:
            run_killed_at(touch // 2, SCRIPT, out, *arguments, "--output_dir", out, settings=small)  # and again
        journal = out / ".building/journal.jsonl"
        notes = [json.loads(line)[0] for line in journal.read_text().splitlines()] if journal.exists() else []
        done = {f"x{int(note.split()[1]):03d}.csv" for note in notes if note.startswith("file ")}
        again.clear()
        call(TOKENIZE, *arguments, "--output_dir", out)
        assert everything_in(out) == expected, touch
        assert [path.name for path in out.iterdir()] == ["arrow"]
        assert not done & set(again), touch
        resumed += bool(done)
    assert resumed >= moments // 5


def test_a_full_disk(tmp_path):
    for i in range(4):
        write_csv(tmp_path / "csv", proteins(20_000, seed=i), f"x{i:03d}.csv")
    with small_disk(tmp_path, "2m") as disk:
        line = expect_error(SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir", disk / "out")
        assert "No space left on device" in line
        assert not list(disk.iterdir())


# --- bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x001.csv: Empty CSV file"),
        (b"id,text\na,MK\nb\n", "x001.csv: row 2: Expected 2 columns, got 1"),
        (b"name,sequence\na,MK\n", "x001.csv: row 0: the header is 'name,sequence': expected id,text"),
        (b"id,text,text\na,MK,V\n", "x001.csv: row 0: the header"),
        (b"id,text\na,MK\nb,\nc,\n", "x001.csv: row 2: the text is empty"),
        (b"id,text\na,MK\nb,MK\nc,M\xc3\xa9K\n", "x001.csv: row 3: non-ASCII byte 0xc3 in the text"),
        (b"id,text\na,MK\nb\xff,MK\n", "x001.csv: row 2: the id is not UTF-8"),
        (b"id,text\na,MK\nb,MK,V\n", "x001.csv: row 2: Expected 2 columns, got 3"),
    ],
)
def test_bad_csv_names_file_and_row(tmp_path, content, message):
    write_csv(tmp_path / "csv", proteins(10))
    (tmp_path / "csv/x001.csv").write_bytes(content)
    with pytest.raises(UserError) as error:
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "new/out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_row_numbers_count_over_blocks(tmp_path, monkeypatch):
    rows = [*proteins(500), ("bad", "MKé")]
    write_csv(tmp_path / "csv", rows)
    for name in ("BLOCK_BYTES", "PARSED_BYTES"):
        monkeypatch.setattr(csv_records, name, 300)
    with pytest.raises(UserError, match="row 501: non-ASCII"):
        list(read_rows(tmp_path / "csv/x000.csv"))


BAD_ROWS = [b"a,", b"b,M\xc3\xa9K", b"\xff,MK", b"c,MK,V", b"d", b'"",""']


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("header", [b"id,text\n", b"id,text\r\n"])
def test_bad_rows_are_skipped_and_counted(tmp_path, monkeypatch, caplog, block_bytes, header):
    for name in ("BLOCK_BYTES", "PARSED_BYTES"):
        monkeypatch.setattr(csv_records, name, block_bytes)
    good = proteins(500)
    places = [3, 60, 61, 200, 202, 470]  # of the bad rows among all
    lines = [f"{name},{text}".encode() for name, text in good]
    for place, bad in zip(places, BAD_ROWS, strict=True):
        lines.insert(place - 1, bad)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/x000.csv").write_bytes(header + b"\n".join(lines))
    found = []
    bad_records = BadRecords("skip")
    for batch in read_rows(tmp_path / "csv/x000.csv", bad_records):
        found += [tuple(row.values()) for row in batch.to_pylist()]
    assert found == good
    assert count_rows(tmp_path / "csv/x000.csv", BadRecords("skip")) == 500
    words = ["the text is empty", "non-ASCII byte 0xc3", "the id is not UTF-8", "Expected 2 columns, got 3"]
    words += ["Expected 2 columns, got 1", "the text is empty"]
    said = sorted(bad_records.first, key=lambda line: int(re.search(r"row (\d+)", line)[1]))
    for line, place in zip(said, places, strict=False):
        assert f"x000.csv: row {place}: {words[places.index(place)]}" in line
    assert bad_records.count == 6

    with pytest.raises(UserError, match=r"x000.csv: row \d+: .*--on_bad_record skip"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    with caplog.at_level("INFO"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--on_bad_record", "skip")
    assert "6 bad records were skipped" in caplog.text
    assert dict(itertools.chain(*load(tmp_path / "out").values())) == {n: encode(t).tolist() for n, t in good}
    results = json.loads((tmp_path / "out/arrow/.complete.json").read_text())["results"]
    assert (results["records"], results["bad_records"]) == (500, 6)


def test_too_few_records(tmp_path):
    write_csv(tmp_path / "csv", proteins(2))
    with pytest.raises(UserError, match="at least 3"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_input_directories(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        csv_files(tmp_path / "absent")
    (tmp_path / ".hidden.csv").write_text("id,text\n")
    with pytest.raises(UserError, match=r"no \*.csv files"):
        csv_files(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        ("--pad_to_max_length", "True"),
        ("--max_seq_length", 2),
        ("--preprocessing_num_workers", 0),
        ("--tokenizer_name", "bert-base-uncased"),
        ("--validation_size", -1),
        ("--seed", -1),
    ],
)
def test_impossible_flags(tmp_path, flags):
    write_csv(tmp_path / "csv", proteins(10))
    with pytest.raises(UserError, match=flags[0]):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_tokenizers_that_are_ours_by_another_name(tmp_path):
    write_csv(tmp_path / "csv", proteins(10))
    local = tmp_path / "tokenizer"
    local.mkdir()
    (local / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    for i, name in enumerate(("facebook/esm2_t6_8M_UR50D", local)):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / str(i), "--tokenizer_name", name)
    assert everything_in(tmp_path / "0") == everything_in(tmp_path / "1")
    (local / "vocab.txt").write_text("\n".join(reversed(TOKENS)))
    with pytest.raises(UserError, match="33 ESM-2 tokens"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "x", "--tokenizer_name", local)


def test_bad_input_on_the_command_line(tmp_path):
    write_csv(tmp_path / "csv", [*proteins(10), ("bad", "")])
    line = expect_error(SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    assert line == f"error: {tmp_path}/csv/x000.csv: row 11: the text is empty: {csv_records.REMEDY}"
    assert "--pad" in expect_error(SCRIPT, "--pad", "True")
    assert "--on_bad_record" in expect_error(SCRIPT, "--on_bad_record", "ignore")
    shutil.rmtree(tmp_path / "csv")
    line = expect_error(SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    assert "no such directory: run 0.download_data.py first" in line
    assert not list(tmp_path.iterdir())
