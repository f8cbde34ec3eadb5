"""score.py against stock transformers: scores, what it refuses, what it does with an output that is there."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

import score as script
from benchmarks.real_downstream import MAVENN, mutations_of, read_measured
from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from common.models.esm2.config import esm2_config
from extras.after.inference.encoder import Encoder
from extras.after.inference.mutation_scores import parse_variant
from extras.prepare.sample import make_proteins
from tests.data_fixtures import call, expect_error, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model, stock, stock_log_p
from tests.models.reference import reference_model
from tests.small_disk import fill, small_disk

TABLES = Path(os.environ.get("MAVENN_SITE", Path(sys.prefix) / "mavenn")) / MAVENN.inside  # ./install.sh --dev


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def proteins() -> list[tuple[str, str]]:
    return [(name.split()[0], text) for name, text in make_proteins(3, 3, 4, (0.1, 0.4), seed=3)]


@pytest.fixture
def job(model, tmp_path, monkeypatch):
    """Runs score.py in this process on files in tmp_path; `mutants` is the CSV's text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fasta, table = tmp_path / "my.fasta", tmp_path / "mutants.csv"
    write_fasta(fasta, [("one", "MKVLAG"), ("two", "MKV")])

    def run(mutants: str, *flags, output: Path = tmp_path / "scored.csv", model: Path = model) -> list[dict]:
        table.write_text(mutants)
        given = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", table, "--output", output)
        call(script, *given, "--use_cpu", *flags)
        return rows_of(output)

    return run


