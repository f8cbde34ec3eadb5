"""Steps 0 and 1 on every format of proteins: the same records, ids, clusters and errors whichever way they come in."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from common.models.esm2.alphabet import encode
from extras.prepare.output_directory import read_record
from extras.prepare.sources.formats import FORMATS
from extras.prepare.sources.protein_records import RecordFlags, read_records
from tests.data_fixtures import DOWNLOAD, TOKENIZE, call, expect_error, load, proteins, write_fasta
from tests.extras.prepare.local_servers import http_server
from tests.extras.prepare.sources import toy_format

ROWS = proteins(30)
CLUSTERED = [(f"UniRef50_{number // 3}", f"UniRef90_{name}", text) for number, (name, text) in enumerate(ROWS)]
UNIREF = ("ur50_id", "ur90_id", "sequence")


def table_of(rows=ROWS, names=("id", "sequence")) -> pa.Table:
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def delimited(table: pa.Table, delimiter: str) -> bytes:
    lines = [table.column_names, *map(list, zip(*table.to_pydict().values(), strict=True))]
    return "".join(delimiter.join("" if value is None else value for value in line) + "\n" for line in lines).encode()


def json_lines(table: pa.Table) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()


def write(path: Path, table: pa.Table | None = None) -> Path:
    """A table in the format that the name says; without a suffix, as datasets saves it."""
    table = table_of() if table is None else table
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=7)
    elif name.endswith(".feather"):
        pyarrow.feather.write_feather(table, path, compression="lz4", chunksize=11)
    elif name.endswith(".arrow"):
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    elif not path.suffix:
        datasets.Dataset(table).save_to_disk(path)
    else:
        if name.endswith(".fasta"):
            data = b"".join(b">%s\n%s\n" % (row["id"].encode(), row["sequence"].encode()) for row in table.to_pylist())
        else:
            data = {".csv": delimited(table, ","), ".tsv": delimited(table, "\t"), ".jsonl": json_lines(table)}[
                Path(name).suffix
            ]
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def records(path: Path, **flags) -> list[tuple]:
    flags = RecordFlags(**flags)
    return [
        tuple(row.values()) for batch in read_records(path, flags.cleaner(path), flags) for row in batch.to_pylist()
    ]


def csv_of(out: Path) -> list[list[str]]:
    with open(out / "csv/x000.csv", newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def tokens_of(out: Path) -> dict[str, list[int]]:
    return {name: list(ids) for name, ids in itertools.chain(*load(out).values())}


NAMES = [
    "a.fasta",
    "a.fasta.gz",
    "a.csv",
    "a.csv.gz",
    "a.tsv",
    "a.jsonl.gz",
    "a.parquet",
    "a.feather",
    "a.arrow",
    "saved",
]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_every_format_make_the_same(tmp_path, name):
    source = write(tmp_path / "in" / name)
    call(DOWNLOAD, "--source", source, "--output_dir", tmp_path, "--no_shuffle")
    assert csv_of(tmp_path) == [["id", "text"], *map(list, ROWS)]
    call(TOKENIZE, "--source", source, "--output_dir", tmp_path / "file")
    call(TOKENIZE, "--input_dir", source if name == "saved" else source.parent, "--output_dir", tmp_path / "directory")
    expected = {name: encode(text).tolist() for name, text in ROWS}
    assert tokens_of(tmp_path / "file") == tokens_of(tmp_path / "directory") == expected


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.jsonl", "a.parquet", "a.feather", "a.arrow"])
def test_inputs_have_uniref_clusters(tmp_path, name):
    """As in nvidia/esm2_uniref_pretraining_data; a record without a cluster has none."""
    rows = [*CLUSTERED[:-1], (None, *CLUSTERED[-1][1:])]
    path = write(tmp_path / name, table_of(rows, UNIREF))
    assert records(path) == [(member, text, cluster) for cluster, member, text in rows]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
def test_inputs_of_any_type_of_texts(tmp_path, name, kind):
    table = table_of(CLUSTERED, UNIREF)
    path = write(tmp_path / name, table.cast(pa.schema([(column, kind) for column in UNIREF])))
    assert records(path) == [(member, text, cluster) for cluster, member, text in CLUSTERED]


def test_inputs_clusters_come_through_step_0(tmp_path):
    source = write(tmp_path / "a.parquet", table_of(CLUSTERED, UNIREF))
    alone = write_fasta(tmp_path / "b.fasta", [("single", "MKV")])
    flags = ("--save_arrow", "--save_parquet", "--save_fasta", "--output_dir", tmp_path / "out")
    call(DOWNLOAD, "--source", source, alone, *flags)
    expected = {(member, text, cluster) for cluster, member, text in CLUSTERED} | {("single", "MKV", None)}
    header, *lines = csv_of(tmp_path / "out")
    assert header == ["id", "text", "cluster"]
    assert {(*line[:2], line[2] or None) for line in lines} == expected
    assert [line[0] for line in lines] != [row[1] for row in CLUSTERED] + ["single"]
    for path in (tmp_path / "out/csv/x000.csv", tmp_path / "out/parquet/x000.parquet"):
        assert records(path) == [(*line[:2], line[2] or None) for line in lines]
    saved = datasets.load_from_disk(str(tmp_path / "out/arrow"))
    assert [tuple(row.values()) for row in saved] == [(*line[:2], line[2] or None) for line in lines]
    assert records(tmp_path / "out/fasta/x000.fasta") == [tuple(line[:2]) for line in lines]


def test_inputs_resume_with_clusters(tmp_path, monkeypatch):
    """A partition of exact size ends the run at any place; the next one knows the columns."""
    source = write(tmp_path / "a.parquet", table_of(CLUSTERED, UNIREF))
    flags = ("--source", source, "--max_records_per_partition", 4, "--save_arrow", "--output_dir")
    call(DOWNLOAD, *flags, tmp_path / "whole")
    end = DOWNLOAD.PartitionWriter.close
    monkeypatch.setattr(DOWNLOAD.PartitionWriter, "close", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(DOWNLOAD, *flags, tmp_path / "out")
    monkeypatch.setattr(DOWNLOAD.PartitionWriter, "close", end)
    call(DOWNLOAD, *flags, tmp_path / "out")
    for name in ("csv/x000.csv", "csv/x007.csv", "arrow/dataset_info.json", "arrow/data-00003-of-00008.arrow"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_inputs_without_ids_are_numbered(tmp_path):
    table = table_of(ROWS).select(["sequence"])
    for name in ("my table.csv", "my table.parquet", "my table.jsonl.gz"):
        path = write(tmp_path / name, table)
        assert records(path) == [(f"my_table-{row}", text) for row, (_, text) in enumerate(ROWS, 1)]


def test_inputs_columns_are_named_by_flags(tmp_path):
    rows = [(number, text, name, "x", number % 3) for number, (name, text) in enumerate(ROWS)]
    path = write(tmp_path / "a.parquet", table_of(rows, ("id", "Protein", "Gene", "sequence", "family")))
    named = {"sequence_column": "protein", "id_column": "gene", "cluster_column": "family"}
    assert records(path, **named) == [(name, text, str(family)) for _, text, name, _, family in rows]
    flags = itertools.chain(*((f"--{name}", value) for name, value in named.items()))
    sizes = ("--validation_size", len(ROWS) // 3, "--test_size", 0)  # of whole families
    call(TOKENIZE, "--source", path, *flags, *sizes, "--output_dir", tmp_path / "out")
    assert set(tokens_of(tmp_path / "out")) == {name for name, _ in ROWS}
    assert read_record(tmp_path / "out/arrow")["made_from"]["id_column"] == "gene"


def test_inputs_of_several_formats_in_a_directory(tmp_path, caplog):
    """All are read, in the order of their names; one in two forms is refused."""
    thirds = [ROWS[:10], ROWS[10:20], ROWS[20:]]
    for name, rows in zip(("in/x10.parquet", "in/x9.fasta", "in/deeper/b.jsonl"), thirds, strict=True):
        write(tmp_path / name, table_of(rows))
    (tmp_path / "in/notes.md").write_text("notes")
    with caplog.at_level("INFO"):
        call(DOWNLOAD, "--source", tmp_path / "in", "--output_dir", tmp_path, "--no_shuffle")
    assert [name for name, _ in csv_of(tmp_path)[1:]] == [name for name, _ in thirds[2] + thirds[1] + thirds[0]]
    assert "reading 1 fasta, 1 json, 1 parquet" in caplog.text
    assert "left out, no proteins by name or content: notes.md" in caplog.text
    call(TOKENIZE, "--source", f"{tmp_path}/in/*.*", "--output_dir", tmp_path / "glob")
    assert set(tokens_of(tmp_path / "glob")) == {name for name, _ in thirds[1] + thirds[0]}
    write(tmp_path / "in/x9.fasta.gz", table_of(thirds[1]))
    for flag in ("--source", "--input_dir"):
        with pytest.raises(UserError, match=r"both x9.fasta and x9.fasta.gz: the same file, plain and compressed"):
            call(TOKENIZE, flag, tmp_path / "in", "--output_dir", tmp_path / "again")
    with pytest.raises(UserError, match="the same file as"):
        call(
            DOWNLOAD,
            "--source",
            tmp_path / "in/x10.parquet",
            tmp_path / "in/x*.parquet",
            "--output_dir",
            tmp_path / "n",
        )


def test_input_dir_with_csv_files_reads_them_alone(tmp_path, caplog):
    write(tmp_path / "in/a.csv", table_of(ROWS[:20]))
    write(tmp_path / "in/b.parquet", table_of(ROWS[20:]))
    call(TOKENIZE, "--input_dir", tmp_path / "in", "--output_dir", tmp_path / "out")
    assert set(tokens_of(tmp_path / "out")) == {name for name, _ in ROWS[:20]}
    assert "left out, not *.csv: b.parquet" in caplog.text


def test_step_1_downloads_a_url_once(tmp_path, caplog):
    path = write(tmp_path / "a.parquet")
    with http_server({"/a.parquet": path.read_bytes()}) as server:
        flags = ("--source", f"{server.url}/a.parquet", "--output_dir", tmp_path / "out")
        call(TOKENIZE, *flags)
        assert len(tokens_of(tmp_path / "out")) == len(ROWS)
        requests = len(server.ranges)
        with caplog.at_level("INFO"):
            call(TOKENIZE, *flags)
    assert "nothing to do" in caplog.text
    assert len(server.ranges) == requests
    assert [found.name for found in (tmp_path / "out").iterdir()] == ["arrow"]


# --- the Hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A dataset in the Hub's cache, as a download leaves it; the network is off."""
    repo = tmp_path / "hub/datasets--owner--proteins"
    write(repo / f"snapshots/{COMMIT}/data/train-00000.parquet", table_of(CLUSTERED[:20], UNIREF))
    write(repo / f"snapshots/{COMMIT}/data/validation.parquet", table_of(CLUSTERED[20:], UNIREF))
    (repo / f"snapshots/{COMMIT}/README.md").write_text("# Proteins")
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


