"""Generated proteins with contacts: statistics beside the model's exact ones, structures beside the couplings."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from common.cli import UserError
from extras.downstream.contacts import pairs
from extras.downstream.structures import chains_of
from extras.prepare.planted import BUNDLE, COUPLING, STRAND, PottsFamily, make_potts, potts_structures
from extras.prepare.sample import WithStructures

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


def test_potts_pairs_of_a_row_correlate_as_the_model_says_and_others_do_not(family, spins):
    # Sums over the 16 states of a row, written out: an Ising model of four spins, all coupled.
    weights = {n: math.comb(4, n) * math.exp(COUPLING * ((2 * n - 4) ** 2 - 4) / 2) for n in range(5)}
    expected = sum(w * ((2 * n - 4) ** 2 - 4) / 12 for n, w in weights.items()) / sum(weights.values())
    correlation = spins.T @ spins / COUNT
    beside = np.zeros_like(correlation, dtype=bool)
    for row in family.rows:
        beside[np.ix_(row, row)] = True
    np.fill_diagonal(beside, False)
    upper = np.triu(np.ones_like(beside), 1)
    five_errors = 5 / math.sqrt(COUNT)
    assert beside[upper & beside].sum() == len(family.rows) * math.comb(BUNDLE, 2)
    assert np.abs(correlation[upper & beside] - expected).max() < five_errors
    assert np.abs(correlation[upper & ~beside]).max() < five_errors
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
        of_row = {position: number for number, row in enumerate(family.rows) for position in row}
        assert chain.sequence not in known
        i, j, contact = pairs(chain)
        for a, b, touches in zip(i, j, contact, strict=True):
            bundles = of_row[a] // STRAND, of_row[b] // STRAND
            apart = abs(of_row[a] - of_row[b])
            assert touches == (bundles[0] == bundles[1] and apart <= 1), (name, a, b)
        coupled = {tuple(sorted(pair)) for row in family.rows for pair in combinations(row.tolist(), 2)}
        assert coupled - set(zip(i[contact].tolist(), j[contact].tolist(), strict=True)) == set()


def test_sample_refuses_structures_of_nothing():
    with pytest.raises(UserError, match="--structures: needs --repeats or --potts_families"):
        WithStructures(structures="out").check()
