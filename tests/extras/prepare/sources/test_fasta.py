"""extras/prepare/sources/fasta.py: what a record is, and where the complaints point."""

import bz2
import gzip
import lzma
import random
import re

import pyarrow as pa
import pytest

from common.cli import UserError
from extras.prepare.sources.fasta import read_fasta, read_fasta_lines
from extras.prepare.sources.records import BadRecords, columns
from extras.prepare.sources.residues import Cleaner
from tests.data_fixtures import REAL_SAMPLE, needs_real_sample

MESSY = (
    b"\xef\xbb\xbf\r\n\n>one the first > of them\r\nMKV LA\r\n\r\nga*gtyw\r\n"  # BOM, Windows, spaces
    b">two\tdescription\nACD\tEFG*\n\n"  # tabs, the stop at the end
    b"> three\nX1MKVLAGTYW\n;a comment\nA\n"  # space before the id
    b">four\nMK"  # no line end
)
CLEAN = [(b"one", b"MKVLAga*gtyw"), (b"two", b"ACDEFG"), (b"three", b"X1MKVLAGTYWA"), (b"four", b"MK")]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 5, 7, 16, 33, 1 << 20])
def test_fasta_is_independent_of_blocks(tmp_path, block_bytes):
    plain, packed = tmp_path / "a.fasta", tmp_path / "b.fasta"  # gzip is detected by content, not by name
    plain.write_bytes(MESSY)
    packed.write_bytes(gzip.compress(MESSY[:40]) + gzip.compress(MESSY[40:]))
    assert list(read_fasta(plain, block_bytes)) == CLEAN
    assert list(read_fasta(packed, block_bytes)) == CLEAN


