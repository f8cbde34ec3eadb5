"""Step 1 in parts: the bytes of one machine, whatever was killed; parts of different runs are refused."""

import os
import random
import re

import pyarrow as pa
import pyarrow.parquet
import pytest

from common.cli import UserError
from extras.prepare import shards, tokenize_proteins
from extras.prepare.encode import FileEncoder
from extras.prepare.output_directory import read_record
from tests.data_fixtures import DOWNLOAD, TOKENIZE, call, different, everything_in, proteins, write_csv, write_fasta
from tests.extras.prepare.test_clusters import make_input

SIZES = ("--validation_size", 60, "--test_size", 40)
FILES = 5


@pytest.fixture
def source(tmp_path):
    """Five files of different sizes, the last without a record, with copies across files and a bad record."""
    rows = proteins(1500)
    rows += [(f"again-{number}", text) for number, (_, text) in enumerate(rows[:200])]
    random.Random(3).shuffle(rows)
    rows[700] = ("bad", "MK1234567")
    bounds = [0, 50, 51, 900, len(rows), len(rows)]
    for number in range(FILES):
        write_csv(tmp_path / "csv", rows[bounds[number] : bounds[number + 1]], f"x{number:03d}.csv")
    return tmp_path / "csv"


def step_1(source, out, *flags) -> None:
    call(TOKENIZE, "--input_dir", source, "--output_dir", out, *SIZES, "--on_bad_record", "skip", *flags)


def run_shards(source, out, count, *flags) -> None:
    for index in random.Random(count).sample(range(count), count):
        step_1(source, out, "--shard", f"{index}/{count}", *flags)


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    "flags",
    [(), ("--train_size", 100), ("--max_seq_length", 40, "--line_by_line", "False"), ("--max_seq_length", 30)],
    ids=["plain", "small", "chunks", "truncated"],
)
def test_merged_shards_are_the_bytes_of_one_machine(source, tmp_path, count, flags):
    step_1(source, tmp_path / "one", *flags)
    run_shards(source, tmp_path / "many", count, *flags)
    step_1(source, tmp_path / "many", "--merge", count, *flags)
    of_one, of_many = (everything_in(tmp_path / name / "arrow") for name in ("one", "many"))
    if "--train_size" in flags:  # the pass that counts does not see what is unknown in records that are not used
        of_one, of_many = (
            {name: data for name, data in of.items() if not name.endswith(".json")} for of in (of_one, of_many)
        )
    assert of_many == of_one


@pytest.mark.parametrize(
    "flags", [(), ("--no_shuffle",), ("--save_parquet", "True", "--max_records_per_partition", 100)]
)
def test_merged_shards_of_step_0_are_the_bytes_of_one_machine(source, tmp_path, monkeypatch, flags):
    """Of files of several formats, one of them with clusters; the first shard is killed in its second file."""
    write_fasta(tmp_path / "more.fasta", proteins(300, seed=5))
    ids, texts = zip(*proteins(200, seed=6), strict=True)
    table = {"ur50_id": [f"C{n // 3}" for n in range(200)], "ur90_id": ids, "sequence": texts}
    pyarrow.parquet.write_table(pa.table(table), tmp_path / "more.parquet")
    files = [*sorted(source.iterdir()), tmp_path / "more.parquet", tmp_path / "more.fasta"]

    def step_0(out, *more) -> None:
        call(DOWNLOAD, "--source", *files, "--output_dir", out, "--on_bad_record", "skip", *flags, *more)

    step_0(tmp_path / "one")
    second = shards.lines_file(tmp_path / "many/shards/0-of-2/.building/lines", 2)
    with monkeypatch.context() as patched:
        patched.setattr(DOWNLOAD, "write_lines", stop_at(second, 0, shards.write_lines))
        with pytest.raises(KeyboardInterrupt):
            step_0(tmp_path / "many", "--shard", "0/2")
    for index in (1, 0):
        step_0(tmp_path / "many", "--shard", f"{index}/2")
    step_0(tmp_path / "many", "--merge", 2)
    of_one, of_many = (
        {k: v for k, v in everything_in(tmp_path / n).items() if "shards" not in k} for n in ("one", "many")
    )
    assert of_many == of_one
    assert b"id,text,cluster" in of_one["csv/x000.csv"]