@pytest.mark.usefixtures("hub_cache")
def test_inputs_from_the_hub(tmp_path, caplog):
    with caplog.at_level("INFO"):
        call(DOWNLOAD, "--source", "owner/proteins", "--output_dir", tmp_path, "--no_shuffle")
    assert csv_of(tmp_path)[1:] == [[member, text, cluster] for cluster, member, text in CLUSTERED]
    assert "--source owner/proteins: files of validation are read like the others" in caplog.text
    for number, path in enumerate(
        ("/data/train-00000.parquet", "/data/train*", f"@{COMMIT}/data/train-00000.parquet")
    ):
        out = tmp_path / str(number)
        sizes = ("--validation_size", 4, "--test_size", 0)  # of whole clusters
        call(TOKENIZE, "--source", f"hf://datasets/owner/proteins{path}", *sizes, "--output_dir", out)
        assert set(tokens_of(out)) == {member for _, member, _ in CLUSTERED[:20]}
    with pytest.raises(UserError, match=r"--source hf://datasets/owner/proteins/other: no such file"):
        call(TOKENIZE, "--source", "hf://datasets/owner/proteins/other", "--output_dir", tmp_path / "none")
    with pytest.raises(UserError, match=r"owner/other: not in the local cache, and the Hub is .*, then --source DIR$"):
        call(TOKENIZE, "--source", "owner/other", "--output_dir", tmp_path / "none")
    assert not (tmp_path / "none").exists()


