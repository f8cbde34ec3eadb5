"""extras/prepare/sources/residues.py: letters that stand for residues and mean bases."""

import gzip
import logging

import numpy as np
import pytest

from common.cli import UserError
from extras.prepare.sources import residues
from extras.prepare.sources.fasta import read_fasta
from extras.prepare.sources.proteins import ProteinFlags, clean_texts, read_proteins
from extras.prepare.sources.records import BadRecords
from tests.data_fixtures import REAL_SAMPLE, needs_real_sample


def looked_at(text: bytes, caplog, monkeypatch) -> str:
    """The warnings of two batches of a text."""
    monkeypatch.setattr(residues, "_warned", [])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            cleaner = residues.Cleaner("my.fasta", "keep")
            cleaner(np.frombuffer(text, np.uint8), np.array([0, len(text)]), str)
    return caplog.text


@pytest.mark.parametrize("bases", [b"ACGT", b"acgu", b"ACGTN"])
def test_clean_warns_once_of_nucleotides(bases, caplog, monkeypatch):
    said = looked_at(bases * 30 + b"MKV", caplog, monkeypatch)
    assert said.count("looks like DNA or RNA, not protein: translate it first") == 1
    assert "my.fasta: 9" in said


@needs_real_sample
def test_clean_does_not_warn_of_proteins(caplog, monkeypatch):
    text = b"".join(line for line in gzip.decompress(REAL_SAMPLE.read_bytes()).split(b"\n") if line[:1] != b">")
    assert looked_at(text, caplog, monkeypatch) == ""
    assert looked_at(b"GATTACA", caplog, monkeypatch) == "", "too few to tell"


def test_clean_refuses_structure_letters(caplog, monkeypatch):
    for text in (b"MKTAylIAKQRqisFVKSHFsRQ", b"mktayiakqrqisfvkshfsrq", b"MdEv"):  # the last: too few to tell
        assert looked_at(text, caplog, monkeypatch) == ""
    with pytest.raises(UserError, match="my.fasta: capitals and small letters take turns"):
        looked_at(b"MdEvKpLqAlGvSvTpRdWkYs", caplog, monkeypatch)


ALIGNED = b"#3,1\t1\n>ss_pred\nCCHHE\n>query\nMKVLA\n>insert\nM-VgtLA\n>gap\n--V.L-\n"


@pytest.mark.parametrize(
    ("gaps", "found"),
    [
        (None, ["MKVLA", "MVgtLA", "VL"]),
        ("remove", ["MKVLA", "MVgtLA", "VL"]),
        ("keep", ["MKVLA", "M-VLA", "--VL-"]),
    ],
)
@pytest.mark.parametrize("name", ["family.a3m", "family.A2M"])
def test_alignment_by_name_gives_its_proteins_or_rows_as_long_as_the_query(tmp_path, name, gaps, found):
    (tmp_path / name).write_bytes(ALIGNED)
    cleaner = ProteinFlags(gaps).cleaner(str(tmp_path / name))
    assert [text.decode() for _, text in read_fasta(tmp_path / name, cleaner=cleaner)] == found
    counts = cleaner.changes.annotations, cleaner.changes.gaps, cleaner.changes.insertions
    assert counts == ((1, 0, 3) if gaps == "keep" else (1, 5, 0))  # . is an insertion's gap


@pytest.mark.parametrize(("gaps", "found"), [("remove", "MKVLA"), ("keep", "MK--VLA"), (None, None), ("refuse", None)])
def test_gaps_of_fasta_are_refused_unless_a_flag_says_what_they_are(tmp_path, gaps, found):
    path = tmp_path / "a.fasta"
    path.write_bytes(b">one\nMKVLA\n>two\nMK--\nVLA\n")
    if found is None:
        with pytest.raises(UserError, match=r"a\.fasta: record two has gaps .*--gaps remove"):
            read_proteins(str(path), flags=ProteinFlags(gaps))
    else:
        assert read_proteins(str(path), flags=ProteinFlags(gaps)) == {"one": "MKVLA", "two": found}