def test_merged_shards_of_clusters_are_the_bytes_of_one_machine(tmp_path):
    make_input(tmp_path / "csv", count=800)
    table = ("--cluster_table", tmp_path / "csv/table.tsv")
    step_1(tmp_path / "csv", tmp_path / "one", *table)
    run_shards(tmp_path / "csv", tmp_path / "many", 2, *table)
    step_1(tmp_path / "csv", tmp_path / "many", "--merge", 2, *table)
    assert everything_in(tmp_path / "many/arrow") == everything_in(tmp_path / "one/arrow")


def test_table_with_clusters_beside_fasta(tmp_path, caplog):
    """Records of FASTA are clusters of their own."""
    sequences = {"id": ["a", "b", "c"], "sequence": ["MKV", "MKVA", "MKVAL"], "cluster": ["C", "C", "D"]}
    (tmp_path / "in").mkdir()
    pyarrow.parquet.write_table(pa.table(sequences), tmp_path / "in/a.parquet")
    write_fasta(tmp_path / "in/b.fasta", proteins(60))
    step_1(tmp_path / "in", tmp_path / "one")
    run_shards(tmp_path / "in", tmp_path / "many", 2)
    step_1(tmp_path / "in", tmp_path / "many", "--merge", 2)
    assert everything_in(tmp_path / "many/arrow") == everything_in(tmp_path / "one/arrow")
    results = read_record(tmp_path / "one/arrow")["results"]
    assert sum(results[f"{split}_clusters"] for split in ("train", "validation", "test")) == 62
    assert results["not_in_cluster_table"] == 60
    assert "60 of 63 records are not in the input's column of clusters: each is a cluster of its own" in caplog.text


def test_column_of_clusters_splits_as_a_table_that_says_the_same(tmp_path, monkeypatch):
    clusters = make_input(tmp_path / "csv", count=800)
    step_1(tmp_path / "csv", tmp_path / "table", "--cluster_table", tmp_path / "csv/table.tsv")
    # A record that the table lacks is a cluster by its id, there without the prefix.
    named = {name: name.removeprefix("UniRef90_") if own == name else own for name, own in clusters.items()}
    with_clusters(monkeypatch, named)
    step_1(tmp_path / "csv", tmp_path / "column")
    for split in ("train", "validation", "test"):
        column, table = (everything_in(tmp_path / name / "arrow" / split) for name in ("column", "table"))
        assert column == table


def test_row_without_a_cluster_is_one_by_its_id(tmp_path, monkeypatch):
    write_csv(tmp_path / "csv", [(f"P{n // 2}", f"MK{different(n)}") for n in range(1000)])
    with_clusters(monkeypatch, {f"P{n}": None if n % 3 else "family" for n in range(500)})
    step_1(tmp_path / "csv", tmp_path / "out")
    results = read_record(tmp_path / "out/arrow")["results"]
    held_out = [results[f"{split}_largest_cluster"] for split in ("validation", "test")]
    assert (results["train_largest_cluster"], held_out) == (334, [2, 2])


def with_clusters(monkeypatch, clusters) -> None:
    """Give the rows of an input that has no such column the clusters of their ids."""
    rows_of = tokenize_proteins.rows_of

    def read(path, cleaner, args):
        for rows in rows_of(path, cleaner, args):
            named = pa.array([clusters[name] for name in rows.column("id").to_pylist()], pa.string())
            yield rows.append_column("cluster", named)

    monkeypatch.setattr(tokenize_proteins, "rows_of", read)
    monkeypatch.setattr(tokenize_proteins, "quick_to_count", lambda files: False)


@pytest.mark.parametrize("stopped_at", range(FILES))
def test_shard_killed_resumes_to_the_same_bytes(source, tmp_path, monkeypatch, stopped_at):
    """Also a merge that is killed between two files."""
    run_shards(source, tmp_path / "whole", 1)
    step_1(source, tmp_path / "whole", "--merge", 1)
    out, stops = tmp_path / "out", pytest.raises(KeyboardInterrupt)
    with monkeypatch.context() as patched, stops:
        patched.setattr(FileEncoder, "_make", stop_at(stopped_at, 3, FileEncoder._make))
        step_1(source, out, "--shard", "0/1")
    run_shards(source, out, 1)
    with monkeypatch.context() as patched, stops:
        patched.setattr(shards, "split_pieces", stop_at(stopped_at, 4, shards.split_pieces))
        step_1(source, out, "--merge", 1)
    step_1(source, tmp_path / "out", "--merge", 1)
    assert everything_in(tmp_path / "out/arrow") == everything_in(tmp_path / "whole/arrow")


