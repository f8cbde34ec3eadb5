"""Files read as they are: every protein once an epoch, the same batches for everybody, resumable at any step."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from itertools import islice, takewhile

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from common.batches.collators import MaskingCollator
from common.batches.flags import DataFlags
from common.batches.loader import TrainLoader, merge_positions
from common.batches.streams import Stream, StreamedOrder, StreamPosition, plan_streams
from common.batches.training_data import find_source
from common.cli import UserError
from common.files import alphabet
from common.files.memory_store import MemoryStore
from common.files.sources import open_source, split_of
from common.files.stream_reader import read_sequences, units_of
from common.ranks.world import Mesh

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


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.fasta", "a.fa.gz"])
@pytest.mark.parametrize("packing", [PACKED, PADDED])
def test_every_format_gives_every_protein_once_an_epoch(tmp_path, name, packing):
    plan = plan_of(write(tmp_path / name, proteins()), **packing)
    assert sorted(first_epoch(plan)) == sorted(proteins())


SHAPES = [(1, 1000, 4), (1, 50, 4), (3, 20, 2), (40, 5, 4), (3, 99, 5)]


@pytest.mark.parametrize(("files", "row_group", "packs"), SHAPES)
def test_units_are_dealt_without_overlap_or_loss(tmp_path, files, row_group, packs):
    for number, part in enumerate(np.array_split(proteins(), files)):
        write(tmp_path / f"train-{number:05d}.parquet", part.tolist(), row_group=row_group)
    plan = plan_of(tmp_path, packs)
    assert sorted(first_epoch(plan)) == sorted(proteins())
    for epoch in (0, 1):
        dealt = sorted(s for stream in range(plan.num_streams) for s in plan.shares(stream, epoch))
        whole = [unit for unit, part, parts in dealt if part == 0]
        assert whole == list(range(len(plan.units)))  # each unit, and all its parts
        assert all((unit, p, parts) in dealt for unit, _, parts in dealt for p in range(parts))
    if files == 40:
        assert plan.shares(0, 0) != plan.shares(0, 1), "the same files for the same stream in every epoch"


def test_windows_do_not_depend_on_how_the_file_is_read(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", proteins(), row_group=600)
    packs = [ids for (_, ids, _), _ in zip(Stream(plan_of(path, 1), 0), range(40), strict=False)]
    monkeypatch.setattr("common.files.sequence_files.ROWS_AT_ONCE", 7)
    again = [ids for (_, ids, _), _ in zip(Stream(plan_of(path, 1), 0), range(40), strict=False)]
    assert all(np.array_equal(a, b) for a, b in zip(packs, again, strict=True))


@pytest.mark.parametrize("window_tokens", [3000, 1 << 20])
def test_a_stream_goes_on_from_any_position(tmp_path, monkeypatch, window_tokens):
    monkeypatch.setattr("common.batches.streams.WINDOW_TOKENS", window_tokens)  # several windows in a unit, or one
    monkeypatch.setattr("common.batches.streams.PACKS_PER_WINDOW", 2)
    plan = plan_of(write(tmp_path / "a.parquet", proteins(200)), 1)
    stream = Stream(plan, 0)
    made = [next(stream) for _ in range(60)]  # more than an epoch
    assert made[-1][0].epoch > 0
    for done in range(1, 60):
        pack, ids, position = next(Stream(plan, 0, made[done - 1][2]))
        assert np.array_equal(ids, made[done][1])
        assert np.array_equal(pack.records, made[done][0].records)
        assert position == made[done][2]


def steps_of(plan, packs: int, number: int, ranks: int = 1, workers: int = 0, first: int = 0, position=None):
    """[(input_ids and labels of each pack of the step, in the order of the packs; position)], over all ranks."""
    loaders = [
        TrainLoader(
            *(StreamedOrder(plan, packs), MaskingCollator(0), Mesh(r, ranks), first, position, number),
            num_workers=workers,
        )
        for r in range(ranks)
    ]
    steps = []
    for of_ranks in zip(*loaders, strict=True):
        batches = [None] * packs
        for rank, step in enumerate(of_ranks):
            batches[rank::ranks] = [(b["input_ids"].tolist(), b["labels"].tolist()) for b in step.micro_batches]
        steps.append((batches, merge_positions([step.position for step in of_ranks])))
    return steps


@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])  # 12 row groups: two lanes; one file: one lane
def test_a_step_holds_the_same_packs_on_any_number_of_ranks_and_workers(tmp_path, name):
    plan = plan_of(write(tmp_path / name, proteins()))
    expected = steps_of(plan, 4, 30)
    for ranks, workers in ((2, 0), (4, 0), (1, 1), (2, 2), (1, 3)):
        assert steps_of(plan, 4, 30, ranks, workers) == expected
    assert len({str(batches) for batches, _ in expected}) == 30


def test_resume_on_any_number_of_ranks_and_workers(tmp_path):
    plan = plan_of(write(tmp_path / "a.parquet", proteins()))
    whole = steps_of(plan, 4, 40)
    for done, ranks, workers in ((1, 2, 0), (7, 1, 2), (20, 4, 0), (33, 2, 1)):
        position = json.loads(json.dumps(whole[done - 1][1]))  # as a checkpoint keeps it
        went_on = steps_of(plan, 4, 40 - done, ranks, workers, first=done, position=position)
        assert [batches for batches, _ in went_on] == [batches for batches, _ in whole[done:]]


LONG = {"seed": 3, "max_seq_length": 4000, "tokens_per_pack": 4096}


@pytest.fixture
def small_windows(monkeypatch):
    """About 31 proteins, or 4,960 tokens."""
    for name, value in (("WINDOW_TOKENS", 8000), ("PACKS_PER_WINDOW", 1), ("LONG_PROTEIN", 160)):
        monkeypatch.setattr(f"common.batches.streams.{name}", value)


def lengths_of(count: int, long: int) -> list[str]:
    """Proteins of 50 residues, of which a third in the middle have `long`."""
    third = range(count // 3, 2 * count // 3)
    return ["MKVLAGTYRS" * ((long if number in third else 50) // 10) for number in range(count)]


@pytest.mark.parametrize("rows_at_once", [7, 4096])
@pytest.mark.parametrize("name", ["a.parquet", "a.csv"])
def test_windows_of_long_proteins_hold_fewer_of_them(tmp_path, monkeypatch, small_windows, name, rows_at_once):
    monkeypatch.setattr("common.files.sequence_files.ROWS_AT_ONCE", rows_at_once)
    texts = [*lengths_of(300, 1000), "M" * 9000, *lengths_of(60, 50)]
    plan = plan_of(write(tmp_path / name, texts, row_group=999), 1, **LONG)
    stream, held, packs = Stream(plan, 0), [], []
    for pack, ids, position in stream:
        if pack.epoch > 0:
            break
        packs.append((ids.tolist(), list(position)))
        held.append((len(stream._buffer.ids), len(stream._buffer.window.records)))
    assert max(records for _, records in held) == plan.window_records
    assert max(tokens for tokens, _ in held) <= plan.window_tokens
    assert sum(len(ids) for ids, _ in packs) == sum(min(len(text) + 2, 4000) for text in texts)
    for (_, position), (ids, _) in zip(packs, packs[1:], strict=False):  # from every position
        assert next(Stream(plan, 0, StreamPosition.of(position)))[1].tolist() == ids


def test_windows_of_usual_proteins_are_those_of_old(tmp_path, monkeypatch, small_windows):
    """A bound that does not bite changes no bit; nor does holding crops alone."""
    texts = [*proteins(300), "MKVLA" * 2000, *lengths_of(90, 120)]
    plan = plan_of(write(tmp_path / "a.csv", texts), 1)
    some = [(ids.tolist(), pack.starts.tolist()) for pack, ids, _ in islice(Stream(plan, 0), 100)]
    monkeypatch.setattr("common.batches.streams.LONG_PROTEIN", 1 << 40)
    monkeypatch.setattr("common.batches.stream_blocks.Block.cropped", lambda block, *_: block)
    assert [(ids.tolist(), pack.starts.tolist()) for pack, ids, _ in islice(Stream(plan, 0), 100)] == some


def test_a_position_of_old_goes_on_in_its_window(tmp_path, monkeypatch, small_windows):
    """In the middle of a window that would have fewer proteins now: to its end as it was, then as they are now."""
    texts = lengths_of(300, 1000)
    plan = plan_of(write(tmp_path / "a.csv", texts), 1, **LONG)
    with monkeypatch.context() as before:
        before.setattr("common.batches.streams.LONG_PROTEIN", 1 << 40)
        old = [(ids.tolist(), list(position)[:4]) for _, ids, position in islice(Stream(plan, 0), 30)]
    number = next(n for n, (_, position) in enumerate(old) if position[2] >= 90 and position[3] == 2)
    assert len(StreamPosition.of(json.loads(json.dumps(old[number][1])))) == 5
    stream = Stream(plan, 0, StreamPosition.of(old[number][1]))
    went_on = [ids.tolist() for _, ids, _ in islice(stream, 3)]
    assert went_on == [ids for ids, _ in old[number + 1 : number + 4]]
    left = went_on + [ids.tolist() for pack, ids, _ in takewhile(lambda made: made[0].epoch == 0, stream)]
    done = [ids for ids, _ in old[: number + 1]]
    assert sorted(texts_of(np.array(sum(done + left, [])))) == sorted(texts)


def test_texts_are_cleaned_and_what_is_no_residue_is_counted(tmp_path):
    """In every format, as FASTA files and step 1 have it."""
    texts = ["MKV LAG*", " mk\tv ", "MKV**", "M1K*J", "M K V L A"]
    for name in ("a.parquet", "a.jsonl", "a.csv", "a.fasta"):
        plan = plan_of(write(tmp_path / name, texts), 1)
        assert sorted(first_epoch(plan)) == sorted(["MKVLAG", "MKV", "MKV", "M?K??", "MKVLA"]), name
        pack, ids, _ = next(Stream(plan, 0))
        assert MaskingCollator(0)(pack, ids)["num_unknown"] == 3
        store = MemoryStore.read(open_source(str(tmp_path / name), False).splits["train"], 10)
        assert store.unknown() == (3, 1)


def test_a_position_of_another_global_batch_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", proteins())
    position = steps_of(plan_of(path, 4), 4, 1)[0][1]
    with pytest.raises(UserError, match="packs_per_step"):
        TrainLoader(StreamedOrder(plan_of(path, 2), 2), MaskingCollator(0), position=position)


def test_masks_differ_from_epoch_to_epoch_and_proteins_do_not(tmp_path):
    plan = plan_of(write(tmp_path / "a.csv", proteins(8)), 1)
    epochs: dict[int, list] = {}
    collate = MaskingCollator(0)
    for pack, ids, _ in Stream(plan, 0):
        if pack.epoch > 1:
            break
        epochs.setdefault(pack.epoch, []).append((sorted(texts_of(ids)), collate(pack, ids)["labels"].tolist()))
    assert sorted(t for texts, _ in epochs[0] for t in texts) == sorted(t for texts, _ in epochs[1] for t in texts)
    assert [labels for _, labels in epochs[0]] != [labels for _, labels in epochs[1]]


def test_empty_rows_are_left_out_and_odd_characters_are_unknown(tmp_path):
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": ["", "MKV", None, "acd", "M*é"]}), path)
    found = sorted(first_epoch(plan_of(path, 1)))
    assert found == ["ACD", "M???", "MKV"]  # an é is two bytes


def test_fewer_proteins_than_packs_is_an_error_not_a_hang(tmp_path):
    plan = plan_of(write(tmp_path / "a.csv", proteins(3)), 8)
    with pytest.raises(UserError, match="do not hold a protein for each"):
        [next(Stream(plan, index)) for index in range(8)]


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
def test_which_split_a_name_means(path, split):
    assert split_of(path) == split


def test_a_file_by_itself_is_trained_on_whatever_its_name(tmp_path):
    path = write(tmp_path / "my_test.csv", ["MKV"])
    assert list(open_source(str(path), False).splits) == ["train"]


def test_files_that_took_the_name_of_a_split_are_named(tmp_path):
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
def test_a_table_beside_the_data_is_named_before_anything_is_written(tmp_path, name, content, message):
    """Not only when its turn comes to be read, days later."""
    write(tmp_path / "a.csv", proteins(20))
    (tmp_path / name).write_bytes(content)
    flags = DataFlags(dataset=str(tmp_path), max_steps=1)
    with pytest.raises(UserError, match=message):
        find_source(flags)
    flags.dataset = f"{tmp_path}/a.*"
    assert find_source(flags)
    pa.parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: the column of proteins holds int64: expected texts"):
        find_source(flags)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.fasta"])
def test_packed_files_are_told_by_content(tmp_path, name, pack):
    path = write(tmp_path / name, proteins(40))
    content = path.read_bytes()
    path.write_bytes(pack(content.replace(b",", b"\t") if name == "a.tsv" else content))
    assert sorted(first_epoch(plan_of(path))) == sorted(proteins(40))
    assert len(open_source(str(path.rename(f"{path}.xz")), False).splits["train"]) == 1


def test_directories_and_globs(tmp_path):
    write(tmp_path / "data" / "train-0.parquet", ["MKV"])
    write(tmp_path / "data" / "validation-0.parquet", ["MKL"])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_infos.json").write_text("{}")
    write(tmp_path / ".cache" / "train-1.parquet", ["MKV"])
    source = open_source(str(tmp_path), streaming=False)
    assert {split: len(files) for split, files in source.splits.items()} == {"train": 1, "validation": 1}
    source = open_source(str(tmp_path / "data" / "*.parquet"), streaming=False)
    assert set(source.splits) == {"train", "validation"}
    moved = tmp_path / "moved"
    (tmp_path / "data").rename(moved)
    assert open_source(str(moved), streaming=False).identity("train") == source.identity("train")


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
        ("a.csv", b'id,text\n1,MKV\n2,"MKV\n3,MKL\n4,MK"\n', "row 2: a text that goes on over a line end"),
        ("a.csv", "id,text\n1,MKV\n".encode("utf-16"), "not CSV: it is UTF-16: convert it"),
        ("a.csv", b"id,text\n1,MKV\nid,text\n2,MKV\n", "row 2: the header once more"),
        ("a.csv", b"id,text\n" + b"1,12345\n" * 3, "100% of the characters are no residues"),
        ("a.csv", b"ID,Text\n1,MKV\nid,text\n2,MKV\n", "row 2: the header once more"),
        ("a.csv", b"id,text\n" + b"1,12345\n" * 300, "100% of the characters are no residues"),
        (
            "a.csv",
            b"id,text\n" + b"1,A protein of the cell wall.\n" * 50,
            "19% of the characters are blanks",
        ),
        ("a.jsonl", b"[1, 2]\n", "first line is no JSON object"),
        ("a.txt", b"MKV\n", "its name says no format"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
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
def test_fields_that_nobody_asked_for_are_not_looked_at(tmp_path, name):
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
def test_columns_that_are_no_texts_are_refused(tmp_path, values, kind):
    pa.parquet.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    (unit,) = units_of(open_source(str(tmp_path / "a.parquet"), streaming=False).splits["train"], 1)
    with pytest.raises(UserError, match=rf"a\.parquet.*: the column of proteins holds {kind}.*: expected texts"):
        list(read_sequences(unit, 0))
