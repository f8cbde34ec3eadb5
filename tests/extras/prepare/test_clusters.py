"""Sampling by clusters: the table's formats, splits and index against brute force, and a run."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from common.cli import UserError
from common.data.clusters import cluster_numbers, open_clusters
from extras.prepare import splits, tokenize_proteins
from extras.prepare.cluster_splits import read_table, without_prefix
from extras.prepare.sources.records import hash_bytes, hash_names
from extras.prepare.splits import _fitting
from tests.data_fixtures import TOKENIZE, call, different, everything_in
from tests.training_fixtures import losses, train

# --- names and tables


def test_hash_names_equals_hash_bytes():
    names = ["", "a", "a\0", "\0", "12345678", "123456789", "UniRef90_A0A009", "UniRef90_A0A00A", "x" * 1000, "é"]
    hashes = hash_names(pa.array(names))
    assert len(set(hashes.tolist())) == len(names)
    assert np.array_equal(hash_names(pa.array(["head", *names, "tail"]).slice(1, len(names))), hashes)
    for name, found in zip(names, hashes, strict=True):
        raw = np.frombuffer(name.encode(), np.uint8)
        assert hash_bytes(raw, np.array([0, len(raw)])) == found
    many = hash_names(pa.array([f"UniRef90_{i}" for i in range(200_000)]))
    assert len(np.unique(many)) == 200_000
    assert np.bincount((many >> np.uint64(56)).astype(int), minlength=256).std() < 4 * (200_000 / 256) ** 0.5


PAIRS = [(f"UniRef50_{i // 3}", f"UniRef90_{i}") for i in range(1000)]
LINES = {sep: "".join(f"{a}{sep}{b}\n" for a, b in PAIRS).encode() for sep in ",\t"}
ROWS = "".join(f"x,{b},{a}\r\n" for a, b in PAIRS).encode()


def parquet(path):
    clusters, members = zip(*PAIRS, strict=True)
    table = pa.table(
        {"ur90_id": members, "sequence": ["MK"] * len(PAIRS), "ur50_id": pa.array(clusters).dictionary_encode()}
    )
    pa.parquet.write_table(table, path)


@pytest.mark.parametrize(
    "write",
    [
        parquet,
        lambda path: path.write_bytes(b"ur50_id,ur90_id\n" + LINES[","]),
        lambda path: path.write_bytes(b'\xef\xbb\xbfname,"ur90_id","ur50_id"\r\n' + ROWS),
        lambda path: path.write_bytes(b"ur50_id\tur90_id\n" + LINES["\t"]),
        lambda path: path.write_bytes(LINES["\t"]),
        lambda path: path.write_bytes(LINES[","].rstrip()),
        lambda path: path.write_bytes(gzip.compress(LINES["\t"])),
        lambda path: path.write_bytes(gzip.compress(LINES["\t"][:9000]) + gzip.compress(LINES["\t"][9000:])),
    ],
)
def test_read_table_accepts_every_format(tmp_path, write):
    write(tmp_path / "table")
    found = [np.concatenate(part) for part in zip(*read_table(tmp_path / "table"), strict=True)]
    clusters, members = map(pa.array, zip(*PAIRS, strict=True))
    for hashes, names in zip(found, (clusters, without_prefix(members)), strict=True):
        assert np.array_equal(hashes, hash_names(names))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cluster,member\n" + LINES[","], "its first line is 'cluster,member': expected the columns ur50_id"),
        (b"UniRef90_1\tUniRef50_1\n", "its first line is"),
        (b"", "its first line is ''"),
        (b"ur50_id,ur90_id\nUniRef50_1,UniRef90_1\nUniRef50_2,\n", "row 2: a name is empty"),
        (b"ur50_id,ur90_id\nUniRef50_1,UniRef90_1,3\n", "Expected 2 columns, got 3"),
        (gzip.compress(LINES[","])[:-3000], "table"),
        (b"PAR1 and nothing more", "table"),
    ],
)
def test_read_table_refuses_bad_tables_in_one_line(tmp_path, content, message):
    (tmp_path / "table").write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(read_table(tmp_path / "table"))
    assert str(tmp_path / "table") in str(error.value)
    assert "\n" not in str(error.value)


def test_read_table_refuses_parquet_without_the_columns(tmp_path):
    pa.parquet.write_table(pa.table({"id": ["a"], "cluster": ["b"]}), tmp_path / "table")
    with pytest.raises(UserError, match="its columns are id, cluster: expected the columns ur50_id and ur90_id"):
        list(read_table(tmp_path / "table"))
    with pytest.raises(UserError, match="no such file"):
        list(read_table(tmp_path / "absent"))


# --- splits and index


def make_input(directory, count=3000, seed=0):
    """CSV files and a table: clusters of 1 to 40 members, some records unknown to it, some ids twice.

    Returns {name: cluster}.
    """
    rng = np.random.default_rng(seed)
    clusters = {}
    sizes = rng.geometric(0.4, count) * rng.choice([1, 1, 1, 10], count)
    members = [(f"UniRef50_C{c}", f"UniRef90_{c}_{i}") for c, size in enumerate(sizes) for i in range(size)][:count]
    rng.shuffle(members)
    names = [member for _, member in members]
    unknown = set(names[::17])
    rows = [*members, (f"UniRef50_C{count}", "UniRef90_not_among_the_records"), ("UniRef50_again", names[1])]
    directory.mkdir()
    with open(directory / "table.tsv", "w") as file:
        file.writelines(f"{cluster}\t{member}\n" for cluster, member in rows if member not in unknown)
    for cluster, member in members:
        clusters[member] = member if member in unknown else cluster
    names += names[:50]  # again
    rng.shuffle(names)
    for number, part in enumerate(np.array_split(names, 3)):
        with open(directory / f"x{number:03d}.csv", "w") as file:
            file.write("id,text\n")
            lines = (f"{name},MK{different(number * 10_000 + n)}" for n, name in enumerate(part))
            file.writelines(f"{line}{'LAG' * int(rng.integers(1, 20))}\n" for line in lines)
    return clusters


def tokenize(source, out, *flags):
    sizes = ("--validation_size", 200, "--test_size", 100)
    call(TOKENIZE, "--input_dir", source, "--output_dir", out, *sizes, "--cluster_table", source / "table.tsv", *flags)
    return {split: rows["id"] for split, rows in datasets.load_from_disk(str(out / "arrow")).items()}


def test_split_by_clusters_equals_brute_force(tmp_path, caplog):
    clusters = make_input(tmp_path / "csv")
    with caplog.at_level("INFO"):
        names = tokenize(tmp_path / "csv", tmp_path / "out")
    assert sum(map(len, names.values())) == 3050
    assert [len(names[split]) for split in ("validation", "test")] == [200, 100]  # there are clusters of one
    found = {split: {clusters[name] for name in part} for split, part in names.items()}
    for one, other in itertools.combinations(found.values(), 2):
        assert not one & other
    in_file_order = [line.split(",")[0] for i in range(3) for line in (tmp_path / f"csv/x00{i}.csv").open()]
    training = set(names["train"])  # an id that is there twice is in one split
    assert list(names["train"]) == [name for name in in_file_order if name in training]

    results = json.loads((tmp_path / "out/arrow/.complete.json").read_text())["results"]
    for split, part in names.items():
        expected = defaultdict(list)
        for record, name in enumerate(part):
            expected[clusters[name]].append(record)
        index = open_clusters(tmp_path / "out/arrow" / split, len(part))
        parts = np.split(np.array(index.members), np.array(index.offsets)[1:-1])
        assert [members.tolist() for members in parts] == list(expected.values())  # in the order of first records
        assert results[f"{split}_clusters"] == len(expected)
        in_order = {cluster: number for number, cluster in enumerate(expected)}
        assert index.numbers().tolist() == [in_order[clusters[name]] for name in part]
    unknown = sum(clusters[name] == name for part in names.values() for name in part)
    assert f"{unknown} of 3,050 records are not in" in caplog.text
    assert "1 rows put a member into a second cluster" in caplog.text
    assert results["not_in_cluster_table"] == unknown
    assert results["train"] == len(names["train"])


def test_split_by_clusters_depends_on_seed_not_on_memory(tmp_path, monkeypatch):
    make_input(tmp_path / "csv")
    first = tokenize(tmp_path / "csv", tmp_path / "a")
    for name in ("HELD_ROWS", "CHUNK"):
        monkeypatch.setattr(splits, name, 37)
    tokenize(tmp_path / "csv", tmp_path / "b", "--preprocessing_num_workers", 1)
    assert everything_in(tmp_path / "a") == everything_in(tmp_path / "b")
    assert tokenize(tmp_path / "csv", tmp_path / "c", "--seed", 7)["validation"] != first["validation"]
    smaller = tokenize(tmp_path / "csv", tmp_path / "d", "--train_size", 500)
    assert [len(part) for part in smaller.values()] == [500, 200, 100]
    open_clusters(tmp_path / "d/arrow/train", 500)


def test_split_by_clusters_does_not_resume_an_earlier_versions_work(tmp_path, monkeypatch, caplog):
    """It drew other clusters: only its finished outputs are kept."""
    make_input(tmp_path / "csv", count=600)
    tokenize(tmp_path / "csv", tmp_path / "undisturbed")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tokenize_proteins, "publish_indices", stop)
        with pytest.raises(KeyboardInterrupt):
            tokenize(tmp_path / "csv", tmp_path / "out")
    journal = tmp_path / "out/.building/journal.jsonl"
    begun, *rest = journal.read_text().splitlines(keepends=True)
    key, of = json.loads(begun)
    del of["made_from"]["held_out_clusters"]
    journal.write_text(json.dumps([key, of]) + "\n" + "".join(rest))
    tokenize(tmp_path / "csv", tmp_path / "out")
    assert "removing the work of an interrupted run for other input or arguments" in caplog.text
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "undisturbed")


def test_split_by_clusters_without_a_test_split(tmp_path):
    make_input(tmp_path / "csv", count=600)
    tokenize(tmp_path / "csv", tmp_path / "out", "--test_size", 0)
    assert cluster_numbers(tmp_path / "out/arrow/test", 0).shape == (0,)
    assert cluster_numbers(tmp_path / "out/arrow/validation", 200).max() > 0


def test_draw_splits_is_uniform_over_cluster_sizes(tmp_path):
    sizes = np.arange(8000) % 4 + 1
    names = hash_names(pa.array([f"UniRef50_{i}" for i in range(8000)]))
    held_out = np.zeros(8000)
    for seed in range(5):
        scratch = tmp_path / str(seed)
        joined = splits.join([np.repeat(names, sizes)], [], seed, scratch)
        assert (joined.missing, joined.repeated) == (20_000, 0)
        labels = splits.draw_splits(joined.buckets, (10_000, 8000, 2000), True, scratch / "labels.npy")
        by_cluster = np.split(np.array(labels), np.cumsum(sizes)[:-1])
        assert all(len(set(part.tolist())) == 1 for part in by_cluster)
        assert np.bincount(labels).tolist() == [10_000, 8000, 2000]
        held_out += [part[0] == splits.VALIDATION for part in by_cluster]
    for size in range(1, 5):
        assert held_out[sizes == size].mean() / 5 == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("free", [0, 1, 7, 100, 10_000])
def test_fitting_is_greedy_and_exact(free):
    sizes = np.random.default_rng(0).integers(1, 30, 300)
    left, expected = free, []
    for i, size in enumerate(sizes):
        if size <= left:
            expected.append(i)
            left -= size
    assert _fitting(sizes, np.arange(300), free).tolist() == expected


def test_draw_splits_refuses_a_split_smaller_than_every_cluster(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/table.tsv").write_text("".join(f"UniRef50_A\tUniRef90_{i}\n" for i in range(20)))
    (tmp_path / "csv/x000.csv").write_text("id,text\n" + "".join(f"UniRef90_{i},MKV\n" for i in range(20)))
    with pytest.raises(UserError, match="validation, 1 records: no cluster is small enough .* --validation_size"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out",
             "--cluster_table", tmp_path / "csv/table.tsv", "--validation_size", 1, "--test_size", 0)  # fmt: skip
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--cluster_table needs --line_by_line True"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--cluster_table", "t", "--line_by_line", "False")
    with pytest.raises(UserError, match="no such file"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--cluster_table", "absent")


def test_cluster_numbers_of_the_first_records(tmp_path):
    assert cluster_numbers(tmp_path, 3) is None  # an earlier version's directory, or splits drawn one by one
    (tmp_path / "clusters").mkdir()
    np.save(tmp_path / "clusters/offsets.npy", np.array([0, 2, 3, 6], np.uint32))
    np.save(tmp_path / "clusters/members.npy", np.array([0, 4, 1, 2, 3, 5], np.uint32))
    assert cluster_numbers(tmp_path, 6).tolist() == [0, 1, 2, 2, 0, 2]
    assert cluster_numbers(tmp_path, 5).tolist() == [0, 1, 2, 2, 0]
    with pytest.raises(UserError, match="clusters of 6 records, but 7 are in use: tokenise again"):
        cluster_numbers(tmp_path, 7)


def test_write_indices_in_64_bits_where_records_need_it(tmp_path):
    """Above a limit int64, with the values that uint32 has below it."""
    rng = np.random.default_rng(0)
    joined = splits.Buckets(tmp_path / "joined")
    joined.add(np.repeat(hash_names(pa.array(map(str, range(40)))), 5), rng.permutation(200))
    joined.flush()
    labels = splits.draw_splits(joined, (160, 20, 20), True, tmp_path / "labels.npy")
    written = {}
    for limit, dtype in ((201, np.uint32), (200, np.int64)):
        paths = [tmp_path / str(limit) / split for split in splits.SPLITS]
        for path in paths:
            path.mkdir(parents=True)
        splits.write_indices(joined, labels, paths, tmp_path, most_in_32_bits=limit)
        written[dtype] = [np.load(path / f"{name}.npy") for path in paths for name in ("offsets", "members")]
        assert {array.dtype for array in written[dtype]} == {np.dtype(dtype)}
    assert all(map(np.array_equal, *written.values()))
    (tmp_path / "200/train").rename(tmp_path / "200/clusters")
    (tmp_path / "201/train").rename(tmp_path / "201/clusters")
    wide, narrow = (open_clusters(tmp_path / name, int((labels == 0).sum())) for name in ("200", "201"))
    assert np.array_equal(wide.numbers(), narrow.numbers())
    assert np.array_equal(wide.draw(np.arange(len(wide)), 1), narrow.draw(np.arange(len(wide)), 1))


def test_train_by_clusters_resumes(dataset, tmp_path):
    make_input(tmp_path / "csv", count=2000)
    names = tokenize(tmp_path / "csv", tmp_path / "out")["train"]
    splits = tmp_path / "out" / "arrow"
    flags = {"sample_clusters": True, "logging_steps": 2, "max_steps": None, "packs_per_step": 7}
    said = train(splits, tmp_path / "whole", num_train_epochs=1, **flags)
    assert "Sampling clusters, then a member of each: " in said
    train(splits, tmp_path / "parts", num_train_epochs=1, stop_at_step=4, **flags)
    train(splits, tmp_path / "parts", num_train_epochs=1, **flags | {"sample_clusters": "auto"})
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    train(splits, tmp_path / "shared", 2, script="train_ddp_cp.py", num_train_epochs=1, **flags)
    assert losses(tmp_path / "shared") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)
    state = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())
    assert state["sequences"] == len(open_clusters(splits / "train", len(names))) < len(names)
    results = json.loads((tmp_path / "whole" / "train_results.json").read_text())
    assert (results["train_samples"], results["epoch"]) == (state["sequences"], 1.0)
    said = train(splits, tmp_path / "parts", num_train_epochs=1, expect=2, **flags | {"sample_clusters": False})
    assert "sample_clusters '" in said
    said = train(dataset, tmp_path / "none", expect=2, **flags)
    assert "no clusters: tokenise with --cluster_table" in said


OTHERS = "is it the table of these proteins, and of the same release"


@pytest.mark.parametrize(
    ("record", "table", "message"),
    [
        ("UniRef90_{}", "ur50_id\tur90_id\n", OTHERS),
        ("UniRef90_{}", ["UniRef50_A{0}\tUniRef90_X{0}\n"], OTHERS),
        ("UniRef90_{}", ["UniRef50_A{0}\tUniRef90_{0}\n"] * 10, OTHERS),
        ("UniRef90_{}", ["UniRef50_A{0}\tUniRef90_{0}\n"] * 17, OTHERS),
        (
            "UniRef90_{}",
            "ur50_id\tur90_id\n" + "".join(f"UniRef90_{i}\tUniRef50_{i}\n" for i in range(20)),
            "20 of the first 20 would be there if its columns were in the order cluster, member",
        ),
        ("sp|P{}|A_HUMAN", ["UniRef50_A{0}\tUniRef90_P{0}\n"] * 20, "all but the accession of .* the records' ids"),
        ("P{}.1", ["UniRef50_A{0}\tUniRef90_P{0}\n"] * 20, "20 of .* if the version, as '.1', .* the records' ids"),
        ("NP_{}", ["UniRef50_A{0}\tUniRef90_NP_{0}.2\n"] * 20, "the version, as '.1', .* from the table's names"),
        ("P{}-2", ["UniRef50_A{0}\tUniRef90_P{0}\n"] * 20, "the isoform, as '-2', .* from the records' ids"),
        ("P{}", ["c{0}\tUniRef100_P{0}\n"] * 20, "if 'UniRef50_' or 'UniRef100_' .* the table's names"),
        ("tr|P{}|A", ["c{0}\tUniRef100_P{0}.3\n"] * 20, "20 of .* if both had accessions alone"),
    ],
)
def test_split_by_clusters_refuses_a_table_of_other_names(tmp_path, record, table, message):
    """Each record would be a cluster of its own, and relatives stand in training and validation."""
    (tmp_path / "csv").mkdir()
    if isinstance(table, list):
        table = "ur50_id\tur90_id\n" + "".join(line.format(i) for i, line in enumerate(table))
    (tmp_path / "csv/table.tsv").write_text(table)
    (tmp_path / "csv/x000.csv").write_text("id,text\n" + "".join(f"{record.format(i)},MKV\n" for i in range(20)))
    with pytest.raises(UserError, match=rf"names only \d+ of the 20 records: .*{message}") as error:
        tokenize(tmp_path / "csv", tmp_path / "out", "--validation_size", 2, "--test_size", 1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_split_by_clusters_takes_names_with_and_without_uniref90(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/table.tsv").write_text("".join(f"UniRef50_A{i // 2}\tUniRef90_P{i}\n" for i in range(40)))
    lines = (f"P{i},MK{different(i)}\n" for i in range(44))  # 4 of 44 are not in the table
    (tmp_path / "csv/x000.csv").write_text("id,text\n" + "".join(lines))
    tokenize(tmp_path / "csv", tmp_path / "out", "--validation_size", 4, "--test_size", 4)
    report = json.loads((tmp_path / "out/arrow/data_report.json").read_text())
    assert (report["not_in_cluster_table"], report["records"]) == (4, 44)


def test_read_table_accepts_mmseqs2_output(tmp_path):
    """Representative and member, tab-separated, without a header; a cluster's first member is its representative."""
    (tmp_path / "csv").mkdir()
    pairs = [(f"P{i // 4 * 4}.1", f"P{i}.1") for i in range(40)]
    (tmp_path / "clustered_cluster.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (tmp_path / "csv/table.tsv").symlink_to(tmp_path / "clustered_cluster.tsv")
    (tmp_path / "csv/x000.csv").write_text("id,text\n" + "".join(f"P{i}.1,MK{different(i)}\n" for i in range(40)))
    names = tokenize(tmp_path / "csv", tmp_path / "out", "--validation_size", 8, "--test_size", 4)
    clusters = {split: {int(name[1:-2]) // 4 for name in part} for split, part in names.items()}
    assert {split: len(of) for split, of in clusters.items()} == {"train": 7, "validation": 2, "test": 1}
    assert len(set().union(*clusters.values())) == 10, "no cluster on two sides"


@pytest.mark.parametrize(("of_records", "of_table"), [("", "UniRef90_"), ("UniRef90_", "UniRef90_")])
def test_without_prefix_matches_names_with_and_without_it(tmp_path, of_records, of_table, caplog):
    (tmp_path / "csv").mkdir()
    rows = "".join(f"UniRef50_{i // 2}\t{of_table}{i}\n" for i in range(20))
    (tmp_path / "csv/table.tsv").write_text("ur50_id\tur90_id\n" + rows)
    lines = "".join(f"{of_records}{i},MK{different(i)}\n" for i in range(20))
    (tmp_path / "csv/x000.csv").write_text("id,text\n" + lines)
    names = tokenize(tmp_path / "csv", tmp_path / "out", "--validation_size", 2, "--test_size", 2)
    assert "are not in" not in caplog.text
    assert {
        split: len({int(name.removeprefix(of_records)) // 2 for name in part}) for split, part in names.items()
    } == {"train": 8, "validation": 1, "test": 1}