# --- bad input


def lists(path: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "sequence": [["M", "K"]]}), path)


def structures(path: Path) -> None:
    pq.write_table(pa.table({"id": [{"name": "a"}], "sequence": ["MK"]}), path)


def objects(path: Path) -> None:
    path.write_text('{"id": "a", "sequence": {"chain": "MK"}}\n')


def no_sequence(path: Path) -> None:
    write(path, table_of(ROWS, ("id", "description")))


def tokenised(path: Path) -> None:
    write(path, pa.table({"id": ["a"], "input_ids": [[0, 5, 2]]}))


def no_text(path: Path) -> None:
    write(path, pa.table({"id": ["a", "b"], "sequence": ["MK", None]}))


def unreadable_clusters(path: Path) -> None:
    write(path, pa.table({"id": ["a"], "sequence": ["MK"], "cluster": [1.5]}))


def cut_short(path: Path) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:-70])


def cut_at_a_batch(path: Path) -> None:
    """Its reader would take the end of the file for that of the stream."""
    write(path)
    path.write_bytes(path.read_bytes()[:-8])


def late_clusters(path: Path) -> None:
    write(path, pa.table({"id": ["a", "b"], "sequence": ["MK", "MKL"]}))
    path.write_bytes(path.read_bytes() + b'{"id": "c", "sequence": "MKV", "cluster": "C"}\n')


