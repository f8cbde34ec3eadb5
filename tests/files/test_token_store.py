"""The token store against `datasets` itself, for our format and for those of other tools, and its error messages."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import subprocess
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, Features, List, Sequence, Value, load_from_disk

from common.cli import UserError
from common.data.token_store import TokenStore, open_split
from common.models.esm2.alphabet import CLS, EOS, ESM2_TOKENS, PAD, encode
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.sequence_files import read_rows, units_of

OURS = Features({"id": Value("string"), "input_ids": List(Value("uint8"))})


def random_records(count: int, seed: int = 0, longest: int = 300) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        np.concatenate(([CLS], rng.integers(4, 24, rng.integers(1, longest)), [EOS])).astype(np.uint8)
        for _ in range(count)
    ]


def save(path, records, features=OURS, **save_arguments):
    rows = {"id": [f"P{i}" for i in range(len(records))], "input_ids": [record.tolist() for record in records]}
    Dataset.from_dict(rows, features=features).save_to_disk(path, **save_arguments)
    return path


def assert_holds(store: TokenStore, records: list[np.ndarray]) -> None:
    """Whole records and crops, in a random order with repetitions."""
    assert len(store) == len(records)
    rng = np.random.default_rng(1)
    indices = rng.integers(0, len(records), 3 * len(records))
    true_lengths = np.array([len(records[i]) for i in indices])
    assert np.array_equal(store.lengths(indices), true_lengths)
    starts = rng.integers(0, true_lengths)
    lengths = rng.integers(0, true_lengths - starts + 1)
    ids, offsets = store.gather(indices, starts, lengths)
    assert ids.dtype == np.uint8
    assert np.array_equal(np.diff(offsets), lengths)
    expected = [records[i][s : s + n] for i, s, n in zip(indices, starts, lengths, strict=True)]
    assert np.array_equal(ids, np.concatenate(expected))


def test_token_store_reads_several_files(tmp_path):
    records = random_records(500)
    save(tmp_path / "s", records, num_shards=3)
    assert_holds(TokenStore(tmp_path / "s", ESM2_TOKENS), records)


def test_token_store_reads_what_writer_writes(tmp_path):
    writing = pytest.importorskip("extras.prepare.dataset_writer")
    records = random_records(300)
    writer = writing.DatasetWriter(tmp_path / "s", writing.TOKEN_FEATURES, shard_bytes=20_000)
    for first in range(0, 300, 100):
        rows = [record.tolist() for record in records[first : first + 100]]
        names = [f"P{first + i}" for i in range(100)]
        columns = [pa.array(names), pa.array(rows, type=pa.list_(pa.uint8()))]
        writer.write(pa.record_batch(columns, names=["id", "input_ids"]))
        writer.end_shard()
    writer.close()
    store = TokenStore(tmp_path / "s", ESM2_TOKENS)
    assert_holds(store, records)
    assert [row["input_ids"] for row in load_from_disk(tmp_path / "s")] == [record.tolist() for record in records]


def write_split(path, batches, schema):
    """A split of one Arrow file with exactly these record batches."""
    path.mkdir()
    with pa.OSFile(str(path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}], "_fingerprint": "f"}))


@pytest.mark.parametrize("kind", [pa.list_(pa.uint8()), pa.large_list(pa.int64())])
def test_token_store_reads_many_chunks(tmp_path, kind):
    records = random_records(230)
    column = pa.array([record.tolist() for record in records], type=kind)
    whole = pa.record_batch([pa.array(["P"] * 230), column], names=["id", "input_ids"])
    bounds = [0, 1, 1, 8, 207, 230]  # one of them empty
    write_split(tmp_path / "s", [whole[a:b] for a, b in zip(bounds, bounds[1:], strict=False)], whole.schema)
    store = TokenStore(tmp_path / "s", ESM2_TOKENS)
    assert len(store._lists.chunk_start) == 4
    assert_holds(store, records)


@pytest.mark.parametrize("value", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("shape", ["list", "fixed", "large"])
def test_token_store_reads_padded_datasets(tmp_path, value, shape):
    """As the guides' own tokeniser writes them: padded ids with attention_mask and special_tokens_mask."""
    records = random_records(120, longest=60)
    width = max(map(len, records)) + 3
    rows = [record.tolist() + [PAD] * (width - len(record)) for record in records]
    kind = {"list": pa.list_, "large": pa.large_list, "fixed": lambda t: pa.list_(t, width)}[shape]
    table = pa.table(
        {
            "input_ids": pa.array(rows, type=kind(pa.type_for_alias(value))),
            "attention_mask": pa.array([[int(i != PAD) for i in row] for row in rows], type=pa.list_(pa.int8())),
            "special_tokens_mask": pa.array([[int(i < 3) for i in row] for row in rows], type=pa.list_(pa.int8())),
        }
    )
    write_split(tmp_path / "s", table.to_batches(max_chunksize=50), table.schema)
    assert_holds(TokenStore(tmp_path / "s", ESM2_TOKENS), records)