def rows_of(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def stock_scores(model: Path, text: str, variant: str) -> tuple[float, float]:
    """(masked marginal, wild-type marginal) by transformers, from the formula: each position is masked alone."""
    ids = stock(model)[0].get_vocab()
    sums = [0.0, 0.0]
    for word in variant.split(":") if variant else []:
        at, old, new = int(word[1:-1]) - 1, ids[word[0]], ids[word[-1]]
        for n, log_p in enumerate((stock_log_p(model, text, at), stock_log_p(model, text))):
            sums[n] += float(log_p[at, new] - log_p[at, old])
    return tuple(sums)


def test_score_equals_transformers(model, proteins, job, tmp_path):
    rows = []
    for name, text in proteins:
        for at in (1, len(text) // 2, len(text)):
            rows.append({"note": f"at, {at}", "protein": name, "mutant": f"{text[at - 1]}{at}W"})
        rows.append({"note": "", "protein": name, "mutant": f"{text[2]}3A:{text[0]}1G"})
        rows.append({"note": "wild", "protein": name, "mutant": ""})
    with open(tmp_path / "rows.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_fasta(tmp_path / "my.fasta", proteins)
    table = (tmp_path / "rows.csv").read_text()
    scored = job(table, "--max_seq_length", 100_000, output=tmp_path / "new" / "scored.csv")
    assert [{key: row[key] for key in rows[0]} for row in scored] == rows
    for row in scored:
        expected = stock_scores(model, dict(proteins)[row["protein"]], row["mutant"])
        found = float(row["masked_marginal"]), float(row["wild_type_marginal"])
        assert found == pytest.approx(expected, abs=1e-5), row
    assert max(abs(float(row["masked_marginal"])) for row in scored) > 0.05
    cheap = job(table, "--wild_type_marginal_only", "--column_prefix", "mine_", output=tmp_path / "cheap.csv")
    assert list(cheap[0]) == ["note", "protein", "mutant", "mine_wild_type_marginal"]


@pytest.mark.skipif(not TABLES.is_dir(), reason="no tables of mavenn (./install.sh --dev)")
def test_score_of_amyloid_beta_equals_transformers_and_scipy(job, model, tmp_path):
    """Real measurements (Seuma et al. 2021), 30 of the single mutants."""
    table = read_measured(TABLES / "amyloid_data.csv.gz")
    wild_type = "DAEFRHDSGYEVHHQKLVFFAEDVGSNKGAIIGLMVGGVVIA"  # residues 1 to 42
    assert table.wild_type == wild_type
    drawn = [(table.sequences[n], table.measured[n]) for n in mutations_of(table, 1, 30)]
    write_fasta(tmp_path / "my.fasta", [("amyloid", wild_type)])
    scored = job("\n".join(["mutated_sequence,DMS_score", *(f"{sequence},{y}" for sequence, y in drawn)]))
    found = json.loads((tmp_path / "scored.csv.json").read_text())["correlations"]["proteins"]["amyloid"]
    assert found["variants"] == len(scored) == 30
    words = [
        next(f"{old}{n}{new}" for n, (old, new) in enumerate(zip(wild_type, sequence, strict=True), 1) if old != new)
        for sequence, _ in drawn
    ]
    expected = [stock_scores(model, wild_type, word) for word in words]
    for n, name in enumerate(("masked_marginal", "wild_type_marginal")):
        of_stock = [scores[n] for scores in expected]
        assert [float(row[name]) for row in scored] == pytest.approx(of_stock, abs=1e-5)
        # Scores that are as good as equal may change places: 2e-4 each.
        assert found[name]["spearman"] == pytest.approx(spearmanr(of_stock, [y for _, y in drawn]).statistic, abs=1e-3)


GYM = """mutant,mutated_sequence,DMS_score,DMS_score_bin
K2R,MRVLAG,0.5,1
A5G,MKVLGG,-1.5,0
K2R:A5G,MRVLGG,,0
L4W,MKVWAG,0.1,0
V3I,MKILAG,0.9,1
"""


def test_score_reads_proteingyms_tables(job, model, tmp_path, caplog):
    """And correlates: beside scipy on the scores that it wrote. A row without a measurement is scored."""
    write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")])
    caplog.set_level("INFO")
    scored = job(GYM)
    measured = [n for n, row in enumerate(scored) if row["DMS_score"]]
    record = json.loads((tmp_path / "scored.csv.json").read_text())["correlations"]
    assert record["measured_column"] == "DMS_score"
    found = record["proteins"]["one"]
    assert found["variants"] == len(measured) == 4
    for name in ("masked_marginal", "wild_type_marginal"):
        pairs = [(float(scored[n][name]), float(scored[n]["DMS_score"])) for n in measured]
        assert found[name]["spearman"] == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
        assert found[name]["low"] <= found[name]["spearman"] <= found[name]["high"]
    assert set(found) == {"variants", "masked_marginal", "wild_type_marginal", "blosum62", "residue_frequency"}
    assert "Spearman correlation with DMS_score, 4 variants" in caplog.text

    without = "\n".join(line.split(",", 1)[1] for line in GYM.splitlines())
    again = job(without, "--measured_column", "DMS_score_bin", output=tmp_path / "sequences.csv")
    assert [row["masked_marginal"] for row in again] == [row["masked_marginal"] for row in scored]
    record = json.loads((tmp_path / "sequences.csv.json").read_text())["correlations"]
    assert record["measured_column"] == "DMS_score_bin"
    for table, flags, said in (
        (GYM.replace("0.9", "high"), [], "row 6: DMS_score 'high' is not a number"),
        (GYM, ["--measured_column", "activity"], "no column 'activity', only 'mutant', 'mutated_sequence'"),
        (without.replace("MKVLGG", "MKV*G"), [], r"row 3: .MKV\*G.: \* is not an amino acid: correct or remove"),
    ):
        with pytest.raises(UserError, match=said):
            job(table, *flags, output=tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("mutants", "flags", "message"),
    [
        ("protein,mutant\none,A5G\none,K3R\n", [], "row 3: K3R: residue 3 of the protein is V, not K"),
        ("protein,mutant\none,A15G\n", [], "row 2: A15G: the protein has residues 1 to 6"),
        ("protein,mutant\none,M-1G\n", [], "row 2: M-1G: the protein has residues 1 to 6"),
        ("protein,mutant\none,nonsense\n", [], "row 2: 'nonsense' is not a mutation: expected, for example, A24G"),
        (
            "protein,mutant\none,A5*\n",
            [],
            "row 2: 'A5*' is a stop or frameshift, which has no score: give --leave_out stops",
        ),
        ("protein,mutant\none,A٥G\n", [], "row 2: 'A٥G' is not a mutation: expected, for example, A24G"),
        (f"protein,mutant\none,A{'9' * 5000}G\n", [], "row 2: 'A999999999"),
        ("protein,mutant\none,A5Z\n", [], "row 2: A5Z: Z is not one of the 20 amino acids"),
        ("protein,mutant\none,A5G:A5V\n", [], "row 2: 'A5G:A5V': residue 5 is mutated twice"),
        ("protein,mutant\nthree,A5G\n", [], "row 2: the protein 'three' is not in"),
        ("mutant\nA5G\n", [], "has 2 proteins and"),
        ("protein,mutant\none,A5G\n", ["--protein_column", "id"], "no column 'id' to tell them apart"),
        ("protein,change\none,A5G\n", [], "no column 'mutant', only 'protein', 'change'"),
        ("protein,mutant,mutant\none,A5G,A5V\n", [], "the column 'mutant' is repeated"),
        ("protein,mutant,masked_marginal\none,A5G,0.1\n", [], "it has a column 'masked_marginal' already: rename it"),
        ("protein,mutant\none,M11G\n", ["--first_residue", "12"], "the protein has residues 12 to 17"),
        ("protein,mutant\n", [], "it has no rows"),
        ("", [], "it has no rows"),
        ("protein,mutant\none,A5G,1\n", [], "row 2 has another number of fields than the header"),
        ("protein,mutant\none,A5G\none\n", [], "row 3 has another number of fields than the header"),
        (f"protein,mutant\none,{'A' * 200_000}\n", [], "not a CSV file: field larger than field limit"),
        (f"protein,mutant\n{'a,' * 600_000}\n", [], "line 2 is longer than 1,048,576 characters"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_score_refuses_invalid_mutations(job, tmp_path, mutants, flags, message):
    with pytest.raises(UserError) as caught:
        job(mutants, *flags)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not list(tmp_path.glob("scored*"))


def test_score_refuses_an_unknown_protein(job, tmp_path):
    """Where the FASTA has one protein, too: of a row of another protein it would be the wrong wild type."""
    write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")])
    for name in ("two", ""):
        with pytest.raises(UserError, match=f"row 3: the protein '{name}' is not in"):
            job(f"protein,mutant\none,A5G\n{name},A5G\n")
    with pytest.raises(UserError, match="no column 'Protein'"):
        job("protein,mutant\none,A5G\n", "--protein_column", "Protein")
    assert len(job("mutant\nA5G\nWT\n")) == 2


@pytest.mark.parametrize(
    ("proteins", "message"),
    [
        ([("one", "MKVLAG"), ("two", "MKV"), ("one", "MKVLAGT")], "two records have the id 'one'"),
        ([("one", "1234567890")], "record one has 10 characters of 10 that are not residues"),
    ],
)
def test_score_refuses_ambiguous_proteins(job, tmp_path, proteins, message):
    write_fasta(tmp_path / "my.fasta", proteins)
    with pytest.raises(UserError, match=message):
        job("protein,mutant\none,A5G\n")


def test_parse_variant_refuses_an_unknown_wild_type():
    """The probability of `<unk>` or X means nothing."""
    for word in ("X3A", "J4A"):
        with pytest.raises(UserError, match="is not an amino acid"):
            parse_variant(word, b"MKXJ", "here")
    with pytest.raises(UserError, match="residue 4 of the protein is 1, not J"):
        parse_variant("J4A", b"MKX1", "here")
    ids = {residue: TOKENS.index(residue) for residue in "MUAC"}
    found = parse_variant("u1C:m-1a", b"mkU", "here", first_residue=-1).mutations
    assert found == ((ids["M"], 0, ids["A"]), (ids["U"], 2, ids["C"]))


@pytest.mark.parametrize("name", ["my.fasta", "mutants.csv", "model/config.json"])
def test_score_refuses_input_that_changes_while_it_is_read(job, model, tmp_path, monkeypatch, name):
    shutil.copytree(model, tmp_path / "model")

    class SlowEncoder(Encoder):
        def __init__(self, flags):
            super().__init__(flags)
            with open(tmp_path / name, "a") as file:
                file.write("\n")

    monkeypatch.setattr(script, "Encoder", SlowEncoder)
    with pytest.raises(UserError, match="changed while they were read"):
        job("protein,mutant\none,A5G\n", model=tmp_path / "model")
    assert not list(tmp_path.glob("scored*"))


def test_score_refuses_weights_that_are_not_finite(job, model, tmp_path):
    reference = reference_model(esm2_config(2, 32, 4), seed=5)
    with torch.no_grad():
        reference.lm_head.dense.bias[3] = torch.nan
    reference.save_pretrained(tmp_path / "nan")
    with pytest.raises(UserError, match="holds NaN or infinity"):
        job("protein,mutant\none,A5G\n", model=tmp_path / "nan")
    assert not list(tmp_path.glob("scored*"))


@pytest.mark.parametrize("name", ["my.fasta", "mutants.csv", "link.csv", "hard.csv"])
def test_score_refuses_an_output_that_is_an_input(job, tmp_path, name):
    mutants = "protein,mutant\none,A5G\n"
    (tmp_path / "mutants.csv").write_text(mutants)
    (tmp_path / "link.csv").symlink_to("mutants.csv")
    os.link(tmp_path / "my.fasta", tmp_path / "hard.csv")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(UserError, match="it would replace --(fasta|mutations)"):
        job(mutants, "--overwrite", output=tmp_path / name)
    assert (tmp_path / name).read_bytes() == before


def test_score_refuses_an_output_that_is_a_file_of_the_model(job, model, tmp_path):
    moved = Path(shutil.copytree(model, tmp_path / "model"))
    before = (moved / "config.json").read_bytes()
    with pytest.raises(UserError, match="it would replace a file of the model"):
        job("protein,mutant\none,A5G\n", "--overwrite", model=moved, output=moved / "config.json")
    assert (moved / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", ["out.csv.json", "out.csv.partial", "out.csv.json.partial"])
def test_score_refuses_an_input_named_as_its_partial_file(model, tmp_path, name):
    write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")])
    (tmp_path / name).write_text("mutant\nA5G\n")
    flags = ("--model_name_or_path", model, "--fasta", tmp_path / "my.fasta", "--mutations", tmp_path / name)
    with pytest.raises(UserError, match="it would replace --mutations"):
        call(script, *flags, "--output", tmp_path / "out.csv")
    assert (tmp_path / name).read_text() == "mutant\nA5G\n"


def test_score_replaces_an_output_only_with_overwrite(job, model, tmp_path, caplog):
    mutants, output = "protein,mutant\none,A5G\n", tmp_path / "scored.csv"
    output.write_text("of an earlier version")
    with pytest.raises(UserError, match="exists without a record of what it was made from: give --overwrite"):
        job(mutants)
    assert output.read_text() == "of an earlier version"
    first = job(mutants, "--overwrite")
    written = output.stat().st_mtime_ns
    caplog.set_level("INFO")
    job(mutants)
    assert "nothing to do" in caplog.text
    assert output.stat().st_mtime_ns == written
    for other, flags in (("protein,mutant\none,A5V\n", []), (mutants, ["--max_seq_length", 10])):
        with pytest.raises(UserError, match="was made from other input or arguments"):
            job(other, *flags)
    with open(output, "a") as file:
        file.write("one,A5V,0,0\n")
    with pytest.raises(UserError, match="has changed since it was written"):
        job(mutants)
    assert job(mutants, "--overwrite") == first


def test_score_identifies_a_model_by_content(job, model, tmp_path):
    """Not by its path: other weights in the same place make other scores."""
    moved = Path(shutil.copytree(model, tmp_path / "model"))
    mutants = "protein,mutant\none,A5G\n"
    first = job(mutants, model=moved)
    assert job(mutants, model=model) == first
    reference_model(esm2_config(2, 32, 4, initializer_range=0.2), seed=6).save_pretrained(moved)
    with pytest.raises(UserError, match="was made from other input or arguments"):
        job(mutants, model=moved)
    assert job(mutants, "--overwrite", model=moved) != first


def test_score_on_a_full_disk_keeps_the_old_output(job, tmp_path):
    mutants = "protein,mutant\n" + "one,A5G\n" * 5000
    with small_disk(tmp_path, "1m") as disk:
        fill(disk)
        with pytest.raises(UserError, match="No space left on device: make room"):
            job(mutants, output=disk / "scored.csv")
        assert [path.name for path in disk.iterdir()] == ["mine"]
        (disk / "mine").unlink()
        job("protein,mutant\none,A5G\n", output=disk / "scored.csv")
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        fill(disk)
        with pytest.raises(UserError, match="No space left on device: make room"):
            job(mutants, "--overwrite", output=disk / "scored.csv")
        assert {path.name: path.read_bytes() for path in disk.iterdir() if path.name != "mine"} == before


def test_score_reports_errors_in_one_line(model, tmp_path):
    """As a user starts it."""
    fasta = write_fasta(tmp_path / "my.fasta", [("one", "MKVLAG")])
    (tmp_path / "m.csv").write_text(f"mutant\nA{'5' * 5000}G\n")
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--mutations", tmp_path / "m.csv")
    assert "is not a mutation: expected, for example, A24G" in expect_error(
        "score.py", *flags, "--output", tmp_path / "o.csv"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.csv", "my.fasta"]
