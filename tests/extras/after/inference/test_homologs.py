"""Homologs: what is read from alignments, FASTA and tables of hits, their weights, and contexts drawn of them."""

from __future__ import annotations

import gzip
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from common.cli import UserError
from extras.after.inference import homologs as module
from extras.after.inference.contexts import ContextFlags, Setting, Sources, draw, mean_over
from extras.after.inference.homologs import Homologs, hits_of, read_homologs, read_targets, weights_of
from tests.conftest import ROOT
from tests.data_fixtures import write_fasta
from tests.typed import blocks, sh

REFORMAT = Path("/usr/share/hhsuite/scripts/reformat.pl")  # where Debian has it
QUERY = b"MKVLAGWERT"
# The rows' residues, and in lower case what stands between columns.
A3M = [
    ("query", "MKVLAGWERT"),
    ("close", "MKVLAGWERS"),
    ("closer", "MKVLAGWEaaRS"),
    ("far", "--CCCGWCC-"),
    ("half", "MKVLC-----"),
    ("part", "MKVLA-----"),
    ("unknown", "MKVLXGWERT"),
    ("same", "MKVLAGWERT"),
    ("holds", "wwMKVLAGWERTww"),
]


def a3m(path: Path, rows: list[tuple[str, str]] = A3M) -> Path:
    return write_fasta(path, rows)


def test_weights_equal_a_loop_over_pairs():
    random = np.random.default_rng(0)
    rows = random.integers(0, 4, (60, 15)).astype(np.uint8)  # 0: a gap
    rows[20:40] = rows[:20]
    rows[20:40, :2] = 1

    def close(one, other) -> bool:
        own = [n for n in range(15) if one[n]]
        return 10 * sum(int(one[n] == other[n]) for n in own) >= 8 * len(own)

    expected = [1 / sum(close(one, other) for other in rows) for one in rows]
    assert weights_of(rows).tolist() == pytest.approx(expected)
    assert len(set(expected)) > 2


@pytest.mark.parametrize("name", ["a.a3m", "a.a3m.gz", "a.A2M"])
def test_an_alignment_gives_residues_weights_and_similarity(tmp_path, name, caplog):
    caplog.set_level("INFO")
    path = a3m(tmp_path / "a.a3m", [*A3M[1:3], A3M[0], *A3M[3:]])  # the query anywhere
    text = path.read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    found = read_homologs(tmp_path / name, QUERY)
    assert found.residues == [b"MKVLAGWERS", b"MKVLAGWEAARS", b"CCCGWCC", b"MKVLC"]
    assert found.similarity.tolist() == pytest.approx([0.9, 0.9, 0.2, 0.4])
    # Rows that hold the query count as neighbours, as they do for E1's authors: 6 of close, 1 of far; and half has 4
    # of its 5 residues in the others.
    assert found.weights.tolist() == pytest.approx([1 / 6, 1 / 6, 1, 1 / 8])
    assert "4 homologs; left out: 5 rows that are, contain or are a part of the query" in caplog.text


def test_aligned_fasta_has_the_querys_columns(tmp_path):
    """A column where the query has a gap does not count; lower case is a residue there."""
    rows = [("one", "MKvLAG-WERS"), ("query", "MKVLAG-WERT"), ("two", "MKVLAGAW---")]
    found = read_homologs(write_fasta(tmp_path / "a.fasta", rows), QUERY)
    assert found.residues == [b"MKVLAGWERS", b"MKVLAGAW"]
    assert found.similarity.tolist() == pytest.approx([0.9, 0.7])
    assert found.weights.tolist() == pytest.approx([1 / 2, 1 / 3])


def test_fasta_without_columns_has_no_similarity(tmp_path, caplog):
    path = write_fasta(tmp_path / "a.fasta", [("one", "MKA"), ("query", "MKVLAGWERT"), ("two", "MKVLAGWES")])
    found = read_homologs(path, QUERY)
    assert found.residues == [b"MKA", b"MKVLAGWES"]
    assert found.weights.tolist() == [1, 1]
    assert np.isnan(found.similarity).all()
    assert "not aligned: all homologs have the same weight, and --max_similarity does not apply" in caplog.text


