"""A record that is too long is one line of error, and memory stays bounded, in whatever a user's file is packed."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import resource

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from common.data.flags import DataFlags
from common.flags import checked
from extras.prepare.cluster_splits import read_table
from extras.prepare.sources import parquet_pages
from extras.prepare.sources.compression import open_decompressed
from extras.prepare.sources.csv_records import read_rows as read_csv
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import documents, proteins
from extras.prepare.sources.sequence_files import read_rows, units_of
from extras.prepare.sources.streamed_data import find_source
from tests.data_fixtures import DOWNLOAD, TOKENIZE, call, load_script
from tests.forked import context

LONG = "MKVL" * 1000
MIB = 1 << 20
PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
BEGINNINGS = {
    "a.fasta": b">a\nMKV\n>b\n",
    "a.csv": b"id,text\na,MKV\nb,",
    "a.jsonl": b'{"text": "MKV"}\n{"text": "',
    "a.txt": b"MKV\n\n",
}


def read(path, content) -> list[str]:
    """The texts of a file."""
    units = units_of(open_source(str(path), streaming=True, content=content).splits["train"], wanted=1)
    return [text.as_py() for unit in units for block in read_rows(unit, 0) for text in block]


def write_long(path):
    """A short record, a long one and another short one."""
    texts, kind = ["MKV", LONG, "MKL"], path.suffix
    if kind == ".fasta":
        path.write_text("".join(f">{i}\n{text}\n" for i, text in enumerate(texts)))
    elif kind in (".csv", ".tsv"):
        path.write_text(
            "id,text\n".replace(",", "\t" if kind == ".tsv" else ",")
            + "".join(f"{i}\t{text}\n" if kind == ".tsv" else f"{i},{text}\n" for i, text in enumerate(texts))
        )
    elif kind == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == ".txt":
        path.write_text("\n\n".join(texts))
    else:
        pq.write_table(pa.table({"text": texts}), path)
    return path


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("a.fasta", "line 3: record 2"),
        ("a.csv", "row 2"),
        ("a.tsv", "row 2"),
        ("a.jsonl", "row 2"),
        ("a.parquet", "row 2"),
    ],
)
def test_read_rows_names_the_place_of_a_long_protein(tmp_path, name, where):
    path = write_long(tmp_path / name)
    with pytest.raises(
        UserError, match=rf"{name}(, row group 0)?: {where}: longer than 3,999 bytes: .*--max_record_l"
    ):
        read(path, proteins(3999))
    assert read(path, proteins(4010)) == ["MKV", LONG, "MKL"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_read_rows_names_the_place_of_a_long_document(tmp_path, name):
    path = write_long(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}: (line 3|row 2): .*3,999 bytes: .*--max_record_length"):
        read(path, documents("text", 3999))
    assert read(path, documents("text", 4010)) == ["MKV", LONG, "MKL"]


def test_read_fasta_refuses_a_long_record_of_short_lines(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_text(">a\nMK\n>b\n" + "MKVL\n" * 1000 + ">c\nMK\n")
    for block_bytes in (1 << 20, 100):
        with pytest.raises(UserError, match=r"a\.fasta: line 3: record 2: longer than 4,999 bytes"):
            list(read_fasta(path, block_bytes, max_record=4999))
    assert len(list(read_fasta(path, max_record=5010))) == 3


@pytest.mark.parametrize("quote", ["", '"'])
def test_csv_names_the_number_of_a_long_row(tmp_path, quote):
    path = tmp_path / "x000.csv"
    path.write_text("id,text\n" + "".join(f"{i},{quote}{text}{quote}\n" for i, text in enumerate(["MK", LONG, "ML"])))
    with pytest.raises(UserError, match=r"x000\.csv: row 2: longer than 3,999 bytes: .*--max_record_length"):
        list(read_csv(path, max_record=3999))
    assert sum(batch.num_rows for batch in read_csv(path, max_record=4000)) == 3


@pytest.mark.parametrize("limit", [5 * MIB, 4 * MIB])
def test_csv_raised_limit_admits_a_row_longer_than_a_block(tmp_path, limit):
    path = tmp_path / "x000.csv"
    path.write_text('id,text\n"a",MK\nb,' + "M" * (5 * MIB - 100) + "\n")
    if limit == 5 * MIB:
        assert sum(batch.num_rows for batch in read_csv(path, max_record=limit)) == 2
    else:
        with pytest.raises(UserError, match=r"x000\.csv: (row 2|after row 1): longer than 4,194,304 bytes"):
            list(read_csv(path, max_record=limit))


def test_json_refuses_a_first_line_without_end(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "' + "M" * (5 * MIB))
    with pytest.raises(UserError, match=r"a\.jsonl: line 1: longer than 4,194,304 bytes"):
        read(tmp_path / "a.jsonl", proteins(1000))


def test_json_refuses_deep_nesting(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000)
    with pytest.raises(UserError, match=r"a\.jsonl: cannot be read"):
        read(tmp_path / "a.jsonl", proteins())


def _peak(work, *arguments) -> tuple[str, int]:
    """The error of a call in another process, and by how many bytes its memory grew."""
    with context().Pool(1) as pool:
        return pool.apply(_measured, (work, *arguments))


def _measured(work, *arguments) -> tuple[str, int]:
    before, said = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ""
    try:
        work(*arguments)
    except UserError as error:
        said = str(error)
    return said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.parametrize(
    ("name", "packed"),
    [*(("a.fasta", packed) for packed in PACKERS), *((name, ".gz") for name in BEGINNINGS if name != "a.fasta")],
)
def test_read_rows_bounds_memory_for_a_compressed_gigabyte(tmp_path, name, packed):
    path, pack = tmp_path / f"{name}{packed}", PACKERS[packed]
    path.write_bytes(pack(BEGINNINGS[name]) + pack(b"A" * (16 * MIB)) * 64)
    said, grown = _peak(read, path, documents("text") if name == "a.txt" else proteins())
    assert "--max_record_length" in said
    assert grown < 400 * MIB


def test_xz_refuses_a_large_dictionary(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 29}]
    packer = lzma.LZMACompressor(filters=filters)
    (tmp_path / "a.xz").write_bytes(packer.compress(b"MKV\n") + packer.flush())
    with (
        pytest.raises(UserError, match=r"a\.xz: the compressed file .*[Mm]emory"),
        open_decompressed(tmp_path / "a.xz") as f,
    ):
        f.read()


def test_xz_reads_streams_and_padding(tmp_path):
    path, stream = tmp_path / "a.xz", lzma.compress(b"MKV\n")
    path.write_bytes(stream + b"\0" * 8 + stream + b"\0" * 4)
    with open_decompressed(path) as file:
        assert file.read() == b"MKV\nMKV\n"
    path.write_bytes(stream + stream[:-9])
    with pytest.raises(UserError, match="is cut short"), open_decompressed(path) as file:
        file.read()


# --- parquet


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("codec", ["snappy", "zstd", "none"])
def test_parquet_reads_pages_of_any_form(tmp_path, version, dictionary, codec):
    texts = [f"MKV{'L' * (i % 50)}" for i in range(5000)] + [None]
    form = {"data_page_version": version, "use_dictionary": dictionary, "compression": codec}
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", data_page_size=2000, row_group_size=2000, **form)
    assert read(tmp_path / "a.parquet", proteins()) == texts[:-1] + [""]


def test_parquet_refuses_a_decompression_bomb(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["MKV", "A" * (160 * MIB)]}), path, compression="zstd", use_dictionary=False)
    said, grown = _peak(read, path, documents("text"))
    assert "a.parquet, row group 0: a page of it decompresses from" in said
    assert grown < 100 * MIB
    table = pa.table({"ur50_id": ["UniRef50_A"], "ur90_id": ["A" * (100 * MIB)]})
    pq.write_table(table, tmp_path / "table.parquet", compression="zstd")
    with pytest.raises(
        UserError, match=r"--cluster_table .*table\.parquet: row group 0: a page of it decompresses from"
    ):
        list(read_table(tmp_path / "table.parquet"))


def _read_a_few(path):
    (unit,) = units_of(open_source(str(path), streaming=True).splits["train"], wanted=1)
    blocks = read_rows(unit, 0)
    assert sum(len(next(blocks)) for _ in range(4)) < 100


def test_parquet_bounds_rows_of_a_long_dictionary_value(tmp_path):
    """One value of 3 MB, in 4,000 rows of a file of some kilobytes: 12 GB."""
    path = tmp_path / "a.parquet"
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 4000, pa.int32()), ["A" * (3 * MIB)])
    pq.write_table(pa.table({"text": value}), path, compression="zstd")
    assert _peak(_read_a_few, path)[1] < 400 * MIB


def test_parquet_refuses_a_damaged_page_header(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["MKV"] * 100}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:12] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a\.parquet.*: cannot be read: a damaged page header"):
        read(path, proteins())


# --- the flag, where it is given


def test_max_record_length_is_a_flag_of_every_reader(tmp_path):
    (tmp_path / "in").mkdir()
    fasta, text = write_long(tmp_path / "in/a.fasta"), write_long(tmp_path / "texts.jsonl")
    limit = ("--max_record_length", 3000)
    with pytest.raises(UserError, match=r"a\.fasta: line 3: record 2: longer than 3,000 bytes"):
        call(DOWNLOAD, "--source", fasta, "--output_dir", tmp_path / "out", *limit)
    call(DOWNLOAD, "--source", fasta, "--output_dir", tmp_path / "out")
    step_1 = ("--input_dir", tmp_path / "out/csv", "--output_dir", tmp_path / "p", "--validation_size", 1)
    for more in ((), ("--on_bad_record", "skip")):
        with pytest.raises(UserError, match=r"x000\.csv: row \d: longer than 3,000 bytes"):
            call(TOKENIZE, *step_1, "--test_size", 1, *limit, *more)
    table = tmp_path / "table.tsv"
    table.write_text("ur50_id\tur90_id\n" + "".join(f"UniRef50_{i}\t{i}\n" for i in range(3)))
    with pytest.raises(UserError, match=r"x000\.csv: row \d: longer than 3,000 bytes"):
        call(TOKENIZE, *step_1, "--test_size", 1, *limit, "--cluster_table", table)
    with pytest.raises(UserError, match=r"texts\.jsonl: row 2: longer than 3,000 bytes"):
        call(load_script("1.tokenize_text.py"), "--dataset", text, "--output_dir", tmp_path / "t", *limit)
    with pytest.raises(UserError, match=r"a\.fasta: line 3: record 2: longer than 3,000 bytes"):
        find_source(DataFlags(dataset=str(fasta), max_steps=1, max_record_length=3000))


@pytest.mark.parametrize("value", [0, 1 << 31])
def test_max_record_length_refuses_out_of_range(value):
    with pytest.raises(UserError, match=f"--max_record_length {value}: a number of bytes, 1 to 1073741824"):
        checked(DataFlags(dataset="a.fasta", max_steps=1, max_record_length=value))


def test_read_table_refuses_a_long_line(tmp_path):
    (tmp_path / "table.tsv").write_text("ur50_id\tur90_id\nUniRef50_A\tB\n" + "A" * (9 * MIB) + "\tC\n")
    with pytest.raises(UserError, match=r"--cluster_table .*table\.tsv: after row 1 one of more than 4,194,304 bytes"):
        list(read_table(tmp_path / "table.tsv"))


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize(
    ("values", "longest"),
    [
        (["MKV" * n for n in range(1, 400)], 3 * 399),
        (["M", "", "K"], 1),
        (["M\0\0K", "MKV"], None),  # zero bytes cannot be told from those of a length
        (["M" * 70_000, "MKV"], None),
    ],
    ids=["usual", "empty", "zero bytes", "long"],
)
def test_longest_value_of_a_dictionary_page(tmp_path, monkeypatch, values, longest, compression):
    """Rows at once follow from it: where it is unknown, a value may be as long as the page."""
    found = []
    known = parquet_pages._longest_value
    monkeypatch.setattr(parquet_pages, "_longest_value", lambda *page: found.append(known(*page)) or found[-1])
    pq.write_table(pa.table({"text": values * 3}), tmp_path / "a.parquet", compression=compression)
    with open(tmp_path / "a.parquet", "rb") as file:
        metadata = pq.read_metadata(file)
        batches = list(parquet_pages.read_columns(file, "a", metadata, 0, ["text"], 4096, 1 << 20))
    assert found == [longest]
    assert [text for batch in batches for text in batch.column(0).to_pylist()] == values * 3