@needs_real_sample
def test_fasta_of_real_sample_equals_plain_reader():
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
        (b">a\nMK\n>b\n*\n", "record b has no residues"),
        (b">a\nM\nK\n\n>\nMK\n", "line 5: record 2 has no id"),
        (b"> \t\nMK\n", "line 1: record 1 has no id"),
        (b">a\nMK\n>b\nMK\nV\xc3\xa9LA\n", "line 5: non-ASCII byte 0xc3 in the sequence of b"),
        (b">a\nMK\n>b\xe9 x\nMK\n", r"line 3: record 2: non-ASCII bytes in the id b\\xe9"),
        (b">a\nMK\nMV>b\nMK\n", "line 3: '>' inside the sequence of a"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_fasta_errors_name_the_line(tmp_path, content, message, block_bytes):
    path = tmp_path / "bad.fasta"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.fasta.*{message}"):
        list(read_fasta(path, block_bytes))


def record_batches(*arguments, **options):
    """In columns `id` and `text`."""
    return map(columns, read_fasta_lines(*arguments, **options))


def test_fasta_descriptions_may_have_any_bytes(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(">a Müller's > protein\nMK\n".encode())
    assert list(read_fasta(path)) == [(b"a", b"MK")]


@pytest.mark.parametrize(("damage", "message"), [("cut", "is cut short"), ("corrupt", "is corrupt")])
def test_fasta_rejects_damaged_gzip(tmp_path, damage, message):
    content = b"".join(b">P%d\n%s\n" % (i, b"MKVLAGTY"[: i % 8 + 1] * 9) for i in range(3000))
    packed = bytearray(gzip.compress(content))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    else:
        packed[len(packed) // 2] ^= 0xFF
    path = tmp_path / "bad.fasta.gz"
    path.write_bytes(packed)
    with pytest.raises(
        UserError, match=rf"bad.fasta.gz: the compressed file {message}.*after [\d,]+ records, line \d+"
    ):
        list(read_fasta(path, 1000))


def one_by_one(content: bytes) -> list[tuple[int, bytes, bytes, bool]]:
    """What the records are, found the slow way: (line of the header, id, sequence, usable)."""
    records = []
    line = 1 + content.count(b"\n", 0, len(content) - len(content.lstrip()))
    for part in content.strip()[1:].split(b"\n>"):
        header, _, body = part.partition(b"\n")
        name, sequence = (header.split() or [b""])[0], b"".join(body.split())
        sequence = sequence.rstrip(b"*")
        unknown = sum(letter not in b"LAGVSERTIDPKQNFYMHWCXBUZO" for letter in sequence.upper())
        usable = bool(name and sequence) and b">" not in sequence and (name + sequence).isascii()
        usable = usable and 10 * unknown <= len(sequence)
        records.append((line, name, sequence, usable))
        line += part.count(b"\n") + 1
    return records


PIECES = [
    b"\n>",
    b"\n>",
    b"\n>id%d",
    b"\n>%d\n",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b"\v",
    b"MKV",
    b"la",
    b"*",
    b"*\n",
    b">",
]
PIECES += [b"\xe9", b"\x85", b"\xa0", b"\x00", b",", b'"', b"\n\n", b"x" * 70]


@pytest.mark.parametrize("seed", range(40))
def test_fasta_of_random_bytes_equals_plain_reader(tmp_path, seed):
    """Random texts of everything that matters to the format, half of their records bad, in blocks of any size."""
    draw = random.Random(seed)
    content = b">first\nMK" + b"".join(
        piece.replace(b"%d", b"%d" % number) for number, piece in enumerate(draw.choices(PIECES, k=400))
    )
    path = tmp_path / "a.fasta"
    path.write_bytes(content)
    expected = one_by_one(content)
    for block_bytes in (1, 7, draw.randrange(2, 2000), 1 << 20):
        bad = []
        batches = list(record_batches(path, block_bytes, cleaner=Cleaner("a.fasta", bad_records=bad.append)))
        found = [(row["id"].encode(), row["text"].encode()) for batch in batches for row in batch.to_pylist()]
        assert found == [(name, sequence) for _, name, sequence, usable in expected if usable]
        told = [re.search(r"line (\d+): record", str(complaint)) for complaint in bad]
        lines = [int(where[1]) for where in told if where]
        assert set(lines) <= {line for line, *_, usable in expected if not usable}
        assert set(lines) >= {line for line, name, *_ in expected if not name}
        assert lines == sorted(lines)
        assert len(bad) == sum(not usable for *_, usable in expected)


def test_fasta_columns_are_strings(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(MESSY)
    for block_bytes in (5, 1 << 20):
        batches = list(record_batches(path, block_bytes))
        assert {batch.schema for batch in batches} == {pa.schema([("id", pa.string()), ("text", pa.string())])}
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert rows == [{"id": name.decode(), "text": sequence.decode()} for name, sequence in CLEAN]
    assert len(list(record_batches(path, 5))) > 1


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_fasta_reads_titin(tmp_path, line_end):
    titin = b"MTTQAPTFTQPLQSVVVLEGSTATFEAHISGFPVPEVSWFRDGQVISTSTLPGVQISFSD" * 584  # 35,040 residues
    lines = [titin[i : i + 60] for i in range(0, len(titin), 60)]
    path = tmp_path / "a.fasta"
    path.write_bytes(line_end.join([b">a", b"MK", b">TITIN_HUMAN Titin", *lines, b">b", b"MV", b""]))
    for block_bytes in (1000, 1 << 20):
        assert list(read_fasta(path, block_bytes)) == [(b"a", b"MK"), (b"TITIN_HUMAN", titin), (b"b", b"MV")]


def test_fasta_keeps_case_and_odd_letters(tmp_path):
    """Lower case, stops inside, ids that come twice."""
    path = tmp_path / "a.fasta"
    path.write_bytes(b">same\nmkVLAX\n>same\nMK*LAGVSERT**\n>same\nMK\n*\n")
    assert list(read_fasta(path)) == [(b"same", b"mkVLAX"), (b"same", b"MK*LAGVSERT"), (b"same", b"MK")]


def test_fasta_skips_bad_records(tmp_path):
    content = b">a\nMK\n>b\n>c\nMV\n>\nMK\n>d\nM>K\n>e\xe9\nMK\n>f\nM\xe9\n>g\nMK\n>h\n*\n>i\nMV"
    path = tmp_path / "bad.fasta"
    path.write_bytes(content)
    for block_bytes in (1, 1 << 20):
        bad = BadRecords("skip")
        cleaner = Cleaner("bad.fasta", bad_records=bad)
        rows = [row for batch in record_batches(path, block_bytes, cleaner=cleaner) for row in batch.to_pylist()]
        assert [(row["id"], row["text"]) for row in rows] == [("a", "MK"), ("c", "MV"), ("g", "MK"), ("i", "MV")]
        assert bad.count == 6
        wheres = ["3: record 2", "6: record 4", "9: '>'", "10: record 6", "13: non-ASCII"]  # the first five are kept
        assert all(f"bad.fasta: line {where}" in text for where, text in zip(wheres, bad.first, strict=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b">a\nMKVLA\n" * 5000)[:-20], "cut short"),
        (gzip.compress(b">a\nMKVLA\n")[:-8] + b"\0" * 8, "is corrupt"),
        (gzip.compress(b">a\nMK\n") + b"garbage" * 9, "is corrupt"),
        (b"MK\n>a\nMK\n", "line 1: not FASTA"),
        (b"", "empty file"),
    ],
    ids=["cut", "checksum", "garbage behind", "not FASTA", "empty"],
)
def test_fasta_never_skips_damaged_files(tmp_path, content, message):
    path = tmp_path / "bad.fasta.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(record_batches(path, cleaner=Cleaner("bad.fasta", bad_records=BadRecords("skip"))))


def test_fasta_progress_ends_at_file_size(tmp_path):
    path = tmp_path / "a.fasta.gz"
    residues = bytes(random.Random(0).choices(b"ACDEFGHIKLMNPQRSTVWY", k=3_000_000))
    path.write_bytes(
        gzip.compress(b"".join(b">P%d\n%s\n" % (at, residues[at : at + 300]) for at in range(0, 3_000_000, 300)))
    )
    positions = []
    list(record_batches(path, 100_000, on_read=positions.append))
    assert positions == sorted(positions)
    assert len(set(positions)) > 2
    assert positions[-1] == path.stat().st_size


TWO = b">a one\nMKV\nLA\n>b\nMK\n"


def zstd(data: bytes) -> bytes:
    """In two frames, as parallel packers write it."""
    frames = [pa.compress(part, "zstd", asbytes=True) for part in (data[: len(data) // 2], data[len(data) // 2 :])]
    return b"".join(frames)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zstd])
def test_fasta_reads_compressed_files_of_any_name(tmp_path, pack):
    path = tmp_path / "a.fasta"
    path.write_bytes(pack(TWO))
    assert list(read_fasta(path)) == [(b"a", b"MKVLA"), (b"b", b"MK")]
    path.write_bytes(pack(TWO * 1000)[:-20])
    with pytest.raises(UserError, match=r"a\.fasta: the compressed file is (cut short|corrupt)"):
        list(read_fasta(path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK\x03\x04\x14\x00", "a zip archive: unpack it: unzip"),
        (gzip.compress(gzip.compress(TWO)), "gzipped twice: decompress it once: gunzip"),
        (gzip.compress(lzma.compress(TWO)), "compressed twice, inside with xz: decompress it once: gunzip"),
        (b"a.fasta".ljust(257, b"\0") + b"ustar\x00", "a tar archive: unpack it: tar -xf"),
        (TWO.decode().encode("utf-16"), "UTF-16: convert it: iconv -f UTF-16 -t UTF-8"),
        (b"<!DOCTYPE html>\n<html>Not found</html>", "a web page: a server's answer in place of the file"),
        (b"\x1b[2Jhello\n", "a binary file: expected text"),
        (b"LOCUS       AB000001\n", "expected a line that starts with '>', found 'LOCUS       AB000001'"),
    ],
)
def test_fasta_errors_name_the_format(tmp_path, content, told):
    path = tmp_path / "a.fasta"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(read_fasta(path))
    assert str(error.value).startswith(f"{path}: line 1: not FASTA: ")
    assert told in str(error.value)
    assert str(error.value).isprintable()
