"""Exact duplicates in step 1: found as Python's sets find them, kept out of other splits, counted, in flat memory."""

import itertools
import json
import re
import tracemalloc
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from common.cli import UserError
from common.data.clusters import open_clusters
from common.models.esm2.alphabet import encode
from extras.prepare import duplicates, tokenize_proteins
from extras.prepare import splits as prepare_splits
from extras.prepare.duplicates import QUANTILES, find_copies, length_quantiles
from extras.prepare.encode import KEY, hash_records
from extras.prepare.splits import SPLITS
from tests.data_fixtures import TOKENIZE, call, different, everything_in, load, proteins, write_csv

SIZES = ("--validation_size", 60, "--test_size", 60)


def hashes_of(records: list[list[int]]) -> np.ndarray:
    ids = np.array(list(itertools.chain(*records)), np.uint8)
    return hash_records(ids, np.cumsum([0, *map(len, records)]).astype(np.int32))


def test_hash_records_is_independent_of_other_records():
    rng = np.random.default_rng(0)
    records = [rng.integers(0, 33, size).tolist() for size in (*range(1, 70), 5000)]
    together = hashes_of(records)
    assert together.tolist() == [int(hashes_of([record])[0]) for record in records]
    assert hashes_of([]).tolist() == []


def test_hash_records_differ_between_records():
    base = np.random.default_rng(0).integers(1, 33, 40).tolist()
    others = [base[:place] + [base[place] % 32 + 1] + base[place + 1 :] for place in range(40)]
    others += [base[:size] for size in range(1, 40)]
    others += [base + [0] * more for more in range(1, 20)]  # <cls> is 0, as what fills the last word is
    others += [base[8:16] + base[:8] + base[16:], base[8:] + base[:8]]  # the same words elsewhere
    assert len(set(hashes_of([base, *others]).tolist())) == 1 + len(others)


def key_files(directory, hashes, splits, files=3):
    keys = np.zeros(len(hashes), KEY)
    keys["hash"], keys["split"] = hashes, splits
    paths = [directory / str(number) for number in range(files)]
    for path, part in zip(paths, np.array_split(keys, files), strict=True):
        part.tofile(path)
    return paths


@pytest.mark.parametrize(("chunk", "partition"), [(1 << 20, 1 << 21), (37, 100)])
@pytest.mark.parametrize("different_ones", [1, 40, 1000, 1 << 20])
def test_find_copies_equals_sets(tmp_path, monkeypatch, chunk, partition, different_ones):
    monkeypatch.setattr(duplicates, "CHUNK", chunk)
    monkeypatch.setattr(duplicates, "PARTITION", partition)
    rng = np.random.default_rng(1)
    hashes = rng.choice(rng.integers(0, 1 << 63, different_ones, dtype=np.uint64), 1000)
    splits = rng.choice(3, 1000, p=[0.8, 0.1, 0.1])
    found = find_copies(key_files(tmp_path, hashes, splits), tmp_path / "copies.npy")
    held = [set(hashes[splits >= split].tolist()) for split in (1, 2)] + [set()]  # by later splits
    expected = [hash in held[split] for hash, split in zip(hashes.tolist(), splits, strict=True)]
    assert np.load(tmp_path / "copies.npy").tolist() == expected
    assert found.left_out == np.bincount(splits[expected], minlength=3).tolist()
    kept = [hashes[(splits == split) & ~np.array(expected)].tolist() for split in range(3)]
    assert found.repeated == [len(part) - len(set(part)) for part in kept]


def test_find_copies_reads_each_key_twice_in_one_partitions_memory(tmp_path, monkeypatch):
    """However many partitions: 4 and 32. The keys' own file is read once, and the partition that it goes to."""
    monkeypatch.setattr(duplicates, "CHUNK", 1 << 12)
    monkeypatch.setattr(duplicates, "PARTITION", 1 << 12)
    monkeypatch.setattr(prepare_splits, "HELD_ROWS", 1 << 12)
    peaks, reads = [], []
    for records in (1 << 14, 1 << 17):
        hashes = np.random.default_rng(0).integers(0, (1 << 64) - 1, records, dtype=np.uint64)
        files = key_files(tmp_path, hashes, np.zeros(records, int))
        del hashes
        before = bytes_read()
        tracemalloc.start()
        find_copies(files, tmp_path / "copies.npy")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        reads.append((bytes_read() - before) / records)
    assert peaks[1] < 1.5 * peaks[0]
    assert max(reads) < 1.15 * 2 * KEY.itemsize, reads


