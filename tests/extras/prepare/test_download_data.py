"""0.download_data.py and what it stands on: numbering, the shuffle, formats, restarts, bad input."""

import csv
import gzip
import itertools
import json
import re
import shutil
import subprocess

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from extras.prepare.output_directory import building, read_record
from extras.prepare.sample import write_sample
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.residues import Changes
from tests.data_fixtures import (
    DOWNLOAD,
    REAL_SAMPLE,
    call,
    command,
    everything_in,
    expect_error,
    needs_real_sample,
    numbered,
    write_fasta,
)
from tests.forked import run_script

SCRIPT = "0.download_data.py"


def rows_of(path) -> list[tuple[str, str]]:
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", "text"]
    return [tuple(row) for row in rows]


def partitions(directory) -> list[list[tuple[str, str]]]:
    return [rows_of(path) for path in sorted(directory.glob("*.csv"))]


# --- partitions


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 6, 7, 8, 14, 15])
def test_download_data_writes_partitions_of_exact_size(tmp_path, count, shuffle):
    records = numbered(count)
    source = write_fasta(tmp_path / "in.fasta", records)
    call(
        DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--max_records_per_partition", 7, "--shuffle", shuffle
    )
    names = sorted(path.name for path in (tmp_path / "csv").glob("*.csv"))
    assert names == [f"x{i:03d}.csv" for i in range(-(-count // 7))]
    parts = partitions(tmp_path / "csv")
    assert [len(part) for part in parts] == [7] * (count // 7) + [count % 7] * (count % 7 > 0)
    found = list(itertools.chain(*parts))
    assert sorted(found) == sorted(records)
    if not shuffle:
        assert found == records
    assert sorted(path.name for path in tmp_path.iterdir()) == ["csv", "in.fasta"]


def test_download_data_writes_plain_csv(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", [("a", "MKV"), ("b,c", "LA"), ('d"e', "G,GAVLIPFMWK")])
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--shuffle", "False")
    assert (tmp_path / "csv/x000.csv").read_bytes() == b'id,text\na,MKV\n"b,c",LA\n"d""e","G,GAVLIPFMWK"\n'
    simple = write_fasta(tmp_path / "simple.fasta", [("a", "MKV"), ("b", "la*gavlipfmwk")])
    call(DOWNLOAD, "--source", simple, "--output_dir", tmp_path / "simple", "--no_shuffle")
    assert (tmp_path / "simple/csv/x000.csv").read_bytes() == b"id,text\na,MKV\nb,la*gavlipfmwk\n"


def test_download_data_formats_have_the_same_records(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", numbered(25))
    flags = ["--save_arrow", "--save_fasta", "True", "--save_parquet=True", "--max_records_per_partition", 10]
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, *flags)
    parts = partitions(tmp_path / "csv")
    assert [len(part) for part in parts] == [10, 10, 5]
    for number, part in enumerate(parts):
        fasta = [(n.decode(), s.decode()) for n, s in read_fasta(tmp_path / f"fasta/x{number:03d}.fasta")]
        table = pq.read_table(tmp_path / f"parquet/x{number:03d}.parquet").to_pylist()
        assert fasta == [(row["id"], row["text"]) for row in table] == part
    dataset = datasets.load_from_disk(str(tmp_path / "arrow"))
    assert [(row["id"], row["text"]) for row in dataset] == list(itertools.chain(*parts))
    assert len(list((tmp_path / "arrow").glob("data-*-of-00003.arrow"))) == 3


def test_download_data_adds_formats_later(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", numbered(25))
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path)
    before = (tmp_path / "csv").stat().st_mtime_ns
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--save_fasta")
    assert [(n.decode(), s.decode()) for n, s in read_fasta(tmp_path / "fasta/x000.fasta")] == rows_of(
        tmp_path / "csv/x000.csv"
    )
    assert (tmp_path / "csv").stat().st_mtime_ns == before


# --- the shuffle


def test_download_data_shuffles_over_the_whole_input(tmp_path):
    """On an input sorted by length: partition membership is independent of the position, and mean lengths agree."""
    count, size = 4000, 400
    source = write_fasta(tmp_path / "in.fasta", numbered(count))
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--max_records_per_partition", size)
    parts = partitions(tmp_path / "csv")
    table = np.zeros((10, 10))
    for number, part in enumerate(parts):
        for name, _ in part:
            table[number, int(name[1:]) * 10 // count] += 1
    chi_square = ((table - 40) ** 2 / 40).sum()  # 81 degrees of freedom: mean 81, standard deviation 12.7
    assert 40 < chi_square < 135
    lengths = [np.array([len(text) for _, text in part]) for part in parts]
    whole = np.concatenate(lengths)
    for part in lengths:
        assert abs(part.mean() - whole.mean()) < 4 * whole.std() / np.sqrt(size)


def test_download_data_order_depends_on_seed(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", numbered(50))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        call(DOWNLOAD, "--source", source, "--output_dir", tmp_path / name, "--seed", seed)
    a, b, c = (partitions(tmp_path / name / "csv") for name in "abc")
    assert a == b != c


def every_record_once(tmp_path, source):
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path / "out", "--max_records_per_partition", 3000)
    expected = sorted((n.decode(), s.decode()) for n, s in read_fasta(source))
    assert sorted(itertools.chain(*partitions(tmp_path / "out/csv"))) == expected


@needs_real_sample
def test_download_data_on_the_real_sample(tmp_path):
    every_record_once(tmp_path, REAL_SAMPLE)


def test_download_data_on_a_generated_sample(tmp_path):
    write_sample(tmp_path / "s.fasta.gz", num_proteins=700)
    every_record_once(tmp_path, tmp_path / "s.fasta.gz")


# --- started again


def test_download_data_reuses_its_output_and_refuses_another(tmp_path, caplog):
    source = write_fasta(tmp_path / "in.fasta", numbered(30))
    out = tmp_path / "out"
    same = ("--source", source, "--output_dir", out)
    call(DOWNLOAD, *same)
    first, inode = everything_in(out), (out / "csv/x000.csv").stat().st_ino
    with caplog.at_level("INFO"):
        call(DOWNLOAD, *same, "--max_records_per_partition", 500_000)
    assert "nothing to do" in caplog.text
    assert (out / "csv/x000.csv").stat().st_ino == inode

    with pytest.raises(UserError, match="csv: was made from other input or arguments: give --overwrite"):
        call(DOWNLOAD, *same, "--seed", 7)
    write_fasta(source, numbered(31))
    with pytest.raises(UserError, match="give --overwrite"):
        call(DOWNLOAD, *same)
    assert everything_in(out) == first

    call(DOWNLOAD, *same, "--overwrite")
    assert sum(map(len, partitions(out / "csv"))) == 31
    assert [path.name for path in out.iterdir()] == ["csv"]
    found = json.loads((out / "csv/.complete.json").read_text())["results"]
    assert (found["records"], found["skipped_records"], found["changes"]) == (31, 0, Changes().state)


def test_download_data_refuses_a_foreign_directory(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", numbered(3))
    (tmp_path / "csv").mkdir()
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path)  # an empty one is taken
    shutil.rmtree(tmp_path / "csv")
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv/mine.csv").write_text("id,text\n")
    with pytest.raises(UserError, match="exists and is not from this script"):
        call(DOWNLOAD, "--source", source, "--output_dir", tmp_path)
    assert (tmp_path / "csv/mine.csv").exists()


def test_download_data_failed_overwrite_keeps_the_old_output(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", numbered(3))
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path)
    before = everything_in(tmp_path / "csv")
    source.write_text(">a\nMK\n>b\n")
    with pytest.raises(UserError, match="no sequence"):
        call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--overwrite")
    assert everything_in(tmp_path / "csv") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["csv", "in.fasta"]


def test_download_data_publishes_all_formats_together(tmp_path):
    """The finished directory itself takes the final name, record of completion included; nothing is copied there."""
    with building(tmp_path, ["csv", "fasta"], {"seed": (1, 2)}, overwrite=False) as build:
        inodes = {name: path.stat().st_ino for name, path in build.paths.items()}
        assert not (tmp_path / "csv").exists()
        build.results["records"] = 3
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == inodes
    assert read_record(tmp_path / "csv") == {"made_from": {"seed": [1, 2]}, "results": {"records": 3}, "files": {}}
    with building(tmp_path, ["csv", "fasta", "arrow"], {"seed": (1, 2)}, overwrite=False) as build:
        assert list(build.paths) == ["arrow"]


def test_download_data_refuses_two_runs_at_once(tmp_path):
    source = write_fasta(tmp_path / "in.fasta", numbered(3))
    with building(tmp_path / "out", ["csv"], {}, overwrite=False):
        with pytest.raises(UserError, match="another run is writing here"):
            call(DOWNLOAD, "--source", source, "--output_dir", tmp_path / "out")
        assert (tmp_path / "out/.building/csv").exists()


# --- bad input, as the user sees it


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.fasta: empty file"),
        (b"id,text\na,MK\n", "bad.fasta: line 1: not FASTA"),
        (b">a\nMK\n>b\n", "line 3: record 2 (b) has no sequence"),
        (b">a\nMK\n>\nMK\n", "line 3: record 2 has no id"),
        (b">a\nM\xc3\xa9K\n", "line 2: non-ASCII byte"),
        (gzip.compress(b">a\nMKVLA\n" * 1000)[:-20], "bad.fasta: the compressed file is cut short"),
    ],
)
def test_download_data_bad_fasta_leaves_nothing(tmp_path, content, message):
    (tmp_path / "bad.fasta").write_bytes(content)
    with pytest.raises(UserError) as error:
        call(DOWNLOAD, "--source", tmp_path / "bad.fasta", "--output_dir", tmp_path / "new/out", "--save_arrow")
    assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.fasta"]


def test_download_data_reports_bad_input_in_one_line(tmp_path):
    bad = tmp_path / "bad.fasta"
    bad.write_bytes(b">a\nMK\n>b\n")
    line = expect_error(SCRIPT, "--source", bad, "--output_dir", tmp_path / "out")
    assert line == f"error: {bad}: line 3: record 2 (b) has no sequence: remove the record or fetch the file again"
    line = expect_error(SCRIPT, "--source", tmp_path / "absent", "--output_dir", tmp_path / "out")
    assert "no such file" in line
    line = expect_error(SCRIPT, "--source", bad, "--output_dir", bad / "out")
    assert f"--output_dir {bad / 'out'}: Not a directory: choose a directory you can write to" in line
    assert "--no_such_flag" in expect_error(SCRIPT, "--source", bad, "--no_such_flag", "1")
    assert list(tmp_path.iterdir()) == [bad]


@pytest.mark.parametrize(
    "flags", [("--max_records_per_partition", 0), ("--seed", -1), ("--save_csv", "False"), ("--source", "x://y")]
)
def test_download_data_refuses_invalid_flags(tmp_path, flags):
    with pytest.raises(UserError):
        call(DOWNLOAD, "--output_dir", tmp_path / "out", *flags)
    assert not list(tmp_path.iterdir())


def test_download_data_skips_and_counts_bad_records(tmp_path):
    source = tmp_path / "in.fasta"
    source.write_text(">a\nMK\n" + ">b\n" * 7 + ">c\nMV\n>\nMK\n>a\nMK\n")
    out, flags = tmp_path / "out", ("--on_bad_record", "skip", "--shuffle", "False")
    done = run_script(SCRIPT, "--source", source, "--output_dir", out, *flags)
    assert done.returncode == 0, done.stderr
    assert rows_of(out / "csv/x000.csv") == [("a", "MK"), ("c", "MV"), ("a", "MK")]  # ids may come twice
    assert "WARNING - 8 bad records were skipped, the first 5:" in done.stderr
    assert f"WARNING -   {source}: line 3: record 2 (b) has no sequence" in done.stderr
    assert f"{source}: line 7: record 6 (b)" in done.stderr
    assert "record 7" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith("Save complete")
    found = read_record(out / "csv")["results"]
    assert (found["records"], found["skipped_records"]) == (3, 8)

    with pytest.raises(UserError, match="line 3: record 2"):
        call(DOWNLOAD, "--source", source, "--output_dir", tmp_path / "error", "--on_bad_record", "error")
    source.write_text(">b\n>c\n")
    with pytest.raises(UserError, match=r"line 1: record 1 \(b\) .* no other record is valid"):
        call(DOWNLOAD, "--source", source, "--output_dir", tmp_path / "error", *flags)
    source.write_bytes(gzip.compress(b">a\nMK\n" * 1000)[:-9])
    with pytest.raises(UserError, match="cut short"):
        call(DOWNLOAD, "--source", source, "--output_dir", tmp_path / "error", *flags)
    assert not list(tmp_path.glob("error/[!.]*"))
    assert "--on_bad_record" in expect_error(SCRIPT, "--source", source, "--on_bad_record", "mend")


def test_download_data_log_lines(tmp_path):
    """The guides' log lines, and bars with bytes and records a second, ETA included."""
    source = write_fasta(tmp_path / "in.fasta", numbered(300))
    flags = ("--source", source, "--output_dir", tmp_path, "--max_records_per_partition", 200)
    said = subprocess.run(command(SCRIPT, *flags), capture_output=True, text=True, check=True).stderr
    assert re.search(rf"INFO - Writing 200 records to {tmp_path}/csv/x000.csv\n", said)
    assert re.search(rf"INFO - Writing 100 records to {tmp_path}/csv/x001.csv\n", said)
    assert re.search(r"Reading: 100%.* 82.8k/82.8k \[.*<.*B/s, 300 records, [\d,]+ records/s\]", said)
    assert re.search(r"Writing: 100%.* 300/300 \[.*<.* records/s\]", said)
    assert said.endswith("INFO - Save complete\n")


def test_no_records_are_an_error(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n")
    with pytest.raises(UserError, match=r"--source .*a\.csv: no records"):
        call(DOWNLOAD, "--source", tmp_path / "a.csv", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out/csv").exists()
