"""What the stand-in and the emulation cast, bit for bit against Transformer Engine's own reference quantisers.

NaN is left out: the references spread it over the tensor (current scaling) or lose it (NVFP4), where the kernels keep
it out of scales. So is infinity with current scaling, whose scale is 0 there and 1 in the kernels.
"""

from __future__ import annotations

import pytest
import torch

from tests.te_on_cpu.boot import needs_site
from tests.te_on_cpu.references import compare
from tests.training_fixtures import on_ranks

pytestmark = needs_site


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """{case: {what: numbers that differ}}"""
    path = tmp_path_factory.mktemp("references") / "found"
    codes, said = on_ranks(1, compare, str(path))
    assert codes == [0], said[0]
    return torch.load(path)


@pytest.mark.parametrize(("kind", "cases"), [("current", 84), ("nvfp4", 48), ("nvfp4, transform", 2)])
def test_casts_equal_the_references(found, kind, cases):
    of_kind = {case: counts for case, counts in found.items() if case[0] == kind}
    assert len(of_kind) == cases
    wrong = {case: counts for case, counts in of_kind.items() if any(counts.values())}
    assert not wrong