def bytes_read() -> int:
    """By this process, from files, cached or not."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


def with_copies(seed: int = 0) -> list[tuple[str, str]]:
    """1,200 records of 900 sequences: some twice or more, some copies in lower case or with blanks and a stop."""
    rng = np.random.default_rng(seed)
    texts = [text for _, text in proteins(900, seed)]
    copies = [texts[place] for place in rng.integers(0, 900, 300)]
    copies = [(text, text.lower(), f" {text[:3]} {text[3:]}*")[number % 3] for number, text in enumerate(copies)]
    texts += copies
    rng.shuffle(texts)
    return [(f"P{number}", text) for number, text in enumerate(texts)]


def residues(text: str) -> str:
    return text.replace(" ", "").rstrip("*").upper()


@pytest.mark.parametrize("flags", [(), ("--max_seq_length", 12), ("--train_size", 300)])
def test_tokenize_keeps_copies_of_held_out_proteins_out_of_training(tmp_path, caplog, flags):
    rows = with_copies()
    texts = {name: residues(text) for name, text in rows}
    for number in range(3):
        write_csv(tmp_path / "csv", rows[number * 400 : number * 400 + 400], f"x{number:03d}.csv")
    arguments = ("--input_dir", tmp_path / "csv", *SIZES, *flags)
    with caplog.at_level("INFO"):
        call(TOKENIZE, *arguments, "--output_dir", tmp_path / "out")
    found = load(tmp_path / "out")
    names = {split: [name for name, _ in part] for split, part in found.items()}
    sequences = {split: [texts[name] for name in part] for split, part in names.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not set(sequences[one]) & set(sequences[other])
    for part in found.values():  # the tokens are those of the record, and in the order of the input
        assert all(ids[1:-1] == encode(texts[name]).tolist()[1:-1][: len(ids) - 2] for name, ids in part)
        assert [name for name, _ in part] == sorted((name for name, _ in part), key=lambda name: int(name[1:]))

    report = json.loads((tmp_path / "out/arrow/data_report.json").read_text())
    asked = {"train": 300 if "--train_size" in flags else 1080, "validation": 60, "test": 60}
    assert {split: asked[split] - len(part) for split, part in names.items()} == report["copies_left_out"]
    assert {split: len(part) - len(set(part)) for split, part in sequences.items()} == report["duplicates_kept"]
    assert report["copies_left_out"]["train"] > 10 * bool(not flags)
    assert report["copies_left_out"]["test"] == 0
    if "--train_size" not in flags:  # every record is in a split: what is missing is what has to be
        held = set(sequences["validation"]) | set(sequences["test"])
        assert {name for name in texts if texts[name] not in held} == set(names["train"])
    assert (
        f"{report['copies_left_out']['train']} train records are exact copies of held-out ones: left out"
        in caplog.text
    )
    lengths = [len(text) for text in itertools.chain(*sequences.values())]
    assert report["residues"]["median"] == np.quantile(lengths, 0.5, method="inverted_cdf")
    assert report["tokens"] == sum(len(ids) for part in found.values() for _, ids in part)
    assert report["records"] == len(lengths)
    assert report["unknown_characters"] == 0
    assert json.loads((tmp_path / "out/arrow/.complete.json").read_text())["results"] == report


def test_tokenize_drops_copies_from_chunks(tmp_path):
    rows = with_copies()
    write_csv(tmp_path / "csv", rows)
    for name, flags in (("lines", ()), ("chunks", ("--line_by_line", "False", "--max_seq_length", 50))):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", *SIZES, *flags, "--output_dir", tmp_path / name)
    lines, chunks = load(tmp_path / "lines"), load(tmp_path / "chunks")
    for split in SPLITS:
        tokens = [list(itertools.chain(*(ids for _, ids in splits[split]))) for splits in (lines, chunks)]
        assert tokens[0] == tokens[1]


def test_tokenize_indexes_clusters_without_copies(tmp_path):
    """A table that puts equal sequences into different clusters."""
    texts = [f"MK{different(number)}" for number in range(600)]
    for number in range(0, 600, 5):
        texts[number] = texts[(number * 7 + 3) % 600]
    (tmp_path / "table.tsv").write_text("".join(f"UniRef50_{i // 3}\tUniRef90_{i}\n" for i in range(600)))
    rows = [(f"UniRef90_{i}", text) for i, text in enumerate(texts)]
    order = np.random.default_rng(0).permutation(600)
    for number, part in enumerate(np.array_split(order, 3)):
        write_csv(tmp_path / "csv", [rows[i] for i in part], f"x{number:03d}.csv")
    flags = (*SIZES, "--cluster_table", tmp_path / "table.tsv")
    call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", *flags)
    numbers = {split: [int(name[9:]) for name, _ in part] for split, part in load(tmp_path / "out").items()}
    sequences = [{texts[number] for number in part} for part in numbers.values()]
    assert not any(one & other for one, other in itertools.combinations(sequences, 2))
    results = json.loads((tmp_path / "out/arrow/.complete.json").read_text())["results"]
    assert sum(results["copies_left_out"].values()) == 600 - sum(map(len, numbers.values())) > 10
    for split, part in numbers.items():
        expected = defaultdict(list)
        for record, number in enumerate(part):
            expected[number // 3].append(record)
        index = open_clusters(tmp_path / "out/arrow" / split, len(part))
        parts = np.split(np.array(index.members), np.array(index.offsets)[1:-1])
        assert [members.tolist() for members in parts] == list(expected.values())
        assert results[f"{split}_clusters"] == len(expected)


def test_tokenize_refuses_a_split_of_copies_alone(tmp_path):
    write_csv(tmp_path / "csv", [(f"P{number}", "MKVLA") for number in range(50)])
    with pytest.raises(UserError, match="all 46 train records are exact copies of held-out ones: hold out fewer"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out" / "arrow").exists()


def test_tokenize_encodes_again_after_an_earlier_version(tmp_path, monkeypatch):
    """Its journal has other notes, its pieces no hashes, and its splits hold copies."""
    write_csv(tmp_path / "csv", with_copies())
    arguments = ("--input_dir", tmp_path / "csv", *SIZES)
    call(TOKENIZE, *arguments, "--output_dir", tmp_path / "undisturbed")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tokenize_proteins, "write_dataset_dict", stop)
        with pytest.raises(KeyboardInterrupt):
            call(TOKENIZE, *arguments, "--output_dir", tmp_path / "out")
    journal = tmp_path / "out/.building/journal.jsonl"
    notes = (
        journal.read_text()
        .replace('"encoded 0"', '"file 0"')
        .replace('"finished ', '"split ')
        .splitlines(keepends=True)
    )
    assert sum('"split ' in line for line in notes) == 3
    journal.write_text("".join(line for line in notes if "duplicates" not in line and "without copies" not in line))
    (tmp_path / "out/.building/scratch/file-00000/keys").unlink()
    call(TOKENIZE, *arguments, "--output_dir", tmp_path / "out")
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "undisturbed")


def test_length_quantiles_are_existing_lengths():
    lengths = np.random.default_rng(0).integers(1, 60, 997)
    found = length_quantiles(Counter(lengths.tolist()))
    for name, share in QUANTILES.items():
        assert found[name] == np.quantile(lengths, share, method="inverted_cdf")
    assert (found["min"], found["max"]) == (lengths.min(), lengths.max())
    assert found["mean"] == pytest.approx(lengths.mean(), abs=0.05)
    assert length_quantiles(Counter({7: 1}))["99%"] == 7