def stop_at(number: int, place: int, function):
    """`function`, but with KeyboardInterrupt where the argument at `place` is the number."""

    def stopping(*arguments):
        if arguments[place] == number:
            raise KeyboardInterrupt
        return function(*arguments)

    return stopping


def test_merge_refuses_what_is_not_whole_or_of_another_run(source, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="--merge 3: 3 of 3 shards are not complete .* --shard I/3 for I = 0, 1, 2$"):
        step_1(source, out, "--merge", 3)
    for index in (0, 2):
        step_1(source, out, "--shard", f"{index}/3")
    with pytest.raises(UserError, match=r"1 of 3 shards are not complete .* I = 1$"):
        step_1(source, out, "--merge", 3)
    step_1(source, out, "--shard", "1/3", "--max_seq_length", 20)
    with pytest.raises(UserError, match=r"1-of-3 is of another run \(max_seq_length differ\): remove it"):
        step_1(source, out, "--merge", 3)
    step_1(source, out, "--shard", "1/3", "--overwrite")
    step_1(source, out, "--merge", 3)
    with open(source / "x001.csv", "a") as file:
        file.write("late,MKV\n")
    with pytest.raises(UserError, match=r"0-of-3 is of another run \(input differ\)"):
        step_1(source, out, "--merge", 3, "--overwrite")
    assert (out / "arrow/dataset_dict.json").exists(), "what was complete stays"


@pytest.mark.parametrize("step", [DOWNLOAD, TOKENIZE])
def test_shards_of_a_file_that_changed_but_for_its_size_are_refused(tmp_path, step):
    files = [write_fasta(tmp_path / f"{n}.fasta", proteins(40, seed=n)) for n in range(2)]

    def run(*flags) -> None:
        call(step, "--source", *files, "--output_dir", tmp_path / "out", *flags)

    for index in range(2):
        run("--shard", f"{index}/2")
    text = files[1].read_text()
    files[1].write_text(text[:-2] + ("A" if text[-2] != "A" else "C") + "\n")
    run("--shard", "0/2")
    with pytest.raises(UserError, match="1-of-2/.* was made from other input or arguments"):
        run("--shard", "1/2")
    with pytest.raises(UserError, match=r"1-of-2 is of another run \(content differ\)"):
        run("--merge", 2)
    run("--shard", "1/2", "--overwrite")
    run("--merge", 2)


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, path.stat().st_size - 8)])
@pytest.mark.parametrize("name", ["keys", "records/data-00000.arrow"])
def test_merge_refuses_a_shard_with_a_damaged_file_which_the_shard_makes_again(tmp_path, name, damage):
    source = write_fasta(tmp_path / "a.fasta", proteins(40))
    out = ("--source", source, "--output_dir", tmp_path / "out")
    call(TOKENIZE, *out, "--shard", "0/1")
    damage(tmp_path / "out/shards/0-of-1/encoded/file-00000" / name)
    with pytest.raises(
        UserError, match=rf"0-of-1/encoded: file-00000/{name} has .*: run --shard 0/1 again with --overwrite"
    ):
        call(TOKENIZE, *out, "--merge", 1)
    call(TOKENIZE, *out, "--shard", "0/1", "--overwrite")
    call(TOKENIZE, *out, "--merge", 1)


def test_more_shards_than_files_are_said(source, tmp_path, caplog):
    for index, is_empty in ((4, False), (5, True)):
        caplog.clear()
        step_1(source, tmp_path / "out", "--shard", f"{index}/6")
        assert (f"{FILES} files in 6 shards: this one is empty; fewer do as well" in caplog.text) == is_empty


@pytest.mark.parametrize("given", ["3/3", "a/3", "-1/3", "0", "0/0", "1/2/3"])
def test_shard_is_i_of_n(source, tmp_path, given):
    with pytest.raises(UserError, match=f"--shard {re.escape(given)}: give I/N"):
        step_1(source, tmp_path / "out", f"--shard={given}")
    assert not (tmp_path / "out").exists()
