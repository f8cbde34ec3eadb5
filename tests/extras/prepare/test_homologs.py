"""python -m extras.prepare.homologs: alignments and hits as clusters, what is refused, and a run on its output."""

from __future__ import annotations

import gzip
import os
import re

import numpy as np
import pytest

from common.cli import UserError
from common.data.clusters import open_clusters
from extras.prepare import homologs
from tests.data_fixtures import TOKENIZE, call, load
from tests.extras.families.sets.homologs import families
from tests.training_fixtures import train

A3M = ">Q1 query\nMK-TAY\n>H1 a hit\nMKaaL-AY\n#comment\n>H2\nM---AY\n>H2\nM---AY\n"
FASTA = ">Q1\nMKTAY\n>H1\nMKAALAY\n>H2\nMAY\n>Q2\nACDEF\n>H3\nacdeg\n>unused\nWWWW\n"
HITS = "Q1\tH1\t0.9\t7\nQ1\tQ1\t1.0\t5\nQ2\tH3\t0.8\t5\nQ1\tH1\t0.4\t3\n"


def prepared(tmp_path, *flags) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(proteins, rows of the table) of `--output tmp_path / "out"`."""
    call(homologs, "--output", tmp_path / "out", *flags)
    records = (tmp_path / "out/proteins.fasta").read_text().split(">")[1:]
    header, *rows = (tmp_path / "out/clusters.tsv").read_text().splitlines()
    assert header == "ur50_id\tur90_id"
    return [tuple(record.split()) for record in records], [tuple(row.split("\t")) for row in rows]


def test_alignment_is_a_cluster_of_proteins_without_gaps(tmp_path, caplog):
    (tmp_path / "msas").mkdir()
    (tmp_path / "msas/fam one.a3m").write_text(A3M)
    (tmp_path / "msas/two.fasta.gz").write_bytes(gzip.compress(b">Q2\nAC.DEF\n>ss_pred\nHHHHHH\n>H3\nACD-EG\n"))
    (tmp_path / "msas/notes.txt").write_text("of these families")
    with caplog.at_level("INFO"):
        proteins, table = prepared(tmp_path, "--a3m", tmp_path / "msas")
    assert proteins == [("Q1", "MKTAY"), ("H1", "MKAALAY"), ("H2", "MAY"), ("Q2", "ACDEF"), ("H3", "ACDEG")]
    assert table == [("fam_one", "Q1"), ("fam_one", "H1"), ("fam_one", "H2"), ("two", "Q2"), ("two", "H3")]
    assert "5 proteins in 2 clusters, 0 of one and 0 of four and more; 1 repeats of a record" in caplog.text
    assert "1 files with other names are left out" in caplog.text


@pytest.mark.parametrize("header", ["", "query\ttarget\tfident\n", "# MMseqs2\n\n"])
def test_query_and_its_hits_are_a_cluster(tmp_path, header):
    (tmp_path / "hits.m8").write_text(header + HITS)
    (tmp_path / "db.fasta").write_text(FASTA)
    proteins, table = prepared(tmp_path, "--hits", tmp_path / "hits.m8", "--fasta", tmp_path / "db.fasta")
    assert proteins == [("Q1", "MKTAY"), ("H1", "MKAALAY"), ("Q2", "ACDEF"), ("H3", "ACDEG")]
    assert table == [("Q1", "Q1"), ("Q1", "H1"), ("Q2", "Q2"), ("Q2", "H3")]


def test_names_are_accessions_as_mmseqs_writes_them(tmp_path):
    """Also beside a table of BLAST's, which has whole names."""
    (tmp_path / "hits.m8").write_text("Q1\tH1\t0.9\t7\nsp|Q1|X\tUniRef50_H2\t0.9\t7\n")
    (tmp_path / "db.fasta").write_text(">sp|Q1|X y\nMKTAY\n>tr|H1|Z\nMKAALAY\n>UniRef50_H2 z\nMAY\n")
    proteins, table = prepared(tmp_path, "--hits", tmp_path / "hits.m8", "--fasta", tmp_path / "db.fasta")
    assert proteins == [("Q1", "MKTAY"), ("H1", "MKAALAY"), ("UniRef50_H2", "MAY")]
    assert table == [("Q1", "Q1"), ("Q1", "H1"), ("Q1", "UniRef50_H2")]


