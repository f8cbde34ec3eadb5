"""extras/prepare/sources/compression.py and who opens files by it: what is no file is refused unopened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from extras.prepare.sources.compression import check_duplicates, check_file, open_decompressed
from extras.prepare.sources.csv_records import count_rows
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.find_files import open_source
from tests.data_fixtures import DOWNLOAD, TOKENIZE, call, proteins, write_csv


def make(path, kind: str):
    """Something of that kind at `path`."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "broken link":
        path.symlink_to("nowhere")
    else:
        path.mkdir()
    return path


def step_0(path):
    call(DOWNLOAD, "--source", path, "--output_dir", path.parent / "out")


def step_1(path):
    call(TOKENIZE, "--input_dir", path.parent, "--output_dir", path.parent / "out")


def step_1_clusters(path):
    write_csv(path.parent / "csv", proteins(9))
    where = ("--input_dir", path.parent / "csv", "--output_dir", path.parent / "out")
    call(TOKENIZE, *where, "--cluster_table", path)


def dataset(path):
    open_source(str(path), False)


def dataset_directory(path):
    open_source(str(path.parent), False)


def dataset_glob(path):
    (path.parent / "another.csv").write_text("id,text\n")
    open_source(f"{path.parent}/*.csv", False)


WAYS_IN = [step_0, step_1, step_1_clusters, dataset, dataset_directory, dataset_glob]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "broken link"])
@pytest.mark.parametrize("way_in", WAYS_IN, ids=lambda way: way.__name__)
def test_check_file_rejects_pipes_and_devices(tmp_path, monkeypatch, way_in, kind):
    """Opening a pipe without a writer would block forever."""
    monkeypatch.chdir(tmp_path)
    make(Path("x.csv"), kind)  # a socket's name must be short
    with pytest.raises(UserError, match=rf"x\.csv: .*{kind}") as error:
        way_in(tmp_path / "x.csv")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_check_file_rejects_directory(tmp_path):
    with pytest.raises(UserError, match=r"x\.csv: not a file but a directory"):
        step_1(make(tmp_path / "x.csv", "directory"))


@pytest.mark.parametrize("flag", ["--dataset", "--eval_dataset"])
def test_check_file_rejects_standard_input(tmp_path, flag):
    with pytest.raises(UserError, match=f"{flag} -: standard input can be read only once.*to a file"):
        open_source("-", False, flag)
    with pytest.raises(UserError, match="-: standard input can be read only once.*to a file"):
        call(DOWNLOAD, "--source", "-", "--output_dir", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_check_duplicates_of_plain_and_compressed(tmp_path):
    write_csv(tmp_path, proteins(9), "a.csv")
    (tmp_path / "a.csv.gz").write_bytes((tmp_path / "a.csv").read_bytes())
    for way_in in (step_1, dataset_directory):
        with pytest.raises(UserError, match=r"both a\.csv and a\.csv\.gz: the same file, plain and compressed\?"):
            way_in(tmp_path / "a.csv")
    with pytest.raises(UserError, match=r"both a\.csv and a\.csv\.gz"):
        call(DOWNLOAD, "--source", tmp_path / "a.csv", tmp_path / "a.csv.gz", "--output_dir", tmp_path / "out")
    check_duplicates("", [tmp_path / "a" / "x.csv", tmp_path / "b" / "x.csv.gz"])


@pytest.mark.parametrize("other", ["./a.fasta", "{}/a.fasta", "link.fasta", "hard.fasta", "d/../a.fasta"])
def test_check_duplicates_rejects_two_names(tmp_path, monkeypatch, other):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.fasta").write_text(">a\nMK\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "link.fasta").symlink_to("a.fasta")
    (tmp_path / "hard.fasta").hardlink_to("a.fasta")
    with pytest.raises(UserError, match="the same file as a.fasta: its records would come twice"):
        call(DOWNLOAD, "--source", "a.fasta", other.format(tmp_path), "--output_dir", "out")


def test_source_reads_links_once(tmp_path, caplog):
    write_csv(tmp_path, proteins(9), "a.csv")
    (tmp_path / "b.csv").symlink_to("a.csv")
    (tmp_path / "validation.csv").hardlink_to(tmp_path / "a.csv")  # another split: the user's own affair
    source = open_source(str(tmp_path), False)
    assert {split: [os.path.basename(file.path) for file in files] for split, files in source.splits.items()} == {
        "train": ["a.csv"],
        "validation": ["validation.csv"],
    }
    assert "b.csv is a link to a.csv: it is read once" in caplog.text


def test_decompress_error_is_one_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\x1f\x8b\x08\x00" + bytes(20))
    with (
        pytest.raises(UserError, match=r"a\.csv: the compressed file is (cut short|corrupt)"),
        open_decompressed(path) as file,
    ):
        file.read()
    path.unlink()
    with pytest.raises(UserError, match="such: no such file"):
        check_file(path, "such")


def test_parquet_under_another_name_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    pq.write_table(pa.table({"id": ["a"], "text": ["MKV"]}), path)
    with pytest.raises(UserError, match=r"a.csv: .*it is parquet: give it a name that ends in .parquet"):
        list(read_fasta(path))
    with pytest.raises(UserError, match=r"not CSV: it is parquet: give it a name that ends in .parquet"):
        count_rows(path)