def late_ids(path: Path) -> None:
    path.write_bytes(b'{"sequence": "MKV"}\n{"sequence": "MKV", "Accession": "P1"}\n')


BAD = [
    (late_clusters, "a.jsonl", "a.jsonl: row 3 has a field cluster, and the first has none: give it to the first too"),
    (late_ids, "a.jsonl", "a.jsonl: row 2 has a field Accession, and the first has none"),
    (no_sequence, "a.parquet", "a.parquet: no column sequence or text or seq, only id, description: name the one"),
    (no_sequence, "a.tsv", "a.tsv: row 0: no column sequence or text or seq, only id, description"),
    (lists, "a.parquet", "a.parquet: the column sequence holds list<element: string>: expected texts"),
    (structures, "a.parquet", "a.parquet: the column id holds struct<name: string>: expected texts or whole numbers"),
    (objects, "a.jsonl", "a.jsonl: the column sequence holds struct<>: expected texts"),
    (unreadable_clusters, "a.parquet", "a.parquet: the column cluster holds double: expected texts or whole numbers"),
    (tokenised, "a.arrow", "a.arrow: holds token ids (a column input_ids), tokenised already: see --dataset_dir"),
    (tokenised, "saved", "saved: holds tokenised data already: give it as --dataset_dir"),
    (no_text, "a.parquet", "a.parquet: row 2: the text is empty: fix or remove the row, or give --on_bad_record skip"),
    (cut_short, "a.arrow", "a.arrow: no Arrow file or stream, or it is cut short"),
    (cut_at_a_batch, "a.arrow", "a.arrow: no Arrow file or stream, or it is cut short"),
    (cut_short, "a.feather", "a.feather: cannot be read: "),
    (cut_short, "a.parquet", "a.parquet: cannot be read: "),
]


