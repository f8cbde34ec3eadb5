"""1.tokenize_uniref_csv.py repeated, killed, on a full disk, and with bad input."""

import itertools
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS, encode
from extras.prepare import dataset_writer
from extras.prepare.encode import check_tokenizer
from extras.prepare.fetch import directory_sources
from extras.prepare.sources import csv_records
from extras.prepare.sources.csv_records import count_rows, read_rows
from extras.prepare.sources.formats import PROTEINS
from extras.prepare.sources.records import BadRecords
from extras.prepare.sources.residues import Cleaner
from tests.data_fixtures import (
    TOKENIZE,
    call,
    different,
    edit_unnoticed,
    everything_in,
    expect_error,
    load,
    proteins,
    write_csv,
    write_fasta,
)
from tests.extras.prepare.killed_runs import run_killed_at
from tests.small_disk import enlarge, fill, small_disk

SCRIPT = "1.tokenize_uniref_csv.py"


@pytest.fixture
def tokenize(tmp_path):
    """A function that runs the script on tmp_path/csv and returns its output directory."""

    def run(*flags, out="out", csv="csv") -> Path:
        call(TOKENIZE, "--input_dir", tmp_path / csv, "--output_dir", tmp_path / out, *flags)
        return tmp_path / out

    return run


def write_bytes(tmp_path: Path, content: bytes, name: str = "x000.csv") -> Path:
    (tmp_path / "csv").mkdir(exist_ok=True)
    (tmp_path / "csv" / name).write_bytes(content)
    return tmp_path / "csv" / name


def write_table(tmp_path: Path, count: int) -> tuple:
    """Flags of a table of clusters of one protein each, and of small held-out splits."""
    table = tmp_path / "table.tsv"
    table.write_text("ur50_id\tur90_id\n" + "".join(f"C{i}\tP{i}\n" for i in range(count)))
    return ("--cluster_table", table, "--validation_size", 2, "--test_size", 1)


# --- started again


def test_tokenize_reuses_its_output_and_refuses_another(tmp_path, tokenize, caplog):
    write_csv(tmp_path / "csv", proteins(50))
    out = tokenize()
    first = everything_in(out)
    with caplog.at_level("INFO"):
        tokenize("--preprocessing_num_workers", 2)
    assert "nothing to do" in caplog.text
    with pytest.raises(UserError, match="give --overwrite"):
        tokenize("--max_seq_length", 30)
    write_csv(tmp_path / "csv", proteins(60, seed=1), "x001.csv")
    with pytest.raises(UserError, match="give --overwrite"):
        tokenize()
    assert everything_in(out) == first
    tokenize("--overwrite")
    assert sum(map(len, load(out).values())) == 110
    assert [path.name for path in out.iterdir()] == ["arrow"]


def test_tokenize_identifies_input_by_content(tmp_path, tokenize, caplog):
    content = "id,text\n" + "".join(f"P{i},{'MKVLA' * (i + 1)}\n" for i in range(20))
    write_bytes(tmp_path, content.encode())
    flags = write_table(tmp_path, 20)
    tokenize(*flags)
    moved = tmp_path / "moved"
    shutil.copytree(tmp_path / "csv", moved, copy_function=shutil.copyfile)
    (moved / "x000.csv").rename(moved / "another.csv")
    os.utime(tmp_path / "table.tsv", ns=(0, 0))
    with caplog.at_level("INFO"):
        tokenize(*flags, csv="moved")
    assert "nothing to do" in caplog.text
    edit_unnoticed(moved / "another.csv", b"P7,MKVLA", b"P7,MKVLL")
    with pytest.raises(UserError, match="was made from other input"):
        tokenize(*flags, csv="moved")
    edit_unnoticed(tmp_path / "table.tsv", b"C7\tP7", b"C8\tP7")
    with pytest.raises(UserError, match="was made from other input"):
        tokenize(*flags)


CHUNKS = ("--line_by_line", "False", "--max_seq_length", "50")


