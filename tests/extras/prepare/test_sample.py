"""extras/prepare/sample.py: reproducible, realistic in length and composition, of families that can be learned."""

import gzip
from collections import Counter

import numpy as np
import pytest

from common.cli import UserError
from extras.prepare import sample
from extras.prepare.sources.fasta import read_fasta
from tests.data_fixtures import call
from tests.forked import run_script


@pytest.fixture(scope="module")
def proteins():
    return list(sample.make_proteins(1000, families=40, motifs=12, divergence=(0.1, 0.4), seed=42))


def test_sample_same_arguments_give_the_same_bytes(tmp_path):
    for name in ("a.fasta", "b.fasta", "c.fasta.gz", "d.fasta.gz"):
        sample.write_sample(tmp_path / name, num_proteins=50, families=4, seed=7)
    sample.write_sample(tmp_path / "other.fasta", num_proteins=50, families=4, seed=8)
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert content["a.fasta"] == content["b.fasta"] == gzip.decompress(content["c.fasta.gz"])
    assert content["c.fasta.gz"] == content["d.fasta.gz"]
    assert content["other.fasta"] != content["a.fasta"]
    assert len(content) == 5  # and nothing temporary


def test_sample_headers_number_and_order(proteins):
    assert len(proteins) == 1000
    ids = [header.split()[0] for header, _ in proteins]
    assert ids == [f"SAMPLE_F{f:04d}_M{m:03d}" for f in range(40) for m in range(25)]
    medians = [np.median([len(s) for _, s in proteins[f * 25 : f * 25 + 25]]) for f in range(40)]
    assert np.corrcoef(medians, range(40))[0, 1] < -0.8  # sorted by length, as UniRef is: only a global shuffle helps


def test_sample_lengths_and_composition():
    proteins = list(sample.make_proteins(600, families=600, motifs=200, divergence=(0.1, 0.4), seed=1))
    lengths = np.array([len(sequence) for _, sequence in proteins])
    assert lengths.min() >= sample.LENGTH_MIN
    assert lengths.max() <= sample.LENGTH_MAX
    assert 235 < np.median(lengths) < 305
    counts = Counter("".join(sequence for _, sequence in proteins))
    observed = np.array([counts[r] for r in sample.RESIDUES]) / lengths.sum()
    assert np.abs(observed - sample.BACKGROUND).max() < 0.012


def test_sample_substitutions_follow_blosum62():
    probabilities = sample.substitution_probabilities()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert np.diag(probabilities).max() == 0
    likeliest = dict(zip(sample.RESIDUES, (sample.RESIDUES[i] for i in probabilities.argmax(axis=1)), strict=True))
    assert [likeliest[r] for r in "IDKFW"] == ["V", "E", "R", "L", "Y"]


@pytest.mark.parametrize("divergence", [0.1, 0.4])
def test_sample_divergence_is_the_share_of_substituted_residues(monkeypatch, divergence):
    monkeypatch.setattr(sample, "INDELS_PER_SUBSTITUTION", 0.0)
    generator = np.random.default_rng(0)
    cdf = sample.substitution_probabilities().cumsum(axis=1)
    ancestor = generator.choice(20, size=20_000, p=sample.BACKGROUND)[: sample.LENGTH_MAX]
    changed = np.mean([np.mean(sample.evolve(ancestor, divergence, cdf, generator) != ancestor) for _ in range(20)])
    assert changed == pytest.approx(divergence, abs=0.01)


def test_sample_members_resemble_their_family(proteins):
    words = [{s[i : i + 8] for i in range(len(s) - 7)} for _, s in proteins]
    own = np.mean([len(words[25 * f] & words[25 * f + 1]) / len(words[25 * f]) for f in range(40)])
    other = np.mean([len(words[25 * f] & words[(25 * f + 475) % 1000]) / len(words[25 * f]) for f in range(40)])
    assert own > 3 * other


def test_sample_protein_composition_is_informative(proteins):
    """What a short run learns first: nats a residue that a protein's own frequencies save, from its other half."""
    letters = {residue: number for number, residue in enumerate(sample.RESIDUES)}
    counts = np.zeros((len(proteins), 2, 20))
    for protein, (_, sequence) in zip(counts, proteins, strict=True):
        for position, residue in enumerate(sequence):
            protein[position % 2, letters[residue]] += 1
    of_all = counts.sum((0, 1)) / counts.sum()
    seen, asked = counts[:, 0], counts[:, 1]
    own = (seen + 10 * of_all) / (seen.sum(1, keepdims=True) + 10)
    saved = (asked * np.log(own / of_all)).sum() / asked.sum()
    assert saved > 0.1


def test_sample_command_line(tmp_path):
    out = tmp_path / "s.fasta.gz"
    flags = ("--num_proteins", "30", "--families", "3", "--seed", "5")
    assert run_script("extras.prepare.sample", out, *flags).returncode == 0
    sample.write_sample(tmp_path / "t.fasta.gz", num_proteins=30, families=3, seed=5)
    assert out.read_bytes() == (tmp_path / "t.fasta.gz").read_bytes()
    assert len(list(read_fasta(out))) == 30
    done = run_script("extras.prepare.sample", "--seed", "5")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_sample_bad_arguments_leave_nothing(tmp_path):
    with pytest.raises(UserError, match="divergence"):
        sample.write_sample(tmp_path / "a.fasta", min_divergence=0.5, max_divergence=0.2)
    with pytest.raises(UserError, match="at least 1"):
        sample.write_sample(tmp_path / "a.fasta", num_proteins=0)
    with pytest.raises(UserError, match="--structures: needs --repeats or --potts_families"):
        call(sample, tmp_path / "a.fasta", "--structures", tmp_path / "pdb")
    assert not list(tmp_path.iterdir())
