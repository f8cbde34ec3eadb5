"""Readers of every format on unusual input: what they give, from any row on, and what they reject."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.cli import UserError
from extras.prepare.sources.find_files import open_source
from extras.prepare.sources.formats import documents
from extras.prepare.sources.sequence_files import read_rows, units_of

TEXTS = ["MKV", "", "LAG\u00e9"]
FILES = {
    "crlf.jsonl": b'{"text": "MKV"}\r\n\r\n{"text": null}\r\n{"other": [1], "text": "LAG\\u00e9"}\r\n',
    "bom.csv": "\ufeffid,Text\n1,MKV\n2,\n3,LAG\u00e9\n".encode(),
    "quoted.csv": 'text,id\n"MKV","a,b"\n"",2\n"LAG\u00e9",3\n'.encode(),
    "no_end.tsv": "text\tid\r\nMKV\t1\r\n\t2\r\nLAG\u00e9\t3".encode(),
}
TYPES = {
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
}


def read(path, first_row: int = 0) -> list[str]:
    files = open_source(str(path), False, content=documents("text")).splits["train"]
    (unit,) = units_of(files, wanted=1)
    blocks = [text.cast(pa.string()).to_pylist() for text in read_rows(unit, first_row)]
    return [text for block in blocks for text in block]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("first_row", [0, 1, 2, 3])
def test_read_rows_of_text_files(tmp_path, name, first_row):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    assert read(path, first_row) == TEXTS[first_row:]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("first_row", [0, 2])
def test_read_rows_of_parquet_types(tmp_path, kind, first_row):
    values = pa.array(["MKV", None, "LAG\u00e9"]).cast(TYPES[kind])
    pq.write_table(pa.table({"number": [1, 2, 3], "text": values}), tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet", first_row) == TEXTS[first_row:]


def test_read_rows_of_plain_text_separates_documents(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\r\n\nfirst\r\nline\r\n \t\r\n\r\nsecond\n\n\n")
    assert read(tmp_path / "a.txt") == ["first\r\nline", "second"]
    assert read(tmp_path / "a.txt", 1) == ["second"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "Empty CSV file"),
        ("a.csv", b"id,other\n1,MKV\n", "no column text, only id, other"),
        ("a.csv", b"text,text\nM,K\n", "no column text"),
        ("a.jsonl", b'{"other": 1}\n', "no column text, only other"),
        ("a.jsonl", b'{"text": "MKV"}\n{"text": ["M"]}\n', "cannot be read"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.txt", b"\x00\x01", "not plain text: it is a binary file"),
    ],
)
def test_read_rows_rejects(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)