def test_what_is_changed_is_counted_and_named(tmp_path, caplog):
    path = tmp_path / "a.fasta"
    path.write_bytes(
        b"; Pearson's comment\n>p0 x\nM K V L A*\n;another\nLAGVSERTI**\n"
        + b"".join(b">p%d\nMKVLAGTYWRJ%s\n" % (n, b"LAGVSERTIDPKQNFY" * n) for n in range(1, 6))
    )
    with caplog.at_level(logging.INFO):
        found = read_proteins(str(path))
    assert found["p0"] == "MKVLA*LAGVSERTI", "only final stops are removed"
    assert "removed: 4 blanks, 2 stops (*) at the end" in caplog.text
    assert (
        "6 characters in 6 records are not residues: <unk> (record p0, record p1, record p2 and others)" in caplog.text
    )


@pytest.mark.parametrize("said", ["Sequence unavailable", "SEQUENCEUNAVAILABLE", "No sequence available"])
def test_a_record_that_says_it_has_no_sequence_is_refused_or_skipped(tmp_path, said, caplog):
    path = tmp_path / "mart.fasta"
    path.write_text(f">one\nMKVLA\n>two\n{said}\n")
    with pytest.raises(UserError, match="record two says that there is no sequence"):
        read_proteins(str(path))
    assert read_proteins(str(path), flags=ProteinFlags(on_bad_record="skip")) == {"one": "MKVLA"}
    assert "1 bad records were skipped" in caplog.text


def test_ten_of_a_hundred_characters_may_be_unknown_and_not_eleven(tmp_path):
    path, bad = tmp_path / "a.fasta", BadRecords("skip")
    path.write_text(f">ten\n{'1' * 10}{'A' * 90}\n>eleven\n{'1' * 11}{'A' * 89}\n")
    cleaner = residues.Cleaner("a.fasta", bad_records=bad)
    assert [name for name, _ in read_fasta(path, cleaner=cleaner)] == [b"ten"]
    assert "record eleven has 11 characters of 100" in bad.first[0]


def test_a_repeated_id_is_refused(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(b">one\nMKVLA\n>one\nMKVLA\n")
    with pytest.raises(UserError, match="two records have the id 'one'"):
        read_proteins(str(path))


@pytest.mark.parametrize("text", ["MKVLAGW", "mkvlagw", " M K V L A G W ", "MKVLAGW*", "mkv lag\tw**"])
def test_a_protein_has_one_identity_however_it_is_written(text):
    assert clean_texts([text, "MKV"], "a.csv", ["row 1", "row 2"]) == ["MKVLAGW", "MKV"]


@pytest.mark.parametrize("text", ["MK-VLA", "12345", "MK\u00a0VLA", "Sequence unavailable", "MKV:LAG"])
def test_what_is_no_protein_is_refused(text):
    with pytest.raises(UserError, match=r"^a\.csv: row 2 (has|says)"):
        clean_texts(["MKV", text], "a.csv", ["row 1", "row 2"])
    assert clean_texts(["MKV", text], "a.csv", ["row 1", "row 2"], ProteinFlags(on_bad_record="skip")) == ["MKV", ""]


@pytest.mark.parametrize("word", ["NA", "nan", "None", "null", "N/A"])
def test_words_for_a_missing_value_are_no_protein(tmp_path, word):
    assert clean_texts(["MKV", word, "MNA"], "a.csv", ["row 1", "row 2", "row 3"]) == ["MKV", "", "MNA"]
    path = tmp_path / "a.fasta"
    path.write_text(f">one\nMKV\n>two\n{word}\n")
    with pytest.raises(UserError, match="record two has no residues"):
        read_proteins(str(path))


def test_lines_and_files_of_other_formats_are_no_residues(tmp_path):
    path = tmp_path / "a.fasta"
    path.write_bytes(b">one x\rMKV\rLAG\r>two\rMKV\r")
    assert read_proteins(str(path)) == {"one": "MKVLAG", "two": "MKV"}, "line ends of old Macs"
    path.write_bytes(b">one\nMKV\n# next cluster\n>two\nMKL\n//\n>three\nMKA\n")
    assert read_proteins(str(path)) == {"one": "MKV", "two": "MKL", "three": "MKA"}
    path.write_bytes(b">P1;one\nAlpha crystallin B chain\nMKV*\n")
    with pytest.raises(UserError, match=r"line 1: PIR \(NBRF\)"):
        read_proteins(str(path))
    path.write_bytes(b">1abc_A mol:protein length:3  A\nMKV\n>1abc_B mol:na length:4  DNA\nGATC\n")
    with pytest.raises(UserError, match=r"record 2 \(1abc_B\) is a nucleic acid"):
        read_proteins(str(path))
    assert read_proteins(str(path), flags=ProteinFlags(on_bad_record="skip")) == {"1abc_A": "MKV"}