def test_a_large_alignment_is_sampled(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "MOST_ROWS", 4)
    path = a3m(tmp_path / "a.a3m")
    found, again = (read_homologs(path, QUERY) for _ in range(2))
    assert found.residues == again.residues
    assert len(found.residues) <= 3
    assert "4 of its 9 rows are used" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (A3M[1:5], r"no row is the query \(10 residues, MKVLAGWERT"),
        ([*A3M, ("short", "MKV-")], "row 10 has 4 columns, the first 10: the rows of an alignment are of one length"),
        ([*A3M, ("empty", "----------")], "record empty has no residues"),
        ([*A3M, ("numbers", "1234567890")], "record numbers has 10 characters of 10 that are not residues"),
    ],
)
def test_a_bad_alignment_is_refused(tmp_path, rows, message):
    with pytest.raises(UserError, match=message) as caught:
        read_homologs(a3m(tmp_path / "a.a3m", rows), QUERY)
    assert "\n" not in str(caught.value)


def test_unknown_letters_are_kept_and_counted(tmp_path, caplog):
    rows = [("query", "MKVLAGWERT" * 2), ("one", "MKVLAGWER1" * 2)]
    assert read_homologs(a3m(tmp_path / "a.a3m", rows), QUERY * 2).residues == [b"MKVLAGWER1" * 2]
    assert "2 characters in 1 records are not residues: <unk> (record one)" in caplog.text


HITS = """query\tsp|P1|ONE\t0.9\t10\t1\t0\t1\t10\t1\t10\t1e-9\t50
query\ttwo\t0.5\t8\t4\t0\t1\t8\t1\t8\t1e-3\t20
query\ttwo\t1.0\t5\t0\t0\t1\t5\t1\t5\t1e-3\t20
query\tsame\t1.0\t10\t0\t0\t1\t10\t1\t10\t1e-3\t20
other\ttwo\t0.1\t10\t9\t0\t1\t10\t1\t10\t1\t5
"""
PROTEINS = [("sp|P1|ONE", "MKVLAGWERS"), ("two", "MKVLAYYYY"), ("same", "MKVLAGWERT"), ("unused", "AAA")]


@pytest.mark.parametrize("per_cent", [False, True])
def test_hits_are_read_with_their_database(tmp_path, per_cent):
    """MMseqs2 writes fractions, BLAST per cent."""
    text = "".join(
        "\t".join([*cells[:2], str(float(cells[2]) * 100), *cells[3:]]) + "\n" if per_cent else f"{line}\n"
        for line in HITS.splitlines()
        if (cells := line.split("\t"))
    )
    (tmp_path / "a.m8").write_text(text)
    fasta = write_fasta(tmp_path / "db.fasta", PROTEINS)
    flags = ContextFlags(str(tmp_path / "a.m8"), str(fasta))
    sources = Sources(flags, ["query", "other", "none"])
    found = sources.of("query", QUERY)
    assert found.residues == [b"MKVLAGWERS", b"MKVLAYYYY"]  # without `same`, which is the query
    assert found.similarity.tolist() == pytest.approx([0.9, 0.5])  # 9 and 5 of 10 residues
    assert found.weights.tolist() == [1, 1]
    assert sources.of("other", QUERY).similarity.tolist() == pytest.approx([0.1])


def test_a_protein_without_hits_is_alone(tmp_path, caplog):
    (tmp_path / "a.m8").write_text(HITS)
    flags = ContextFlags(str(tmp_path / "a.m8"), str(write_fasta(tmp_path / "db.fasta", PROTEINS)))
    assert Sources(flags, ["none"]).of("none", QUERY).residues == []
    assert "none has no homologs: it is read alone" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("query two 0.5 8\n", "line 1: 'query two 0.5 8': expected query, target, identity and aligned columns"),
        ("query\ttarget\tbits\n", "line 1: .*: expected query, target"),
        (HITS + "query\ttwo\thigh\t8\n", "line 6: identity 'high' and aligned columns '8' are not both numbers"),
        ("query\ttwo\t0.9\tnan\n", "its fourth column is no number of aligned columns"),
        ("query\ttwo\t0.9\t-8\n", "its fourth column is no number of aligned columns"),
        ("\x00\x01\x02", "a.m8: it is a binary file"),
        ("query\ttwo\t300\t8\n", "its third column is no identity"),
        ("query\ttwo\tnan\t8\n", "its third column is no identity"),
    ],
)
def test_a_bad_table_of_hits_is_refused(tmp_path, text, message):
    (tmp_path / "a.m8").write_text(text)
    with pytest.raises(UserError, match=message):
        hits_of(tmp_path / "a.m8")


