"""Pseudo-log-likelihoods of score.py against a plain loop over transformers' model; tables with insertions."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from scipy.stats import spearmanr

import score as script
from common.cli import UserError
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.likelihoods import pseudo_log_likelihoods
from extras.after.inference.mutation_tables import Columns, variants_of
from tests.data_fixtures import call, write_fasta
from tests.extras.after.inference.embed_fixtures import make_model, stock, stock_log_p

WILD = "MKVLAGTWYE"
# As ProteinGym's tables of insertions and deletions.
GYM = f"""mutated_sequence,DMS_score,DMS_score_bin
MKVLAGTWE,0.5,1
MKVLLLAGTWYE,-1.5,0
{WILD},1.1,1
MKVLAGTWYW,0.1,0
MAGTWYE,,0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model, tmp_path):
    """Runs score.py in this process; `table` is the CSV's text."""
    write_fasta(tmp_path / "my.fasta", [("one", WILD)])

    def run(table: str, *flags, output: str = "scored.csv", given: str = "--mutations") -> list[dict]:
        (tmp_path / "indels.csv").write_text(table)
        files = ("--fasta", tmp_path / "my.fasta", given, tmp_path / "indels.csv", "--output", tmp_path / output)
        call(script, "--model_name_or_path", model, *files, "--use_cpu", *flags)
        with open(tmp_path / output, newline="") as file:
            return list(csv.DictReader(file))

    return run


def stock_pseudo(model, text: str, masked: bool) -> np.ndarray:
    """log p of each residue by transformers, one masked at a time, or none."""
    ids = stock(model)[0].get_vocab()
    rows = [stock_log_p(model, text, at if masked else None)[at] for at in range(len(text))]
    return np.array([float(row[ids[letter]]) for row, letter in zip(rows, text, strict=True)])


def test_indels_equal_a_loop_over_transformers(model, job, tmp_path, caplog):
    caplog.set_level("INFO")
    scored = job(GYM)
    assert len(scored) == 5
    for row in scored:
        for name, masked in (("pseudo_log_likelihood", True), ("one_pass_log_likelihood", False)):
            mutant = stock_pseudo(model, row["mutated_sequence"], masked)
            wild = stock_pseudo(model, WILD, masked)
            assert float(row[name]) == pytest.approx(mutant.sum() - wild.sum(), abs=2e-5)
            assert float(row[f"{name}_mean"]) == pytest.approx(mutant.mean() - wild.mean(), abs=1e-5)
    assert "5 sequences, a pass for each residue: 48 passes of 570 tokens" in caplog.text
    assert "at the speed of the first sequence" in caplog.text
    found = json.loads((tmp_path / "scored.csv.json").read_text())["correlations"]["proteins"]["one"]
    measured = [row for row in scored if row["DMS_score"]]
    for name in ("pseudo_log_likelihood", "one_pass_log_likelihood_mean"):
        pairs = [(float(row[name]), float(row["DMS_score"])) for row in measured]
        assert found[name]["spearman"] == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
    assert "length_change" in found
    assert "blosum62" not in found


def test_a_tables_columns_name_the_same_variants(job):
    """Sequences, in either column or as `mutant` too, and HGVS's words; the cheap score alone."""
    rows = list(csv.DictReader(GYM.splitlines()))
    words = ["Y9del", "V3_L4insLL", "WT", "E10W", "K2_L4del"]
    names = ("pseudo_log_likelihood", "pseudo_log_likelihood_mean")
    expected = [[row[name] for name in names] for row in job(GYM)]
    sequences = [row["mutated_sequence"] for row in rows]
    beside = [f"{word},{sequence}" for word, sequence in zip(words, sequences, strict=True)]
    tables = {
        "sequence": ["sequence", *sequences],
        "hgvs": ["mutant", *words],
        "both": ["mutant,mutated_sequence", *(f"{sequence},{sequence}" for sequence in sequences)],
        "beside": ["mutant,mutated_sequence", *beside],
    }
    for name, lines in tables.items():
        scored = job("\n".join(lines) + "\n", output=f"{name}.csv", given="--sequences")
        assert [[row[name] for name in names] for row in scored] == expected
    cheap = job(GYM, "--one_pass", "--column_prefix", "m_", output="cheap.csv")
    assert list(cheap[0])[3:] == ["m_one_pass_log_likelihood", "m_one_pass_log_likelihood_mean"]


def test_substitutions_keep_the_marginals(job):
    scored = job("mutated_sequence\nMKVLAGTWYW\n")
    assert list(scored[0]) == ["mutated_sequence", "masked_marginal", "wild_type_marginal"]


def test_long_proteins_are_read_in_windows_and_the_unknown_is_not_counted(model):
    """20 residues in windows of 10: each residue is read in that whose centre is nearest. X is read, not scored."""
    encoder = Encoder(EncoderFlags(str(model), max_seq_length=12, tokens_per_pack=40, use_cpu=True))
    wild, short = "MKVXAGTWYEMKVLAGTWYE", "MKVXAGTWYE"
    columns = Columns("mutated_sequence", True, None)
    variants = variants_of(columns, [{"mutated_sequence": short}], {"one": wild.encode()}, "a.csv", "a.fasta")
    found = pseudo_log_likelihoods(encoder, variants, True)
    parts = [stock_pseudo(model, wild[start : start + 10], True) for start in (0, 5, 10)]
    of_wild = np.delete(np.concatenate([parts[0][:7], parts[1][2:7], parts[2][2:]]), 3)
    of_short = np.delete(stock_pseudo(model, short, True), 3)
    assert len(of_wild) == 19
    assert found[""] == pytest.approx([of_short.sum() - of_wild.sum()], abs=2e-5)
    assert found["_mean"] == pytest.approx([of_short.mean() - of_wild.mean()], abs=1e-5)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("mutated_sequence\nMKVLAG*\n", "row 2: 'MKVLAG.': . is not an amino acid"),
        ('mutated_sequence\nMKV\n""\n', "row 3: no residues"),
        ("mutant\nK2del\nA5fs\n", "row 3: 'A5fs' is a stop or frameshift, which has no score: give --leave_out stops"),
        ("mutant,mutated_sequence\nK2del,MKVLAGTWY\n", "row 2: 'K2del' does not make its mutated_sequence"),
        ("mutant,pseudo_log_likelihood\nK2del,1\n", "it has a column 'pseudo_log_likelihood' already"),
        ("mutant,one_pass_log_likelihood_mean\nK2del,1\n", "a column 'one_pass_log_likelihood_mean' already"),
        ("length\n3\n", "no column 'mutant', only 'length'"),
    ],
)
def test_a_table_that_is_wrong_is_refused(job, tmp_path, table, message):
    with pytest.raises(UserError, match=message):
        job(table)
    assert not list(tmp_path.glob("scored*"))


def test_flags_of_decoders_are_refused_with_an_encoder(job):
    for flag in (["--directions", "both"], ["--count_ends"]):
        with pytest.raises(UserError, match=f"{flag[0]}: is of protein decoders"):
            job(GYM, *flag)
