"""What a matrix of single mutants follows from: beside least squares on one-hot columns."""

from __future__ import annotations

import numpy as np
import pytest

from extras.after.inference.mutant_matrix import NEARLY_ALL, explained, shares
from extras.after.inference.mutation_scores import RESIDUES


def adjusted_r2(values: list[float], groups: list) -> float:
    """By numpy's least squares on one column a group."""
    names = sorted(set(groups))
    design = np.array([[group == name for name in names] for group in groups], float)
    y = np.array(values)
    fit = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    r2 = 1 - ((y - fit) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    return 1 - (1 - r2) * (len(y) - 1) / (len(y) - len(names))


def test_shares_equal_least_squares_on_one_hot_columns():
    """With wild types that are unknown (no scores) and U (all 20 are substitutions), and a lower-case letter."""
    text = b"MKVLAGMKVlAGMKVXAUMKVLAGKKVVAAGGMM"
    random = np.random.default_rng(0)
    matrix = random.normal(size=(len(text), 20)) + random.normal(size=20) + random.normal(size=(len(text), 1))
    matrix[text.index(b"X")] = np.nan
    values, pairs, places = [], [], []
    for n, wild in enumerate(text.decode().upper()):
        for column, mutant in enumerate(RESIDUES):
            if mutant == wild:
                matrix[n, column] = 1e6  # of no substitution: it must not count
            elif wild != "X":
                values.append(matrix[n, column])
                pairs.append(wild + mutant)
                places.append(n)
    found = shares(text, matrix)
    assert found.scores == len(values) == 19 * (len(text) - 2) + 20
    assert found.residues == pytest.approx(adjusted_r2(values, pairs), abs=1e-9)
    assert found.position == pytest.approx(adjusted_r2(values, places), abs=1e-9)
    assert 0.1 < found.position < found.residues < NEARLY_ALL
    assert not found.of_residues_alone


def test_shares_of_a_composition_model_and_of_noise():
    """Noise explains nothing, whatever the number of groups: a plain R^2 of 301 pairs is 0.55 here."""
    random = np.random.default_rng(1)
    text = "".join(random.choice(list(RESIDUES), 40))
    frequencies = random.normal(size=20)
    composition = frequencies[None] - frequencies[[RESIDUES.index(letter) for letter in text], None]
    found = shares(text.encode(), composition + random.normal(size=(40, 20)) * 0.01)
    assert found.of_residues_alone
    assert "over 99.9 % follows from the two residues alone" in str(found)
    noise = [shares(text.encode(), random.normal(size=(40, 20))) for _ in range(20)]
    # Mean of the positive parts: the standard deviation of a share is about 0.09 here.
    assert np.mean([each.residues for each in noise]) < 0.1
    assert not any(each.of_residues_alone for each in noise)


def test_shares_are_undefined_where_each_pair_is_there_once_or_all_scores_are_alike():
    assert shares(b"MKTAY", np.random.default_rng(2).normal(size=(5, 20))).residues is None
    assert "too few to say what follows from the two residues" in str(shares(b"XX", np.full((2, 20), np.nan)))
    assert explained(np.ones(6), np.array([0, 0, 0, 1, 1, 1])) is None
    assert explained(np.array([1.0, -1.0, 1.0, -1.0]), np.array([0, 0, 1, 1])) == 0.0
