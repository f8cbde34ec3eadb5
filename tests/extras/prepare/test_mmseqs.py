"""--cluster: MMseqs2 finds the families, and no split shares one with another."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess

import datasets
import pyarrow as pa
import pytest

from common.cli import UserError
from common.data.clusters import open_clusters
from common.models.esm2.alphabet import TOKENS
from extras.prepare.cluster_splits import cluster_records, numbers, write_numbered
from extras.prepare.output_directory import JOURNAL, Build, Journal
from tests.data_fixtures import TOKENIZE, call

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
FAMILIES, MEMBERS = 40, 6


def related(seed: int = 3) -> list[tuple[str, str, int]]:
    """(id, protein, family): members differ from their ancestor in a tenth of the residues. Ids as UniProt has them,
    which MMseqs2 would shorten, and each is there twice."""
    draw = random.Random(seed)
    rows = []
    for family in range(FAMILIES):
        ancestor = draw.choices(RESIDUES, k=draw.randint(80, 150))
        for member in range(MEMBERS):
            text = "".join(draw.choice(RESIDUES) if draw.random() < 0.1 else residue for residue in ancestor)
            rows.append((f"sp|P{family}|{member // 2}", text, family))
    draw.shuffle(rows)
    return rows


def like_nucleotides() -> list[str]:
    """Ten proteins of A, C, G and T: MMseqs2 14 takes a file that begins with them for one of nucleotides."""
    draw = random.Random(1)
    return ["".join(draw.choices("ACGT", k=60)) for _ in range(10)]


def write(directory, rows) -> None:
    directory.mkdir()
    for part in range(2):
        lines = [f"{name},{text}\n" for name, text, _ in rows[part::2]]
        (directory / f"x{part:03d}.csv").write_text("id,text\n" + "".join(lines))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
def test_mmseqs_holds_out_whole_families(tmp_path):
    rows = related()
    write(tmp_path / "csv", rows)
    flags = ("--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--cluster", 0.5)
    call(TOKENIZE, *flags, "--validation_size", 30, "--test_size", 18)
    family_of = {text: family for _, text, family in rows}
    families = {
        split: {family_of["".join(TOKENS[token] for token in ids[1:-1])] for ids in part["input_ids"]}
        for split, part in datasets.load_from_disk(str(tmp_path / "out" / "arrow")).items()
    }
    assert sum(map(len, families.values())) == FAMILIES
    for one, other in itertools.combinations(families.values(), 2):
        assert not one & other
    for split, size in {"train": FAMILIES * MEMBERS - 48, "validation": 30, "test": 18}.items():
        assert len(open_clusters(tmp_path / "out/arrow" / split, size)) == len(families[split])
    record = json.loads((tmp_path / "out/arrow/.complete.json").read_text())
    assert record["made_from"]["cluster"] == 0.5
    assert record["results"]["mmseqs"]
    assert not (tmp_path / "out" / ".building").exists()
    call(TOKENIZE, *flags, "--validation_size", 30, "--test_size", 18)  # nothing to do
    with pytest.raises(UserError, match="made from other input or arguments"):
        call(TOKENIZE, *flags[:-1], 0.9, "--validation_size", 30, "--test_size", 18)


@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
def test_mmseqs_is_not_left_to_guess_what_the_records_are(tmp_path):
    """As nucleotides, copies with other ends would be clusters of their own; and what MMseqs2 alone takes them for."""
    rows = [text for _, text, _ in related() if len(text) > 100][:6]
    texts = [*like_nucleotides(), *rows, *(text[:-4] + "WWWW" for text in rows)]
    build = Build({}, tmp_path, Journal(tmp_path / JOURNAL))
    batch = pa.record_batch({"id": list(map(str, range(len(texts)))), "text": texts})
    table = cluster_records(build, [tmp_path], lambda _: [batch], 0.8, 1)
    pairs = [line.split("\t") for line in table.read_text().splitlines()]
    cluster_of = {int(member): cluster for cluster, member in pairs}
    assert len(cluster_of) == len(texts)
    assert all(cluster_of[10 + n] == cluster_of[16 + n] for n in range(6))
    write_numbered(tmp_path / "records.fasta", [batch])
    command = ("mmseqs", "createdb", tmp_path / "records.fasta", tmp_path / "guessed")
    assert "Database type: Nucleotide" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
def test_names_in_the_table_of_mmseqs_are_no_longer_unique(tmp_path):
    """Why records are numbered: proteins of one name, or one accession, are one name in two clusters."""
    texts = [text for _, text, family in related() if family < 4][::5][:4]
    names = ("x", "x", "sp|P1|A", "tr|P1|B")
    (tmp_path / "in.fasta").write_text("".join(f">{name}\n{text}\n" for name, text in zip(names, texts, strict=True)))
    command = (
        "mmseqs",
        "easy-cluster",
        "in.fasta",
        "out",
        "work",
        "--dbtype",
        "1",
        "--min-seq-id",
        "0.99",
        "-c",
        "0.8",
    )
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    rows = (tmp_path / "out_cluster.tsv").read_text().splitlines()
    assert sorted(rows) == ["P1\tP1", "P1\tP1", "x\tx", "x\tx"]


@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
def test_mmseqs_failure_is_one_line(tmp_path, monkeypatch):
    write(tmp_path / "csv", related()[:20])
    monkeypatch.setattr("extras.prepare.cluster_splits.COVERAGE", "much")
    with pytest.raises(
        UserError, match=r"--cluster: mmseqs easy-cluster ended with status 1: .*Error in argument -c"
    ) as error:
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--cluster", 0.5)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs MMseqs2 (tests/ops/install_packages.sh)")
def test_mmseqs_failure_includes_its_reason(tmp_path):
    write(tmp_path / "csv", [(f"p{n}", "MKV", n) for n in range(6)])
    with pytest.raises(UserError, match="the sequences length is less than 14 residues"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--cluster", 0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--cluster", 0), "--cluster 0.0: an identity above 0 and up to 1"),
        (("--cluster", 50), "--cluster 50.0: an identity above 0 and up to 1"),
        (("--cluster", 0.5, "--cluster_table", "t.tsv"), "--cluster and --cluster_table: give one of them"),
        (("--cluster", 0.5, "--line_by_line", "False"), "--cluster needs --line_by_line True"),
        (("--cluster", 0.5, "--line_ends_in_text"), "--line_ends_in_text does not go with --cluster"),
    ],
)
def test_mmseqs_refuses_conflicting_flags(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        call(TOKENIZE, "--input_dir", tmp_path, *flags)


def test_mmseqs_missing_is_reported_with_advice(tmp_path, monkeypatch):
    write(tmp_path / "csv", related()[:20])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no mmseqs on PATH: apt-get install mmseqs2, .* or cluster elsewhere"):
        call(TOKENIZE, "--input_dir", tmp_path / "csv", "--output_dir", tmp_path / "out", "--cluster", 0.5)
    assert not (tmp_path / "out").exists()


def test_write_numbered_names_records_by_number(tmp_path):
    batches = [
        pa.record_batch({"id": ids, "text": texts}) for ids, texts in ((["a", "a"], ["MK>", "mk-"]), (["b"], ["A"]))
    ]
    assert write_numbered(tmp_path / "numbered.fasta", batches) == 3
    assert (tmp_path / "numbered.fasta").read_text() == ">0\nMKX\n>1\nmkX\n>2\nA\n"
    assert [part.to_pylist() for part in numbers(batches)] == [["0", "1"], ["2"]]