@pytest.mark.parametrize(("make", "name", "said"), BAD, ids=[f"{make.__name__} {name}" for make, name, _ in BAD])
def test_inputs_that_are_bad_are_one_line(tmp_path, make, name, said):
    make(tmp_path / name)
    for script, flag in ((DOWNLOAD, "--source"), (TOKENIZE, "--source"), (TOKENIZE, "--input_dir")):
        with pytest.raises(UserError) as error:
            call(script, flag, tmp_path / name, "--output_dir", tmp_path / "new/out")
        assert said in str(error.value)
        assert str(error.value).isprintable()
        assert not list(tmp_path.glob("new/out/[!.]*"))


def test_inputs_with_a_named_column_that_is_not_there(tmp_path):
    write(tmp_path / "a.parquet")
    flags = ("--source", tmp_path / "a.parquet", "--cluster_column", "clan", "--output_dir", tmp_path / "out")
    line = expect_error("1.tokenize_uniref_csv.py", *flags)
    assert line == f"error: {tmp_path}/a.parquet: no column clan (--cluster_column), only id, sequence"
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


def test_inputs_without_columns_refuse_the_flag_of_one(tmp_path):
    write(tmp_path / "a.fasta")
    for script in (DOWNLOAD, TOKENIZE):
        with pytest.raises(UserError, match="--id_column gene: no file of the input has columns: drop the flag"):
            call(script, "--source", tmp_path / "a.fasta", "--id_column", "gene", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_inputs_of_a_format_that_has_texts_alone_are_numbered(tmp_path, monkeypatch):
    monkeypatch.setitem(FORMATS, "pairs", toy_format.FORMAT)
    (tmp_path / "a.pairs").write_text("".join(f"{name} {text}\n" for name, text in ROWS))
    assert records(tmp_path / "a.pairs") == [(f"a-{row}", text) for row, (_, text) in enumerate(ROWS, 1)]


def test_step_0_refuses_clusters_that_are_all_missing(tmp_path):
    write(tmp_path / "a.parquet", table_of([(None, name, text) for name, text in ROWS], UNIREF))
    with pytest.raises(UserError, match=r"--source .*a.parquet: the column of clusters has no value in any record"):
        call(DOWNLOAD, "--source", tmp_path / "a.parquet", "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_step_0_refuses_ids_that_no_line_can_hold(tmp_path):
    rows = [("a,b", "MK"), ("a\tb", "MKV"), ("", "MKL"), ('é"\u2028x', "MKI"), ("line\nend", "MKW")]
    write(tmp_path / "a.parquet", table_of(rows))
    out = ("--output_dir", tmp_path / "out", "--no_shuffle")
    with pytest.raises(UserError, match=r"a.parquet: the record MKV... has a tab or line end in its id or cluster"):
        call(DOWNLOAD, "--source", tmp_path / "a.parquet", *out)
    call(DOWNLOAD, "--source", tmp_path / "a.parquet", *out, "--on_bad_record", "skip")
    assert csv_of(tmp_path / "out")[1:] == [["a,b", "MK"], ['é"\u2028x', "MKI"]]
    assert read_record(tmp_path / "out/csv")["results"]["skipped_records"] == 3


def test_source_replaces_the_directory_that_a_job_names(tmp_path, caplog):
    write(tmp_path / "a.parquet", table_of(ROWS))
    words = ("--input_dir", tmp_path / "csv", "--source", tmp_path / "a.parquet", "--output_dir", tmp_path / "out")
    with caplog.at_level("INFO"):
        call(TOKENIZE, *words)
    assert f"--source replaces --input_dir {tmp_path / 'csv'}" in caplog.text
    assert set(tokens_of(tmp_path / "out")) == {name for name, _ in ROWS}