def test_columns_of_hits_are_those_of_a_header(tmp_path):
    (tmp_path / "a.m8").write_text("target\tevalue\talnlen\tquery\tpident\ntr|P1|x\t1\t8\tsp|Q|y\t50\n")
    assert hits_of(tmp_path / "a.m8") == {"Q": {"P1": 4.0}}


def test_two_proteins_of_an_accession_are_refused(tmp_path):
    fasta = write_fasta(tmp_path / "db.fasta", [("pdb|1ABC|A", "MKV"), ("pdb|1ABC|B", "MKA"), ("a|b|c", "MKV")])
    assert read_targets(str(fasta), ["a|b|c"]) == {"a|b|c": b"MKV"}
    with pytest.raises(UserError, match="1ABC: twice, with other residues: rename one, and search again"):
        read_targets(str(fasta), ["1ABC"])


def test_hits_of_another_database_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"2 hits are not in it, 'five' the first: give the database"):
        read_targets(str(write_fasta(tmp_path / "db.fasta", PROTEINS)), ["two", "six", "five"])


def homologs(weights: list[float], similarity: list[float]) -> Homologs:
    return Homologs([b"M"] * len(weights), np.array(weights), np.array(similarity))


def test_draws_have_the_probabilities_of_the_weights():
    """First and second of all draws, beside the formula of drawing without replacement."""
    weights = [1.0, 0.5, 0.25, 0.25]
    of = homologs(weights, [0.1] * 4)
    draws = [draw(of, np.full(4, 10), Setting(20, 1.0), (seed, 0), 9) for seed in range(4000)]
    assert {len(each) for each in draws} == {2}
    counts = Counter(map(tuple, draws))
    for one in range(4):
        for other in set(range(4)) - {one}:
            p = weights[one] / 2 * weights[other] / (2 - weights[one])
            assert abs(counts[one, other] - 4000 * p) < 5 * math.sqrt(4000 * p)


def test_a_draw_keeps_similarity_budget_and_number():
    random = np.random.default_rng(1)
    of = homologs(random.random(50).tolist(), [*random.random(49), math.nan])
    tokens = random.integers(5, 30, 50)
    for number in range(20):
        drawn = draw(of, tokens, Setting(100, 0.6), (3, number), 50)
        assert drawn == draw(of, tokens, Setting(100, 0.6), (3, number), 50)
        assert len(set(drawn)) == len(drawn)
        assert tokens[drawn].sum() <= 100
        assert not (of.similarity[drawn] > 0.6).any()
        everything = draw(of, tokens, Setting(10_000, 0.6), (3, number), 50)
        assert everything[: len(drawn)] == drawn
        assert tokens[everything[: len(drawn) + 1]].sum() > 100
        assert set(everything) == set(np.flatnonzero(~(of.similarity > 0.6)).tolist())  # unknown similarity: kept
        assert draw(of, tokens, Setting(100, 0.6), (3, number), 2) == drawn[:2]
    assert draw(of, tokens, Setting(100, 0.6), (3, 0), 50) != draw(of, tokens, Setting(100, 0.6), (4, 0), 50)
    # Numbers that are the same on any machine.
    assert draw(homologs([1.0] * 6, [0.5] * 6), np.ones(6, int), Setting(6, 1.0), (0, 0), 6) == [3, 2, 1, 0, 4, 5]


def test_settings_take_turns():
    """15 contexts are E1's: all pairs once."""
    settings = ContextFlags(contexts=15).settings()
    assert len(set(settings)) == 15
    assert settings[:4] == [(7168, 1.0), (14336, 0.95), (21504, 0.9), (7168, 0.7)]
    two = ContextFlags(contexts=5, context_tokens=[10, 20], max_similarity=[0.9, 0.5]).settings()
    assert two == [(10, 0.9), (20, 0.5), (10, 0.5), (20, 0.9), (10, 0.9)]
    trained = ContextFlags(contexts=3).settings(4096)
    assert [each.tokens for each in trained] == [1365, 2730, 4096]


