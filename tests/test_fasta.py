"""common/fasta.py: what a record is, and where the complaints point."""

import gzip

import pytest

from common.cli import UserError
from common.fasta import read_fasta
from tests.data_fixtures import REAL_SAMPLE, needs_real_sample

MESSY = (
    b"\xef\xbb\xbf\r\n\n>one the first > of them\r\nMKV LA\r\n\r\nga*g\r\n"  # BOM, Windows, spaces
    b">two\tdescription\nACD\tEFG*\n\n"  # tabs, the stop at the end
    b"> three\nX1-.\n"  # space before the id
    b">four\nMK"  # no line end
)
CLEAN = [(b"one", b"MKVLAga*g"), (b"two", b"ACDEFG"), (b"three", b"X1-."), (b"four", b"MK")]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 7, 16, 33, 1 << 20])
def test_records_do_not_depend_on_where_blocks_end(tmp_path, block_bytes):
    plain, packed = tmp_path / "a.fasta", tmp_path / "b.fasta"  # gzip is told by content, not by name
    plain.write_bytes(MESSY)
    packed.write_bytes(gzip.compress(MESSY[:40]) + gzip.compress(MESSY[40:]))
    assert list(read_fasta(plain, block_bytes)) == CLEAN
    assert list(read_fasta(packed, block_bytes)) == CLEAN


@needs_real_sample
def test_real_sample_equals_a_plain_reader():
    records = [part.split(b"\n") for part in gzip.decompress(REAL_SAMPLE.read_bytes())[1:].split(b"\n>")]
    expected = [(lines[0].split()[0], b"".join(lines[1:])) for lines in records]
    assert list(read_fasta(REAL_SAMPLE, 100_000)) == expected
    assert len(expected) == 8000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"\n \r\n\n", "empty file"),
        (b"\n\nMKVLA\n>a\nMK\n", "line 3: not FASTA"),
        (b"id,text\na,MK\n", "line 1: not FASTA"),
        (b">a\nMK\n>b\n>c\nMK\n", r"line 3: record 2 \(b\) has no sequence"),
        (b">a\nMK\n>b\n \r\n", r"line 3: record 2 \(b\) has no sequence"),
        (b">a\nMK\n>b\n*\n", r"line 3: record 2 \(b\) has no sequence"),
        (b">a\nM\nK\n\n>\nMK\n", "line 5: record 2 has no id"),
        (b"> \t\nMK\n", "line 1: record 1 has no id"),
        (b">a\nMK\n>b\nMK\nV\xc3\xa9LA\n", "line 5: non-ASCII byte 0xc3 in the sequence of b"),
        (b">a\nMK\n>b\xe9 x\nMK\n", r"line 3: record 2: non-ASCII bytes in the id b\\xe9"),
        (b">a\nMK\nMV>b\nMK\n", "line 3: '>' inside the sequence of a"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_bad_files_are_named_with_their_line(tmp_path, content, message, block_bytes):
    path = tmp_path / "bad.fasta"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.fasta.*{message}"):
        list(read_fasta(path, block_bytes))


def test_descriptions_may_hold_anything(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(">a Müller's > protein\nMK\n".encode())
    assert list(read_fasta(path)) == [(b"a", b"MK")]


@pytest.mark.parametrize(("damage", "message"), [("cut", "is cut short"), ("corrupt", "is corrupt")])
def test_damaged_gzip(tmp_path, damage, message):
    content = b"".join(b">P%d\n%s\n" % (i, b"MKVLAGTY"[: i % 8 + 1] * 9) for i in range(3000))
    packed = bytearray(gzip.compress(content))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "bad.fasta.gz"
    path.write_bytes(packed)
    with pytest.raises(UserError, match=rf"bad.fasta.gz: the gzip file {message}.*after [\d,]+ records, line \d+"):
        list(read_fasta(path, 1000))
