"""EmulatedMatmul by matmul, Transformer Engine computes what the emulation says that it does."""

from __future__ import annotations

import pytest
import torch

from tests.te_on_cpu import sharing
from tests.te_on_cpu.boot import needs_site
from tests.te_on_cpu.modules import BLACKWELL, HOPPER, RECIPES, compare
from tests.training_fixtures import on_ranks

pytestmark = needs_site


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """{(recipe, bf16, step): {tensor: (from the emulation, the emulation's from no format)}}"""
    every = {}
    for capability in (HOPPER, BLACKWELL):
        path = tmp_path_factory.mktemp("modules") / "found"
        codes, said = on_ranks(1, compare, capability, str(path))
        assert codes == [0], said[0]
        every |= torch.load(path)
    return every


def bound(name: str, bf16: bool, tensor: str, change: float) -> float:
    """How far one tensor may be. change: how far the formats move it.

    fp32: the same values, multiplied and summed by the same library; scales that are no powers of two come before or
    after the sum. bf16: values times powers of two are bf16 numbers, so that results are the same bits, but for what
    passes the norm's backward pass, rounded to bf16 once more or less. Otherwise the emulation's operands are rounded
    to bf16, which FP8's units have no need of: 2^-8 a matmul, and in the MLP what that moves over an edge.
    """
    power_of_2 = name in ("current, powers of 2", "block", "mxfp8", "mxfp8, hybrid")
    if not bf16:
        return 1e-6 if power_of_2 else 1e-4
    through_norm = "layer_norm_" in tensor or (tensor.endswith("dx") and "proj" not in tensor)
    if power_of_2:
        return 2**-8 if through_norm else 0.0
    return max(2**-7, change / 2)


@pytest.mark.parametrize("name", RECIPES)
def test_matmuls_equal_the_emulation(found, name):
    cases = {case: distances for case, distances in found.items() if case[0] == name}
    assert cases
    for (_, bf16, step), distances in cases.items():
        assert len(distances) >= 2 * 3 + 8, "results, and gradients of eight parameters"
        assert max(change for _, change in distances.values()) > 0.05, "as if nothing were quantised"
        wrong = {key: far for key, (far, change) in distances.items() if far > bound(name, bf16, key, change)}
        assert not wrong, (bf16, step)


@pytest.mark.parametrize("way", ["p2p", "a2a"])
def test_cp_attention_equals_attention_to_the_whole_pack(way, tmp_path):
    """Inputs are the same bf16 numbers; results and gradients are rounded to bf16 once, and where a ring joins two
    parts a few times more: each time by 2^-9 of a number at most. Half of the keys are another rank's."""
    codes, said = on_ranks(2, sharing.compare, way, str(tmp_path / "found"))
    assert codes == [0, 0], said
    assert max(torch.load(tmp_path / "found")) < 2**-7