def test_file_whose_name_is_no_text_is_refused(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.a3m")
    path.write_text(A3M)
    with pytest.raises(UserError, match="is not UTF-8 or not printable: rename it"):
        prepared(tmp_path, "--a3m", path)
    assert not (tmp_path / "out").exists()


def test_columns_are_those_of_the_header(tmp_path):
    (tmp_path / "hits.m8").write_text("target\tbits\tquery\nH1\t50\tQ1\n")
    (tmp_path / "db.fasta").write_text(FASTA)
    _, table = prepared(tmp_path, "--hits", tmp_path / "hits.m8", "--fasta", tmp_path / "db.fasta")
    assert table == [("Q1", "Q1"), ("Q1", "H1")]


def test_protein_of_two_clusters_is_refused_or_left_to_the_first(tmp_path, caplog):
    (tmp_path / "a.a3m").write_text(A3M)
    (tmp_path / "b.a3m").write_text(">Q2\nACDEF\n>H1\nAC-EF\n")
    given = ("--a3m", tmp_path / "a.a3m", tmp_path / "b.a3m")
    with pytest.raises(UserError, match="^H1: is in two clusters, a and b: give --shared first"):
        prepared(tmp_path, *given)
    assert not (tmp_path / "out").exists()
    with caplog.at_level("INFO"):
        proteins, table = prepared(tmp_path, *given, "--shared", "first")
    assert [name for _, name in table] == [name for name, _ in proteins] == ["Q1", "H1", "H2", "Q2"]
    assert "1 left to the first cluster that has them" in caplog.text


def test_queries_of_one_id_are_called_by_their_files(tmp_path, caplog):
    (tmp_path / "a.a3m").write_text(">101\nMKTAY\n>H1\nMKTAF\n")
    (tmp_path / "b.a3m").write_text(">101\nACDEF\n>H2\nACDEG\n")
    with caplog.at_level("INFO"):
        _, table = prepared(tmp_path, "--a3m", tmp_path / "a.a3m", tmp_path / "b.a3m")
    assert table == [("a", "101"), ("a", "H1"), ("b", "b"), ("b", "H2")]
    assert "1 queries called by their files" in caplog.text


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "empty file"),
        (b"\x00\x01\x02\x03" * 9, "not FASTA"),
        (b">ss_pred\nHHH\n", "no query: an alignment's first record is a protein"),
        (b">Q\nMKTAY\n>H\nMKT-\n", "record 2, H: 4 columns, but the query has 5: not an alignment"),
        (b">Q\nMKTAY\n>H\n-----\n", "record 2, H: gaps alone: remove it"),
        (gzip.compress(b">Q\nMKTAY\n" * 99)[:-9], "the compressed file is cut short"),
        (None, "no such file"),
    ],
)
def test_alignment_that_cannot_be_read(tmp_path, content, line):
    if content is not None:
        (tmp_path / "a.a3m").write_bytes(content)
    with pytest.raises(UserError, match=f"a.a3m: .*{re.escape(line)}"):
        prepared(tmp_path, "--a3m", tmp_path / "a.a3m")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("hits", "line"),
    [
        ("", "hits.m8: no hit in it"),
        ("Q1 H1\n", "hits.m8: line 1: 'Q1 H1': expected query and target, separated by tabs"),
        ("Q1\tH1\n\tH1\n", "line 2: '\\tH1': expected query and target"),
        ("Q9\tH1\n", "db.fasta: the query Q9 of "),
        ("Q1\tH9\n", "db.fasta: the target H9 of "),
        ("Q1\tH1\nQ2\tH1\n", "H1: is in two clusters, Q1 and Q2: give --shared first"),
        ("\x00\x01\x02", "hits.m8: it is a binary file"),
    ],
)
def test_hits_that_cannot_be_read(tmp_path, hits, line):
    (tmp_path / "hits.m8").write_text(hits)
    (tmp_path / "db.fasta").write_text(FASTA)
    with pytest.raises(UserError, match=re.escape(line)):
        prepared(tmp_path, "--hits", tmp_path / "hits.m8", "--fasta", tmp_path / "db.fasta")
    assert not (tmp_path / "out").exists()


def test_arguments_that_contradict_each_other(tmp_path):
    (tmp_path / "empty").mkdir()
    for flags, line in [
        ((), "missing: --a3m"),
        (("--hits", "x"), "missing: --fasta"),
        (("--a3m", "x", "--hits", "x", "--fasta", "x"), "--a3m and --hits exclude each other"),
        (("--a3m", tmp_path / "empty"), "empty: no alignment in it"),
    ]:
        with pytest.raises(UserError, match=line):
            prepared(tmp_path, *flags)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out: is there already: choose another name"):
        prepared(tmp_path, "--a3m", tmp_path / "empty")


def test_output_goes_through_step_1_and_trains_on_sets(tmp_path):
    (tmp_path / "msas").mkdir()
    made = families(60)
    for family, members in made.items():
        rows = (f">{family}_{n}\n{member}\n" for n, member in enumerate(dict.fromkeys(members)))
        (tmp_path / f"msas/{family}.a3m").write_text("".join(rows))
    proteins, _ = prepared(tmp_path, "--a3m", tmp_path / "msas")
    out = ("--input_dir", tmp_path / "out/proteins.fasta", "--output_dir", tmp_path / "processed")
    sizes = ("--validation_size", 40, "--test_size", 0)
    call(TOKENIZE, *out, *sizes, "--cluster_table", tmp_path / "out/clusters.tsv", "--preprocessing_num_workers", 1)
    names = load(tmp_path / "processed")["train"]
    clusters = open_clusters(tmp_path / "processed/arrow/train", len(names))
    for members in np.split(clusters.members, clusters.offsets[1:-1]):
        assert len({names[int(member)][0].partition("_")[0] for member in members}) == 1
    assert len(clusters) < len(names) < len(proteins)
    run = {"model_type": "e1", "config_name": None, "max_seq_length": 64, "tokens_per_pack": 512, "max_steps": 2}
    run |= {"config_overrides": "num_hidden_layers=3,hidden_size=32,num_attention_heads=2,intermediate_size=64"}
    said = train(tmp_path / "processed/arrow", tmp_path / "run", do_eval=True, set_tokens=512, **run)
    assert f"Sampling sets: 1 to 16 members of each of {len(clusters)} clusters" in said
    assert "Held-out loss behind homologs" in said