@pytest.mark.parametrize(
    ("moments", "flags"),
    [(20, ()), (6, CHUNKS), pytest.param(10, ("--cluster_table", "table.tsv"), marks=pytest.mark.slow)],
)
def test_tokenize_resumes_after_a_kill_anywhere(tmp_path, monkeypatch, moments, flags):
    """Counting, encoding, leaving out copies, renaming, copying pieces together: always the same bytes, and no whole
    file read again."""
    monkeypatch.chdir(tmp_path)
    small = {"extras.prepare.dataset_writer.SMALL_BYTES": 2000}  # some pieces are renamed, some copied together
    monkeypatch.setattr(dataset_writer, "SMALL_BYTES", 2000)
    texts = [text for _, text in proteins(360)]
    rows = [(f"UniRef90_P{i}", text) for i, text in enumerate(texts + texts[:60])]  # 60 proteins are there twice
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

    monkeypatch.setattr(csv_records, "read_rows", noting)
    # Of the whole run, and of its end: most touches of the disk are those of the clusters' temporary files.
    chosen = np.concatenate([np.linspace(begin, touches - 1, moments // 2) for begin in (1, max(2, touches - 60))])
    for number, touch in enumerate(sorted(set(chosen.astype(int).tolist()))):
        out = tmp_path / str(touch)
        run_killed_at(touch, SCRIPT, out, *arguments, "--output_dir", out, settings=small)
        if number % 3 == 0:
            run_killed_at(touch // 2, SCRIPT, out, *arguments, "--output_dir", out, settings=small)  # and again
        journal = out / ".building/journal.jsonl"
        notes = [json.loads(line)[0] for line in journal.read_text().splitlines()] if journal.exists() else []
        done = {f"x{int(note.split()[1]):03d}.csv" for note in notes if note.startswith("encoded ")}
        again.clear()
        call(TOKENIZE, *arguments, "--output_dir", out)
        assert everything_in(out) == expected, touch
        assert [path.name for path in out.iterdir()] == ["arrow"]
        assert not done & set(again), touch
        resumed += bool(done)
    assert resumed >= moments // 5


def test_tokenize_keeps_finished_files_on_a_full_disk(tmp_path, tokenize, caplog):
    """With more space it resumes."""
    caplog.set_level("INFO")
    for i in range(4):
        write_csv(tmp_path / "csv", proteins(10_000, seed=i), f"x{i:03d}.csv")
    with small_disk(tmp_path, "1m") as disk:
        line = expect_error(SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir", disk / "out")
        assert "No space left on device" in line
        assert [path.name for path in disk.glob("*/*")] == [".building"]
        enlarge(disk, "20m")
        tokenize(out=disk / "out")
        assert "Resuming from what an interrupted run left" in caplog.text
        assert everything_in(disk / "out") == everything_in(tokenize(out="whole"))


def test_tokenize_reports_a_disk_that_is_full_at_the_start(tmp_path):
    write_csv(tmp_path / "csv", proteins(50))
    source = write_fasta(tmp_path / "a.fasta", proteins(50))
    commands = [
        ("0.download_data.py", "--source", source, "--output_dir"),
        (SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir"),
    ]
    with small_disk(tmp_path, "64k") as disk:
        fill(disk)
        for command in commands:
            line = expect_error(*command, disk / "new/out")
            assert line.startswith(f"error: --output_dir {disk}/new/out: No space left on device: make room")
            assert [path.name for path in disk.iterdir()] == ["mine"]


# --- bad input


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Empty CSV file"),
        (b"id,text\na,MK\nb\n", "row 2: Expected 2 columns, got 1"),
        (b"id,text\na,MK\nb,MK,V\n", "row 2: Expected 2 columns, got 3"),
        (b"name,organism\na,MK\n", "row 0: no column sequence or text or seq, only name, organism: name the one"),
        (b"id;text\na;MK\n", "row 0: one column, 'id;text': separated by semicolons?"),
        (b"id,text,text\na,MK,V\n", "row 0: no column"),
        (b"id,text\na,MK\nb,\nc,\n", "row 2: the text is empty"),
        (b"id,text\na,MK\nb,MK\nc,M\xc3\xa9K\n", "row 3: non-ASCII byte 0xc3 in the text"),
        (b"id,text\na,MK\nb\xff,MK\n", "row 2: the id is not UTF-8"),
        (b"id,text\na,MK\nb,M\x00K\nc,MK\n", "row 2: control byte 0x00 in the text"),
        ("id,text\na,MK\n".encode("utf-16"), "row 0: not CSV: it is UTF-16: convert it: iconv"),
        (b"\x1f\x8b\x08\x00\x00", "the compressed file is cut short: fetch it again"),
        (b"PK\x03\x04\x14\x00\n", "row 0: not CSV: it is a zip archive: unpack it: unzip FILE"),
        (b"id\x00,text\n", "row 0: not CSV: it is a binary file"),
        (b"id,text,\xe9\na,MK,b\n", "row 0: the header is not UTF-8: byte 0xe9"),
        (b"id,text\na,MK\nid,text\nc,MK\n", "row 2: the header once more"),
        (b"id,text\na,MK\nID,Text\nc,MK\n", "row 2: the header once more"),
        (b"Id,Text\na,MK\nId,TEXT\nc,MK\n", "row 2: the header once more"),
        (b"id,text\n" + b"a,A protein of the cell wall\n" * 90, "19% of the characters are blanks"),
        (b"id,text\n" + b"a,12345\n" * 900, "row 1 has 5 characters of 5 that are not residues: is it a protein?"),
    ],
)
def test_tokenize_bad_csv_names_file_and_row(tmp_path, tokenize, content, message):
    """--on_bad_record skip skips rows, not files."""
    write_csv(tmp_path / "csv", proteins(10))
    write_bytes(tmp_path, content, "x001.csv")
    for policy in ("error", "skip") if not re.match("row [1-9]", message) else ("error",):
        with pytest.raises(UserError) as error:
            tokenize("--on_bad_record", policy, out="new/out")
        said = str(error.value)
        assert said.isprintable()
        assert message in said
        assert "x001.csv: " in said
        assert not list(tmp_path.glob("new/out/[!.]*"))


def test_tokenize_row_numbers_count_over_blocks(tmp_path, monkeypatch):
    rows = [*proteins(500), ("bad", "MKé")]
    write_csv(tmp_path / "csv", rows)
    for name in ("BLOCK_BYTES", "PARSED_BYTES"):
        monkeypatch.setattr(f"extras.prepare.sources.csv_records.{name}", 300)
    with pytest.raises(UserError, match="row 501: non-ASCII"):
        list(read_rows(tmp_path / "csv/x000.csv"))


BAD_ROWS = [b"a,", b"b,M\xc3\xa9K", b"\xff,MK", b"c,MK,V", b"d", b'"",""']


@pytest.mark.parametrize("block_bytes", [300, 1 << 20])
@pytest.mark.parametrize("header", [b"id,text\n", b"id,text\r\n"])
def test_tokenize_skips_and_counts_bad_rows(tmp_path, tokenize, monkeypatch, caplog, block_bytes, header):
    for name in ("BLOCK_BYTES", "PARSED_BYTES"):
        monkeypatch.setattr(f"extras.prepare.sources.csv_records.{name}", block_bytes)
    good = proteins(500)
    places = [3, 60, 61, 200, 202, 470]  # of the bad rows among all
    lines = [f"{name},{text}".encode() for name, text in good]
    for place, bad in zip(places, BAD_ROWS, strict=True):
        lines.insert(place - 1, bad)
    path = write_bytes(tmp_path, header + b"\n".join(lines))
    bad_records = BadRecords("skip")
    assert [
        tuple(row.values())
        for batch in read_rows(path, Cleaner(str(path), bad_records=bad_records))
        for row in batch.to_pylist()
    ] == good
    assert count_rows(path, Cleaner(str(path), bad_records=BadRecords("skip"))) == 500
    words = ["the text is empty", "non-ASCII byte 0xc3", "the id is not UTF-8", "Expected 2 columns, got 3"]
    words += ["Expected 2 columns, got 1", "the text is empty"]
    said = sorted(bad_records.first, key=lambda line: int(re.search(r"row (\d+)", line)[1]))
    for line, place in zip(said, places, strict=False):
        assert f"x000.csv: row {place}: {words[places.index(place)]}" in line
    assert bad_records.count == 6

    with pytest.raises(UserError, match=r"x000.csv: row \d+: .*--on_bad_record skip"):
        tokenize()
    with caplog.at_level("INFO"):
        tokenize("--on_bad_record", "skip")
    assert "6 bad records were skipped" in caplog.text
    assert dict(itertools.chain(*load(tmp_path / "out").values())) == {n: encode(t).tolist() for n, t in good}
    results = json.loads((tmp_path / "out/arrow/.complete.json").read_text())["results"]
    assert (results["records"], results["bad_records"]) == (500, 6)


def test_tokenize_refuses_too_few_records(tmp_path, tokenize):
    write_csv(tmp_path / "csv", proteins(2))
    with pytest.raises(UserError, match="at least 3"):
        tokenize()
    assert not (tmp_path / "out/arrow").exists()


def test_tokenize_refuses_bad_input_directories(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        directory_sources(str(tmp_path / "absent"), PROTEINS)
    (tmp_path / ".hidden.csv").write_text("id,text\n")
    with pytest.raises(UserError, match=r"no files in it: run 0.download_data.py first"):
        directory_sources(str(tmp_path), PROTEINS)
    (tmp_path / "notes.md").write_text("# Proteins")
    with pytest.raises(UserError, match=r"no files of proteins in it: expected .parquet"):
        directory_sources(str(tmp_path), PROTEINS)


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
def test_tokenize_refuses_invalid_flags(tmp_path, tokenize, flags):
    write_csv(tmp_path / "csv", proteins(10))
    with pytest.raises(UserError, match=flags[0]):
        tokenize(*flags)
    assert not (tmp_path / "out/arrow").exists()


def test_check_tokenizer_accepts_a_directory_with_the_vocabulary(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
    check_tokenizer(str(tmp_path))
    check_tokenizer("facebook/esm2_t6_8M_UR50D")
    (tmp_path / "vocab.txt").write_text("\n".join(reversed(TOKENS)))
    with pytest.raises(UserError, match="33 ESM-2 tokens"):
        check_tokenizer(str(tmp_path))


def test_tokenize_reports_bad_input_in_one_line(tmp_path):
    write_csv(tmp_path / "csv", [*proteins(10), ("bad", "")])
    line = expect_error(SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    assert line == f"error: {tmp_path}/csv/x000.csv: row 11: the text is empty: {csv_records.REMEDY}"
    assert "--pad" in expect_error(SCRIPT, "--pad", "True")
    assert "--on_bad_record" in expect_error(SCRIPT, "--on_bad_record", "ignore")
    shutil.rmtree(tmp_path / "csv")
    line = expect_error(SCRIPT, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out")
    assert "no such directory: run 0.download_data.py first" in line
    assert not list(tmp_path.glob("out/[!.]*"))


# --- quotes, line ends and unused columns


def quoted(places: dict[int, bytes], count: int = 2000) -> bytes:
    """A file of so many rows, those at `places` (from 1) as given."""
    lines = [places.get(n, f"P{n},MKVLA{different(n)}".encode()) for n in range(1, count + 1)]
    return b"id,text\n" + b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("block_bytes", [4000, 4 << 20])
@pytest.mark.parametrize(
    "places",
    [{3: b'P3,"MKVLA', 1500: b'P1500,MKVLA"'}, {3: b'P3,"MKVLA'}, {3: b'"P3,MKVLA', 1500: b'P1500",MKVLA'}],
    ids=["closed far away", "never closed", "in the id"],
)
def test_tokenize_refuses_a_stray_quote(tmp_path, tokenize, monkeypatch, places, block_bytes, policy):
    monkeypatch.setattr(csv_records, "PARSED_BYTES", block_bytes)
    write_bytes(tmp_path, quoted(places))
    with pytest.raises(UserError, match=r"x000\.csv: (row 3: )?a text that continues after a line end, after a quote"):
        tokenize("--on_bad_record", policy)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("block_bytes", [64, 4 << 20])
def test_tokenize_skips_rows_that_are_not_utf_8(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(csv_records, "PARSED_BYTES", block_bytes)
    places = {3: b"P3,MK,\xe9,x", 5: b"P5\xe9,MK", 7: b"P7,M\xe9K", 8: b"P8\xc3", 9: "P9é,MKVLA".encode()}
    path = write_bytes(tmp_path, quoted(places, 40))
    bad = BadRecords("skip")
    rows = [row for batch in read_rows(path, Cleaner(str(path), bad_records=bad)) for row in batch.to_pylist()]
    assert [row["id"] for row in rows] == [f"P{n}" if n != 9 else "P9é" for n in range(1, 41) if n not in (3, 5, 7, 8)]
    assert [re.search(r"row (\d+)", line)[1] for line in sorted(bad.first)] == ["3", "5", "7", "8"]
    with pytest.raises(UserError, match=r"row 3: Expected 2 columns, got 4: fix or") as error:
        list(read_rows(path))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("block_bytes", [400, 4 << 20])
def test_tokenize_line_ends_in_text(tmp_path, tokenize, monkeypatch, block_bytes):
    monkeypatch.setattr(csv_records, "PARSED_BYTES", block_bytes)
    long = "\n".join(["MKVLA" * 12] * 4)
    write_bytes(tmp_path, quoted({3: b'P3,"MK\nVL\r\nA"', 900: f'P900,"{long}"'.encode()}))
    found = dict(itertools.chain(*load(tokenize("--line_ends_in_text", "True")).values()))
    assert len(found) == 2000
    assert found["P3"] == encode("MKVLA").tolist()
    assert found["P900"] == encode("MKVLA" * 48).tolist()


def test_tokenize_ignores_other_columns(tmp_path, tokenize):
    """Numbers that turn into words, and invalid UTF-8, in an unused column."""
    rows = [b"%d,P%d,MKVLA%s,\xe9" % (n, n, different(n).encode()) for n in range(1, 3000)]
    rows.append(b"word,P3000,MKVLA,x")
    write_bytes(tmp_path, b"number,ID,Text,note\n" + b"\n".join(rows))
    assert len(dict(itertools.chain(*load(tokenize()).values()))) == 3000
