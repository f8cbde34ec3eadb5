"""What is said of generated proteins: counts by hand, identities by MMseqs2 where it is installed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from extras.after.generation.known import composition
from extras.after.generation.novelty import nearest_identities
from extras.prepare.cluster_splits import PROGRAM
from tests.extras.prepare.test_mmseqs import like_nucleotides

LETTERS = list("ACDEFGHIKLMNPQRSTVWY")


def test_composition_counts_standard_residues():
    shares = composition(["AAC", "XAC", ""])
    assert shares[0] == pytest.approx(3 / 5)
    assert shares[1] == pytest.approx(2 / 5)
    assert shares.sum() == pytest.approx(1)


def test_nearest_identities_without_mmseqs_are_not_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nearest_identities(["MKV"], ["MKV"], tmp_path) is None


@pytest.mark.parametrize("first", [[], like_nucleotides()], ids=["", "of A, C, G and T"])
@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="needs MMseqs2")
def test_nearest_identities_are_those_of_planted_mutants(tmp_path, first):
    generator = np.random.default_rng(0)
    training = ["".join(generator.choice(LETTERS, 100)) for _ in range(20)]
    changed = list(training[3])
    for place in range(5, 95, 9):  # ten substitutions
        changed[place] = "W" if changed[place] != "W" else "A"
    unrelated = "".join(generator.choice(LETTERS, 100))
    proteins = [*first, training[7], "".join(changed), unrelated]
    found = nearest_identities(proteins, [*first, *training], tmp_path)
    np.testing.assert_allclose(found[len(first) :], [1.0, 0.9, 0.0], atol=0.011)


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="needs MMseqs2")
def test_a_copied_repeat_is_found(tmp_path):
    """MMseqs2 masks repeats: it does not find a protein of them in a database that holds it."""
    collagen = "GPP" * 60
    training = ["".join(np.random.default_rng(0).choice(LETTERS, 100)), collagen]
    assert list(nearest_identities([collagen, "M" + "Q" * 60], training, tmp_path)) == [1, 0]
