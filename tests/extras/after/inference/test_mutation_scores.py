"""Mutations as text, beside measured effects, and all single ones of a protein."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import spearmanr

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from extras.after.inference.correlation import BASELINES, BLOSUM62, LEAST, baseline, correlation, spearman
from extras.after.inference.mutation_scores import compare, parse_variant, undo

PROTEIN = b"MKVLAG"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p.Ala5Gly", "A5G"),
        ("p.A5G", "A5G"),
        ("p.(Ala5Gly)", "A5G"),
        ("p.[Ala5Gly;Lys2Arg]", "A5G:K2R"),
        ("p.[(Ala5Gly;Lys2Arg)]", "A5G:K2R"),
        ("p.([Ala5Gly;Lys2Arg])", "A5G:K2R"),
        ("Ala5Gly", "A5G"),
        (" A5G:K2R ", "A5G:K2R"),
        ("p.=", ""),
        ("p.(=)", ""),
        ("WT", ""),
        ("p.Ala5=", "A5A"),
    ],
)
def test_parse_variant_reads_hgvs(text, expected):
    found = parse_variant(text, PROTEIN, "here").mutations
    words = sorted(filter(None, expected.split(":")), key=lambda word: int(word[1:-1]))
    assert [f"{TOKENS[wild]}{position + 1}{TOKENS[mutant]}" for wild, position, mutant in found] == words


@pytest.mark.parametrize(
    "text",
    [
        *("p.Trp5Ter", "p.Ala5*", "p.Ala5fs", "p.Ala5GlyfsTer9", "p.Lys2del", "p.Lys2_Val3insGln", "p.Lys2dup"),
        *("p.Ala5?", "p.[Ala5Gly];[Lys2Arg]", "p.Xyz5Gly", "p.", "c.76A>T", "p.0"),
    ],
)
def test_parse_variant_refuses_all_but_substitutions(text):
    with pytest.raises(
        UserError, match=r"^row 7: .* is not a mutation: expected, .* p\.Ala24Gly \(stops and frameshifts"
    ):
        parse_variant(text, PROTEIN, "row 7")


def test_compare_finds_the_substitutions():
    assert compare("MRVLaG", PROTEIN, "") == parse_variant("K2R", PROTEIN, "")
    assert compare("MRVLGG", PROTEIN, "") == parse_variant("K2R:A5G", PROTEIN, "")
    assert compare("MKVLAG", PROTEIN, "").mutations == ()
    for text, said in (
        ("MKVLA", "has 5 residues, the protein 6"),
        ("MKVL*G", "not one of the 20"),
        ("MKVLéG", "not a"),
    ):
        with pytest.raises(UserError, match=f"^row 3: .*{said}"):
            compare(text, PROTEIN, "row 3")


def test_undo_gives_the_wild_type():
    assert undo("K2R:A5G", "MRVLGG", "") == undo("p.=", "mkvlag", "") == PROTEIN
    with pytest.raises(UserError, match="^row 3: 'K2R': the mutated sequence has no R at 2"):
        undo("K2R", "MKVLAG", "row 3")


def test_baselines_are_the_published_tables():
    """The two fix lambda, BLAST's constant of ungapped BLOSUM62, 0.3176: a wrong entry of either changes it."""
    assert (BLOSUM62 == BLOSUM62.T).all()
    # Residues of 1,000 in the order of the matrix (Robinson and Robinson, PNAS 1991), as in NCBI's BLAST.
    share = [78.05, 51.29, 44.87, 53.64, 19.25, 42.64, 62.95, 73.77, 21.99, 51.42]
    share += [90.19, 57.44, 22.43, 38.56, 52.03, 71.20, 58.41, 13.30, 32.16, 64.41]
    share = np.array(share) / 1000
    assert share.sum() == pytest.approx(1)
    assert brentq(lambda x: share @ np.exp(x * BLOSUM62) @ share - 1, 0.1, 1) == pytest.approx(0.3176, abs=5e-5)
    variant = parse_variant("K2R:A5W", PROTEIN, "")
    assert baseline(variant, BASELINES["blosum62"]) == 2 - 3
    expected = math.log(5.53 / 5.80) + math.log(1.10 / 8.25)  # Swiss-Prot
    assert baseline(variant, BASELINES["residue_frequency"]) == pytest.approx(expected)
    assert baseline(parse_variant("A5A", PROTEIN, ""), BASELINES["blosum62"]) == 0


def test_correlation_equals_scipy():
    """The interval too, beside a bootstrap that ranks every resample anew."""
    random = np.random.default_rng(4)
    x = random.integers(0, 20, 150).astype(float)  # with ties
    y = np.round(x + random.normal(size=150) * 15)
    found = correlation(x, y)
    assert found.spearman == spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    random, resampled = np.random.default_rng(0), []
    for _ in range(1000):
        drawn = random.integers(0, 150, 150)
        resampled.append(spearmanr(x[drawn], y[drawn]).statistic)
    assert found[1:] == pytest.approx(np.percentile(resampled, (2.5, 97.5)), abs=1e-12)
    assert correlation(x, np.ones(150)) is None
    assert correlation(x[: LEAST - 1], y[: LEAST - 1]) is None
