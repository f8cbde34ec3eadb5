"""What homologs can give: the least loss of planted families, and the alignment that models are compared with."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.aligned_relatives import GAP_EXTEND, GAP_OPEN, UNALIGNED, LetterTable, aligned_letters, scores
from benchmarks.planted_families import least_loss, make_family
from benchmarks.potts_homologs import SCORED, area_of_pairs, effects, observed_couplings
from extras.prepare.synthetic_structures import PottsFamily, letters, row_states


@pytest.mark.parametrize("divergence", [0.2, 0.4])
def test_least_loss_equals_enumeration(divergence):
    """Of no relative and of one, over all letters."""
    kept, other = 1 - divergence + divergence / 20, divergence / 20
    pair = np.full((20, 20), kept * other * 2 + 18 * other**2) / 20  # p(residue, relative), the ancestor summed over
    np.fill_diagonal(pair, (kept**2 + 19 * other**2) / 20)
    assert pair.sum() == pytest.approx(1)
    entropy = -(pair * np.log(pair * 20)).sum()
    assert least_loss(divergence, 0) == pytest.approx(np.log(20), abs=1e-9)
    assert least_loss(divergence, 1) == pytest.approx(entropy, abs=0.02)  # five standard errors


def test_indels_change_lengths_at_their_rate():
    generator = np.random.default_rng(0)
    family = make_family(20_000, 4, 0.0, 0.1, generator)
    assert all(abs(len(member) - 20_000) < 5 * np.sqrt(2_000) for member in family)
    assert len({len(member) for member in family}) > 1


def best_score(query: np.ndarray, relative: np.ndarray, hidden: np.ndarray) -> float:
    """Of a global alignment without gaps at the ends, by recursion over the last column."""
    table = scores()[np.where(hidden, 21, query)][:, relative]

    @cache
    def best(i: int, j: int, state: str) -> float:
        """Of the first i and j letters, the last column being of this state: m, or a gap in one of the two."""
        if i == 0 or j == 0:
            return 0.0 if state == "m" else -1e9
        if state == "m":
            return table[i - 1, j - 1] + max(best(i - 1, j - 1, each) for each in "mqr")
        before = (i - 1, j) if state == "r" else (i, j - 1)
        return max(best(*before, each) - (GAP_EXTEND if each == state else GAP_OPEN) for each in "mqr")

    ends = [(i, len(relative)) for i in range(len(query) + 1)] + [(len(query), j) for j in range(len(relative) + 1)]
    return max(best(i, j, state) for i, j in ends for state in "mqr")


def score_of(query: np.ndarray, relative: np.ndarray, hidden: np.ndarray, letters: np.ndarray) -> float:
    """Of the alignment in which these letters of the relative stand beside the query's, the fewest gaps else."""
    table = scores()
    best = {-1: (0.0, -1)}  # {last letter of the relative: (score, last letter of the query)}
    for n in np.flatnonzero(letters != UNALIGNED):
        following = {}
        for j in range(len(relative)):
            if relative[j] != letters[n]:
                continue
            for before, (score, last) in best.items():
                if before >= j:
                    continue
                gaps = [0, 0] if last < 0 else [n - last - 1, j - before - 1]
                cost = sum((GAP_OPEN + GAP_EXTEND * (gap - 1)) * (gap > 0) for gap in gaps)
                own = table[21 if hidden[n] else query[n], relative[j]]
                if j not in following or following[j][0] < score - cost + own:
                    following[j] = (score - cost + own, n)
        best = following
    return max(score for score, _ in best.values())


@pytest.mark.parametrize("seed", range(6))
def test_alignment_has_the_best_score(seed):
    generator = np.random.default_rng(seed)
    query = generator.integers(20, size=14)
    relative = np.delete(query, slice(4, 6))
    relative = np.insert(relative, 9, generator.integers(20, size=3))
    relative[generator.random(len(relative)) < 0.2] = 3
    hidden = generator.random(len(query)) < 0.15
    letters = aligned_letters(query, relative, hidden)
    assert score_of(query, relative, hidden, letters) == pytest.approx(best_score(query, relative, hidden))


def test_hidden_residues_do_not_move_an_alignment():
    generator = np.random.default_rng(7)
    query, relative = generator.integers(20, size=(2, 60))
    hidden = generator.random(60) < 0.3
    changed = np.where(hidden, generator.integers(20, size=60), query)
    assert np.array_equal(aligned_letters(query, relative, hidden), aligned_letters(changed, relative, hidden))


def test_letter_table_is_the_mean_of_counted_rows():
    query, letters = np.array([0, 0, 1, 2]), np.array([0, 0, 1, UNALIGNED])
    table = LetterTable([(query, letters)])
    rows = np.ones((22, 20))
    rows[0, 0], rows[1, 1], rows[UNALIGNED, 2] = 3, 2, 2
    rows /= rows.sum(1, keepdims=True)
    expected = -np.log((rows[0, 0] + rows[1, 0]) / 2)
    assert table.losses(np.array([0]), np.array([[0], [1]])) == pytest.approx([expected])


def test_potts_effects_are_ratios_of_probabilities():
    generator = np.random.default_rng(0)
    family = PottsFamily.make(generator)
    (protein,) = family.members(1, generator)
    found = effects(family, protein)
    states, probabilities = row_states()
    second = (family.sites[:, 1] == protein).astype(int)
    for row in family.rows:
        own = probabilities[(states == second[row]).all(1)][0]
        for place, site in enumerate(row):
            changed = second[row].copy()
            changed[place] = 1 - changed[place]
            other = probabilities[(states == changed).all(1)][0]
            letter = letters(family.sites[site, [changed[place]]])
            assert found[site, SCORED.index(letter)] == pytest.approx(np.log(other / own))
            assert np.isneginf(found[site]).sum() == 18


def test_coupled_pairs_are_found_in_many_members_and_not_in_one():
    generator = np.random.default_rng(0)
    family = PottsFamily.make(generator, strand=2)
    members = family.members(2000, generator)
    found = observed_couplings(family, members)
    second = (members == family.sites[:, 1]).astype(float)
    assert found == pytest.approx(abs(np.corrcoef(second.T)))
    assert area_of_pairs(family, found) > 0.95
    assert area_of_pairs(family, observed_couplings(family, members[:1])) == 0.5