def test_mean_over_contexts():
    mean, error = mean_over([np.array([1.0, 2.0]), np.array([3.0, 2.0]), np.array([5.0, 2.0])])
    assert error is not None
    assert mean.tolist() == [3, 2]
    assert error.tolist() == pytest.approx([2 / math.sqrt(3), 0])
    assert mean_over([np.array([1.0])])[1] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"homologs": "none.a3m"}, "no such file or directory"),
        ({"homologs": "a.m8"}, "names proteins of a database: give it by --homologs_fasta"),
        ({"homologs": "a.a3m", "homologs_fasta": "a.a3m"}, "only of an .m8 file: drop it"),
        ({"homologs_fasta": "a.a3m"}, "give --homologs too"),
        ({"homologs": "a.m8", "homologs_fasta": "none"}, "no such file"),
        ({"contexts": 0}, "--contexts 0: 1 to 1,000"),
        ({"homologs": "a.a3m", "contexts": 100000}, "--contexts 100000: 1 to 1,000"),
        ({"contexts": 3}, "--contexts: is of contexts of homologs: give --homologs too"),
        ({"max_similarity": [0.5]}, "--max_similarity: is of contexts of homologs"),
        ({"seed": -1}, "--seed -1: must be at least 0"),
        ({"context_tokens": [100, 0]}, "--context_tokens 0: must be at least 1"),
        ({"max_similarity": [1.5]}, "--max_similarity 1.5: above 0, at most 1"),
    ],
)
def test_flags_are_checked(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.a3m", "a.m8"):
        Path(name).touch()
    with pytest.raises(UserError, match=message):
        ContextFlags(**flags).check()


def test_a_directory_has_a_file_of_each_protein(tmp_path):
    for name in ("one.a3m.gz", "tr_x_y.fasta", "P7.a3m", "two.a3m", "two.fasta", "notes.txt"):
        (tmp_path / name).touch()
    flags = ContextFlags(str(tmp_path))
    found = [path.name for path in flags.files(["one", "tr|x|y", "sp|P7|X"]).values()]
    assert found == ["one.a3m.gz", "tr_x_y.fasta", "P7.a3m"]
    for name, message in (("three", "no three.a3m: add it"), ("two", "two.a3m and two.fasta are of two: remove one")):
        with pytest.raises(UserError, match=message):
            flags.files([name])
    with pytest.raises(UserError, match="of one protein, and --fasta has 2: give a directory of ID.a3m files"):
        ContextFlags(str(tmp_path / "two.a3m")).files(["one", "two"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
def test_searches_of_the_page_are_read(tmp_path):
    """Its commands, as they stand, on a planted family: alignments named by accession, a table of hits; HMMER's."""
    random = np.random.default_rng(3)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    query = random.choice(letters, 100)
    rows = [np.where(random.random(100) < 0.7, query, random.choice(letters, 100)) for _ in range(8)]
    texts = ["".join(row) for row in (query, *rows)]
    write_fasta(tmp_path / "wild_type.fasta", [("sp|P1|WILD", texts[0])])
    write_fasta(tmp_path / "database.fasta", [(f"sp|Q{n}|X", text) for n, text in enumerate(texts)])
    page = (ROOT / "docs" / "homologs.md").read_text()
    aligned, hits = (block for block in blocks(page, "sh") if "mmseqs" in block)
    (hmmer,) = (block for block in blocks(page, "sh") if "jackhmmer" in block)
    here = shutil.which("jackhmmer") and REFORMAT.exists()
    for commands in (aligned, hits.splitlines()[0], *([f"PATH=$PATH:{REFORMAT.parent}; {hmmer}"] if here else [])):
        done = sh(commands, tmp_path)
        assert done.returncode == 0, done.stdout[-2000:]
    for flags in (
        ContextFlags(str(tmp_path / "families")),
        ContextFlags(str(tmp_path / "hits.m8"), str(tmp_path / "database.fasta")),
        *([ContextFlags(str(tmp_path / "family.a3m"))] if here else []),
    ):
        found = Sources(flags, ["sp|P1|WILD"]).of("sp|P1|WILD", texts[0].encode())
        assert len(found.residues) == 8
        by_similarity = [found.residues[n] for n in np.argsort(-found.similarity)]
        nearest = texts[1 + int(np.argmax([(row == query).sum() for row in rows]))]
        assert by_similarity[0].decode() in nearest
        assert found.similarity.max() == pytest.approx(max((row == query).mean() for row in rows), abs=0.03)