def test_token_store_reads_output_of_datasets_map(tmp_path):
    records = random_records(150, longest=60)
    rows = [record.tolist() + [PAD] * (70 - len(record)) for record in records]
    features = Features({"input_ids": Sequence(Value("int32")), "attention_mask": Sequence(Value("int8"))})
    masks = [[int(i != PAD) for i in row] for row in rows]
    Dataset.from_dict({"input_ids": rows, "attention_mask": masks}, features=features).save_to_disk(tmp_path / "s")
    assert_holds(TokenStore(tmp_path / "s", ESM2_TOKENS), records)


def test_token_store_reads_padded_bytes_without_mask(tmp_path):
    records = random_records(50, longest=60)
    padded = [np.pad(record, (0, 70 - len(record)), constant_values=PAD) for record in records]
    assert_holds(TokenStore(save(tmp_path / "s", padded), ESM2_TOKENS), records)


def test_token_store_reads_selected_and_shuffled_dataset(tmp_path):
    """`save_to_disk` writes the rows in the order of the indices mapping."""
    records = random_records(200)
    save(tmp_path / "all", records)
    order = np.random.default_rng(3).permutation(200)[:120]
    load_from_disk(tmp_path / "all").select(order).save_to_disk(tmp_path / "s")
    assert_holds(TokenStore(tmp_path / "s", ESM2_TOKENS), [records[i] for i in order])


def test_token_store_reads_indices_mapping(tmp_path):
    """datasets 1.x saved the mapping beside the whole table."""
    records = random_records(200)
    save(tmp_path / "s", records)
    order = np.random.default_rng(3).permutation(200)[:120]
    table = pa.table({"indices": pa.array(order, type=pa.uint64())})
    with (
        pa.OSFile(str(tmp_path / "s" / "indices.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    state = json.loads((tmp_path / "s" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "s" / "state.json").write_text(json.dumps(state))
    assert_holds(TokenStore(tmp_path / "s", ESM2_TOKENS), [records[i] for i in order])


def test_token_store_limits_records_and_pickles(tmp_path):
    records = random_records(200)
    save(tmp_path / "train", records)
    store = open_split(tmp_path, "train", ESM2_TOKENS, max_records=77)
    assert_holds(store, records[:77])
    assert_holds(pickle.loads(pickle.dumps(store)), records[:77])
    assert len(open_split(tmp_path, "train", ESM2_TOKENS, max_records=1000)) == 200
    with pytest.raises(IndexError):
        store.lengths(np.array([77]))
    with pytest.raises(AssertionError, match="crop"):
        store.gather(np.array([0]), np.array([1]), store.lengths(np.array([0])))


def test_token_store_fingerprint_depends_on_data_and_size(tmp_path):
    save(tmp_path / "a", random_records(20))
    save(tmp_path / "b", random_records(20, seed=1))
    prints = [
        TokenStore(tmp_path / "a", ESM2_TOKENS),
        TokenStore(tmp_path / "b", ESM2_TOKENS),
        TokenStore(tmp_path / "a", ESM2_TOKENS, max_records=10),
    ]
    assert len({store.fingerprint for store in prints}) == 3
    assert TokenStore(tmp_path / "a", ESM2_TOKENS).fingerprint == prints[0].fingerprint


def test_token_store_memory_does_not_grow_with_data(tmp_path):
    """Opening 30 MB of tokens and reading lengths and a few records allocates next to nothing."""
    offsets = np.arange(0, 30_000_001, 300, dtype=np.int32)
    values = np.tile(np.r_[0, np.full(298, 5), 2].astype(np.uint8), 100_000)
    dataset = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))}))
    dataset.save_to_disk(tmp_path / "s")
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    store = TokenStore(tmp_path / "s", ESM2_TOKENS)
    store.lengths(np.arange(0, 100_000, 100))
    store.gather(np.array([5, 99_999]), np.array([0, 3]), np.array([300, 100]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert pa.total_allocated_bytes() - before < 1_000_000
    assert not store._lists.files[0].tokens.flags.owndata


def test_token_store_reads_real_proteins(tmp_path, real_fasta):
    records = [encode(sequence) for _, sequence in read_fasta(real_fasta)]
    offsets = np.concatenate(([0], np.cumsum([len(record) for record in records]))).astype(np.int32)
    values = pa.array(np.concatenate(records))
    Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), values)})).save_to_disk(tmp_path / "s")
    assert_holds(TokenStore(tmp_path / "s", ESM2_TOKENS), records)


def break_ids(path):
    records = random_records(5)
    records[3][4] = 40
    save(path, records)
    store = TokenStore(path, ESM2_TOKENS)
    store.gather(np.arange(5), np.zeros(5, dtype=np.int64), store.lengths(np.arange(5)))


def pad_inside(path):
    records = random_records(5)
    records[3][1] = PAD
    save(path, records)
    store = TokenStore(path, ESM2_TOKENS)
    store.gather(np.arange(5), np.zeros(5, dtype=np.int64), store.lengths(np.arange(5)))


def negative_ids(path):
    features = Features({"id": Value("string"), "input_ids": List(Value("int64"))})
    save(path, [np.array([0, 5, 2]), np.array([0, 256 + 5, 2])], features)
    TokenStore(path, ESM2_TOKENS).gather(np.array([1]), np.array([0]), np.array([3]))


