"""Files as they are: which are proteins to train on, what is taken out of them, and what is refused."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet
import pytest

from common.cli import UserError
from common.data.collators import MaskingCollator
from common.data.flags import DataFlags
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.prepare.sources.find_files import check_same_files, open_source, split_of, with_contents
from extras.prepare.sources.sequence_files import read_sequences, units_of
from extras.prepare.sources.streamed_data import MemoryStore, find_source
from extras.prepare.sources.streams import Stream
from tests.data.stream_fixtures import first_epoch, plan_of, proteins, write


def test_reader_cleans_texts_and_counts_unknown(tmp_path):
    """In every format, as FASTA files and step 1 have it."""
    texts = ["MKV LAG*", " mk\tv ", "MKV**", "M1K*J" + "LA" * 15, "M K V L A"]
    for name in ("a.parquet", "a.arrow", "a.jsonl", "a.csv", "a.fasta"):
        plan = plan_of(write(tmp_path / name, texts), 1)
        assert sorted(first_epoch(plan)) == sorted(["MKVLAG", "MKV", "MKV", "M?K??" + "LA" * 15, "MKVLA"]), name
        pack, ids, _ = next(Stream(plan, 0))
        assert MaskingCollator(ESM2_TOKENS, 0)(pack, ids)["num_unknown"] == 3
        store = MemoryStore.read(open_source(str(tmp_path / name), False).splits["train"], 10)
        assert store.unknown() == (3, 1)


def test_memory_store_skips_empty_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": ["", "MKV", None, "acd", "M*1" + "LA" * 15]}), path)
    found = sorted(first_epoch(plan_of(path, 1)))
    assert found == ["ACD", "M??" + "LA" * 15, "MKV"]


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("data/train-00000-of-00004.parquet", "train"),
        ("validation/part.csv", "validation"),
        ("train/val.jsonl", "validation"),
        ("uniref_test.fasta.gz", "test"),
        ("proteins.fasta", "train"),
        ("my_constraints.csv", "train"),  # not: train
    ],
)
def test_split_of_names(path, split):
    assert split_of(path) == split


def test_source_of_one_file_is_training_data(tmp_path):
    path = write(tmp_path / "my_test.csv", ["MKV"])
    assert list(open_source(str(path), False).splits) == ["train"]


def test_source_names_held_out_files(tmp_path):
    for name in ("my_test.csv", "val.fasta"):
        write(tmp_path / name, ["MKV"])
    for given in (str(tmp_path), f"{tmp_path}/*.csv"):
        with pytest.raises(
            UserError, match=r"no training files in it: by their names, .*my_test\.csv.*give one file by"
        ):
            open_source(given, False)
    assert set(open_source(str(tmp_path), False, "--eval_dataset").splits) == {"test", "validation"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no files of proteins in it: expected .parquet"):
        open_source(str(tmp_path / "empty"), False)


def test_source_identity_depends_on_contents_and_order(tmp_path):
    parts = {"a": ["MKV"], "b": ["MKL"]}

    def identity(**names: str) -> str:
        directory = tmp_path / "-".join(names)
        for name, part in names.items():
            write(directory / f"{name}.csv", parts[part])
        return with_contents(open_source(str(directory), False), "train").identity("train")

    assert identity(a="a", b="b") == identity(c="a", d="b")
    assert len({identity(a="a", b="b"), identity(e="b", f="a"), identity(g="a"), identity(h="a", i="a")}) == 4


@pytest.mark.parametrize(("change", "said"), [("remove", "is not there"), ("grow", "has 18 bytes")])
def test_source_rejects_other_file_on_another_node(tmp_path, change, said):
    path = write(tmp_path / "a.csv", ["MKV"], "text")
    source = open_source(str(path), False)
    check_same_files(source)
    path.unlink() if change == "remove" else path.write_text(path.read_text() + "1,M\n")
    with pytest.raises(UserError, match=rf"a\.csv: {said} on this node, and 14 bytes on that of rank 0"):
        check_same_files(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "metadata.csv",
            b"name,organism\na,b\n",
            r"metadata\.csv: no column sequence or text, only name, organism: .*'DIR/",
        ),
        ("z.jsonl", b'{"name": "a"}\n', r"z\.jsonl: no column sequence or text, only name"),
        ("z.tsv", b"\x28\xb5\x2f\xfd\0", r"z\.tsv: the compressed file is (cut short|corrupt)"),
    ],
)
def test_source_rejects_a_table_without_texts(tmp_path, name, content, message):
    """Not only when its turn comes to be read, days later."""
    write(tmp_path / "a.csv", proteins(20))
    (tmp_path / name).write_bytes(content)
    flags = DataFlags(dataset=str(tmp_path), max_steps=1)
    with pytest.raises(UserError, match=message):
        find_source(flags)
    flags = replace(flags, dataset=f"{tmp_path}/a.*")
    assert find_source(flags)
    pa.parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: the column of proteins holds int64: expected texts"):
        find_source(flags)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.fasta"])
def test_reader_detects_compression_by_content(tmp_path, name, pack):
    path = write(tmp_path / name, proteins(40))
    content = path.read_bytes()
    path.write_bytes(pack(content.replace(b",", b"\t") if name == "a.tsv" else content))
    assert sorted(first_epoch(plan_of(path))) == sorted(proteins(40))
    assert len(open_source(str(path.rename(f"{path}.xz")), False).splits["train"]) == 1


def test_source_of_directories_and_globs(tmp_path):
    write(tmp_path / "data" / "train-0.parquet", ["MKV"])
    write(tmp_path / "data" / "validation-0.parquet", ["MKL"])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    write(tmp_path / ".cache" / "train-1.parquet", ["MKV"])
    source = open_source(str(tmp_path), streaming=False)
    assert {split: len(files) for split, files in source.splits.items()} == {"train": 1, "validation": 1}
    source = open_source(str(tmp_path / "data" / "*.parquet"), streaming=False)
    assert set(source.splits) == {"train", "validation"}
    identity = with_contents(source, "train").identity("train")
    moved = tmp_path / "moved"
    (tmp_path / "data").rename(moved)
    assert with_contents(open_source(str(moved), streaming=False), "train").identity("train") == identity


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.parquet", None, "no such file"),
        ("a.parquet", b"no parquet at all", "cannot be read"),
        ("a.jsonl", b'{"sequence": "MKV"}\n{"sequence": \n', "cannot be read"),
        ("a.jsonl", b'{"protein": "MKV"}\n', "no column sequence or text, only protein"),
        ("a.csv", b"", "Empty CSV file"),
        ("a.csv", b"id,protein\n1,MKV\n", "no column sequence or text, only id, protein"),
        ("a.csv.gz", gzip.compress(b"id,text\n1,MKV\n" * 99)[:-9], "the compressed file is cut short"),
        ("a.jsonl", gzip.compress(gzip.compress(b"{}")), "not JSON lines: it is gzipped twice"),
        ("a.fasta", b"MKV\n", "not FASTA"),
        ("a.csv", b'id,text\n1,MKV\n2,"MKV\n3,MKL\n4,MK"\n', "row 2: a text that continues after a line end"),
        ("a.csv", "id,text\n1,MKV\n".encode("utf-16"), "not CSV: it is UTF-16: convert it"),
        ("a.csv", b"id,text\n1,MKV\nid,text\n2,MKV\n", "row 2: the header once more"),
        ("a.csv", b"id,text\n" + b"1,12345\n" * 3, "row 1 has 5 characters of 5 that are not residues"),
        ("a.csv", b"ID,Text\n1,MKV\nid,text\n2,MKV\n", "row 2: the header once more"),
        ("a.csv", b"id,text\n" + b"M,MKV\n" * 300 + b"1,12345\n", "row 301 has 5 characters of 5"),
        (
            "a.csv",
            b"id,text\n" + b"1,A protein of the cell wall.\n" * 50,
            "19% of the characters are blanks",
        ),
        ("a.jsonl", b"[1, 2]\n", "a JSON array: write an object a line"),
        ("a.txt", b"MKV\n", "its name has no known suffix"),
    ],
)
def test_reader_names_bad_files(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    def read():
        for unit in units_of(open_source(str(path), streaming=False).splits["train"], 8):
            list(read_sequences(unit, 0))

    with pytest.raises(UserError, match=message) as error:
        read()
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "my.tsv.d/a.csv", "a.jsonl"])
def test_reader_ignores_other_fields(tmp_path, name):
    """Numbers that turn into words after many rows, and a field that appears late."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    numbers = [*map(str, range(40_000)), "word"]
    if name.endswith(".jsonl"):
        rows = [json.dumps({"n": n, "text": "MKVLA"}) for n in range(40_000)]
        content = "\n".join([*rows, '{"n": "word", "late": [1], "text": "MKVLA"}']).encode()
    else:
        between = b"\t" if name.endswith(".tsv.gz") else b","
        content = b"\n".join(
            between.join(row) for row in [(b"N", b"Text"), *((n.encode(), b"MKVLA") for n in numbers)]
        )
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (unit,) = units_of(open_source(str(path), streaming=False).splits["train"], 1)
    assert sum(len(offsets) - 1 for _, offsets in read_sequences(unit, 0)) == 40_001


@pytest.mark.parametrize(
    ("values", "kind"),
    [([1, 2], "int64"), ([["MKV"], ["L"]], "list<"), ([{"a": 1}] * 2, "struct<"), ([1.5, 2.5], "double")],
)
def test_reader_rejects_columns_of_other_types(tmp_path, values, kind):
    pa.parquet.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    (unit,) = units_of(open_source(str(tmp_path / "a.parquet"), streaming=False).splits["train"], 1)
    with pytest.raises(UserError, match=rf"a\.parquet.*: the column of proteins holds {kind}.*: expected texts"):
        list(read_sequences(unit, 0))
