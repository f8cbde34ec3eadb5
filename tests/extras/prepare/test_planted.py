"""Generated proteins with contacts: statistics beside the model's exact ones, structures beside the couplings."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from extras.after.downstream.contacts import pairs
from extras.after.downstream.structures import chains_of
from extras.prepare.synthetic_structures import COUPLED, STRANDS, PottsFamily, make_potts, potts_structures, row_states

COUNT = 4000


@pytest.fixture(scope="module")
def family() -> PottsFamily:
    return PottsFamily.make(np.random.default_rng(1))


@pytest.fixture(scope="module")
def spins(family) -> np.ndarray:
    """-1 or 1 [COUNT, L]: which of its two residues each site has."""
    members = family.members(COUNT, np.random.default_rng(2))
    second = members == family.sites[:, 1]
    assert (second | (members == family.sites[:, 0])).all()
    return 2 * second.astype(int) - 1


def test_potts_pairs_correlate_as_the_model_says(family, spins):
    # Transfer matrices along the ladder, whose rungs have four states: another way than the sum over 256 states.
    rung = list(product((-1, 1), repeat=2))
    inside = [np.diag([math.exp(coupling * a * b) for a, b in rung]) for coupling in (2, -2.8, 2.8, -2)]
    rails = [
        np.array([[math.exp(coupling * (a * c + b * d)) for c, d in rung] for a, b in rung])
        for coupling in (2, 1.6, 2)
    ]

    def mean(*places: int) -> float:
        total = np.ones(4)
        for column in range(4):
            here = np.array(
                [math.prod(((a, b)[place // 4]) for place in places if place % 4 == column) for a, b in rung]
            )
            total = (total if column == 0 else total @ rails[column - 1]) @ (inside[column] * here)
        return total.sum()

    correlation = spins.T @ spins / COUNT
    five_errors = 5 / math.sqrt(COUNT)
    in_a_row = np.zeros_like(correlation, dtype=bool)
    for row in family.rows:
        in_a_row[np.ix_(row, row)] = True
        for a, b in combinations(range(STRANDS), 2):
            assert correlation[row[a], row[b]] == pytest.approx(mean(a, b) / mean(), abs=five_errors)
    assert np.abs(correlation[~in_a_row]).max() < five_errors
    assert np.abs(spins.mean(0)).max() < five_errors  # a site alone says nothing


def test_potts_structure_has_the_contacts_of_the_family(tmp_path):
    seed = 3
    generator = np.random.default_rng((seed, 3))
    families = [PottsFamily.make(generator) for _ in range(2)]
    structures = list(potts_structures(2, seed))
    assert [name for name, _ in structures[4:6]] == ["potts000_4", "potts001_0"]
    known = {sequence for _, sequence in make_potts(2, seed)}
    for name, text in structures[3:7]:
        path = tmp_path / f"{name}.pdb"
        path.write_text(text)
        (chain,) = chains_of(path)
        family = families[int(name[5:8])]
        i, j, contact = pairs(chain)
        touching = set(zip(i[contact].tolist(), j[contact].tolist(), strict=True))
        assert chain.sequence not in known
        # Beside each other in a row, or in the next row on the same sheet.
        expected = {(row[a], row[b]) for row in family.rows.tolist() for a, b in COUPLED}
        for one, other in pairwise(family.rows.tolist()):
            expected |= {
                (one[a], other[b]) for pair in COUPLED if pair[1] - pair[0] == 1 for a, b in (pair, pair[::-1])
            }
        assert touching == {tuple(sorted(pair)) for pair in expected}
        assert (j - i)[contact].min() > 20


def test_potts_neighbours_each_say_what_the_others_do_not():
    states, probabilities = row_states()

    def entropy(places: list[int]) -> float:
        p = np.bincount(states[:, places] @ 2 ** np.arange(len(places)), weights=probabilities)
        return float(-(p[p > 0] * np.log(p[p > 0])).sum())

    for pair in COUPLED:
        others = [place for place in range(STRANDS) if place not in pair]
        in_common = sum(entropy([place, *others]) for place in pair) - entropy([*pair, *others]) - entropy(others)
        assert in_common > 0.075, pair