def no_column(path):
    Dataset.from_dict({"text": ["MK"]}).save_to_disk(path)
    TokenStore(path, ESM2_TOKENS)


def wrong_type(path):
    Dataset.from_dict({"input_ids": ["MK"]}).save_to_disk(path)
    TokenStore(path, ESM2_TOKENS)


def no_records(path):
    save(path, [])
    TokenStore(path, ESM2_TOKENS)


def dataset_dict(path):
    split = Dataset.from_dict({"id": ["a"], "input_ids": [[0, 5, 2]]}, features=OURS)
    DatasetDict({"train": split, "test": split}).save_to_disk(path)
    TokenStore(path, ESM2_TOKENS)


def no_arrow_files(path):
    path.mkdir()
    TokenStore(path, ESM2_TOKENS)


def no_rows_in_a_file(path):
    schema = pa.schema([("input_ids", pa.list_(pa.uint8()))])
    write_split(path, [], schema)
    TokenStore(path, ESM2_TOKENS)


def save_interrupted(path):
    save(path, random_records(5))
    (path / "state.json").unlink()
    TokenStore(path, ESM2_TOKENS)


def file_missing(path):
    save(path, random_records(5), num_shards=2)
    next(path.glob("*00001*.arrow")).unlink()
    TokenStore(path, ESM2_TOKENS)


def file_cut_short(path):
    save(path, random_records(500))
    file = next(path.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    TokenStore(path, ESM2_TOKENS)


def file_empty(path):
    save(path, random_records(5))
    next(path.glob("*.arrow")).write_bytes(b"")
    TokenStore(path, ESM2_TOKENS)


def not_arrow(path):
    save(path, random_records(5))
    next(path.glob("*.arrow")).write_bytes(b"id,text\nP1,MKV\n" * 50)
    TokenStore(path, ESM2_TOKENS)


def bad_state(path):
    save(path, random_records(5))
    (path / "state.json").write_text("{")
    TokenStore(path, ESM2_TOKENS)


def no_split(path):
    save(path / "train", random_records(5))
    open_split(path, "validation", ESM2_TOKENS)


def split_as_dataset(path):
    save(path, random_records(5))
    open_split(path, "train", ESM2_TOKENS)


def zero_records_wanted(path):
    save(path, random_records(5))
    TokenStore(path, ESM2_TOKENS, max_records=0)


@pytest.mark.parametrize(
    ("bad_input", "message"),
    [
        (lambda path: TokenStore(path, ESM2_TOKENS), "no such directory"),
        (lambda path: open_split(path, "train", ESM2_TOKENS), "no such directory"),
        (no_arrow_files, "no Arrow files"),
        (no_column, "no column input_ids: saved by datasets with the columns text"),
        (wrong_type, "not a list of integers"),
        (no_records, "empty"),
        (no_rows_in_a_file, "empty"),
        (save_interrupted, "no state.json"),
        (dataset_dict, "holds the splits test, train"),
        (file_missing, "not there"),
        (file_cut_short, "tokenise again"),
        (file_empty, "tokenise again"),
        (not_arrow, "tokenise again"),
        (bad_state, "tokenise again"),
        (no_split, "no split validation: it holds train"),
        (split_as_dataset, "is one split"),
        (zero_records_wanted, "at least 1"),
        (break_ids, "record 3: token id 40"),
        (negative_ids, "record 1: token id 261"),
        (pad_inside, "record 3: <pad> inside"),
    ],
)
def test_token_store_bad_input_is_one_line(tmp_path, bad_input, message):
    with pytest.raises(UserError, match=message) as error:
        bad_input(tmp_path / "data")
    assert "\n" not in str(error.value)
    assert str(tmp_path / "data") in str(error.value)


def both_splits(proteins: Dataset) -> DatasetDict:
    return DatasetDict({"train": proteins, "validation": proteins.select([1])})


@pytest.mark.parametrize("form", [lambda proteins: proteins, both_splits], ids=["dataset", "splits"])
def test_saved_columns_of_text_are_refused_with_the_command_that_converts_them(tmp_path, form):
    path, sequences = tmp_path / "saved", ["MKV", "LAGW"]
    form(Dataset.from_dict({"id": ["a", "b"], "sequence": sequences})).save_to_disk(path)
    with pytest.raises(UserError) as error:
        open_split(path, "train", ESM2_TOKENS)
    message = str(error.value)
    given, command = re.fullmatch(r".* --dataset (\S+): (python -c .*)", message).groups()
    subprocess.run(command.replace("python", shlex.quote(sys.executable), 1), shell=True, check=True)
    for source in (open_source(shlex.split(given)[0], False), open_source(str(path), False)):  # or as it is
        texts = {}
        for split, (file,) in source.splits.items():
            (unit,) = units_of((file,), wanted=1)
            texts[split] = [text for block in read_rows(unit, 0) for text in block.to_pylist()]
        assert texts == {"train": sequences} | ({"validation": ["LAGW"]} if form is both_splits else {})
