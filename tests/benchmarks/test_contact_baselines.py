"""What coils give away without a model."""

from __future__ import annotations

import numpy as np

from benchmarks.contact_baselines import by_turn, dot_plot, separation_prior, turn_of
from extras.after.downstream.contacts import mean_precisions, pairs, precisions
from extras.after.downstream.structures import Chain, read_structures
from extras.prepare.sample import write_structures
from extras.prepare.synthetic_structures import COIL_STRUCTURES, coil_structures


def test_dot_plot_counts_equal_residues_along_the_diagonal():
    chain = Chain("a", "ACDACDA", np.zeros((7, 3), np.float32))
    found = dot_plot(chain, 1)
    assert found[1, 4] == 3
    assert found[0, 3] == 2  # at the end of the chain
    assert found[1, 3] == 0


def test_separation_prior_is_the_share_of_pairs_in_contact():
    beta = np.zeros((12, 3), np.float32)
    beta[:, 0] = [0, *range(100, 1100, 100), 5]
    chain = Chain("a", "A" * 12, beta)
    i, j, contact = pairs(chain)
    assert contact.sum() == 1
    assert separation_prior([chain])(chain)[0, 11] == 1
    assert separation_prior([chain])(chain)[0, 6] == contact[j - i == 6].mean() == 0


def test_contacts_of_a_coil_follow_from_its_own_sequence(tmp_path):
    write_structures(tmp_path, coil_structures(COIL_STRUCTURES, 42))
    chains = read_structures(str(tmp_path))[:5]
    assert all(24 <= turn_of(chain) <= 32 for chain in chains)
    assert mean_precisions([precisions(chain, by_turn(chain)) for chain in chains])["long_p_at_l"] > 0.95
