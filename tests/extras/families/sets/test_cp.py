"""Ranks that share the sequences of sets compute what one process does, in float64."""

from __future__ import annotations

import pytest

from tests.extras.families.sets.cp_cases import compare
from tests.training_fixtures import on_ranks


@pytest.mark.parametrize("cp_size", [2, 3])
def test_shared_sets_equal_one_process(cp_size):
    codes, said = on_ranks(cp_size, compare)
    assert codes == [0] * cp_size, "\n".join(said)
