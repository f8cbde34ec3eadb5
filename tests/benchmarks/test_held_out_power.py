"""benchmarks/held_out_power.py: as many proteins as the formula asks for see the difference in four of five cases."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.held_out_power import needed, seen
from common.training.protein_losses import mean_and_error


@pytest.mark.parametrize("difference", [0.01, 0.03])
def test_needed_proteins_see_the_difference(difference):
    generator = np.random.default_rng(1)
    counts = generator.integers(5, 60, 1500)
    apart = generator.normal(0, 0.02, 1500) * counts + generator.normal(0, 0.4, 1500) * counts**0.5
    units = round(needed(mean_and_error(apart, counts)[1], 1500, difference))
    assert 30 < units < 5000
    assert abs(seen(apart, counts, units, difference) - 0.8) < 0.06  # 1,000 draws: 0.013 each
    assert seen(apart, counts, units // 4, difference) < 0.5
