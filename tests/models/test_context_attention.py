"""Ranks that share packs compute what one process does: logits, loss and the gradient of every parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.distributed.context_parallel import CpPack, CpSplit
from common.models.layers.context_attention import whole_sequences
from tests.models.context_cases import all_cases, compare, hold_blocks
from tests.training_fixtures import on_ranks

ROUNDING = 1e-5  # of fp32, relative to the tensor: sums in another order, over some hundred terms
ROUNDING_BF16 = 0.03  # of bf16: 2^-8 a step, and a few steps


@pytest.mark.parametrize(("cp_size", "dp_size"), [(2, 1), (2, 2), (4, 1)])
def test_context_attention_equals_single_process(tmp_path, cp_size, dp_size):
    cases = all_cases(cp_size)
    if dp_size > 1:
        cases = [case for case in cases if case[5] == "mixed"][::2]
    codes, said = on_ranks(cp_size * dp_size, compare, cp_size, cases, str(tmp_path / "found"))
    assert codes == [0] * cp_size * dp_size, "\n".join(said)
    wrong = []
    for case, what, distance, scale, cosine in torch.load(tmp_path / "found"):
        bf16 = case[4]
        bound = ROUNDING_BF16 if bf16 else ROUNDING
        if not distance <= bound * scale or cosine < (0.999 if bf16 else 0.999999):
            wrong.append((case, what, distance, scale, cosine))
    assert not wrong, "\n".join(map(str, wrong[:20]))


def test_ring_blocks_holds_two_blocks(tmp_path):
    codes, said = on_ranks(4, hold_blocks)
    assert codes == [0] * 4, "\n".join(said)


def test_whole_sequences_gives_te_boundaries():
    """With cp 2: [5, 8] padded to [8, 8], and 4 fillers on each rank."""
    slices = CpSplit(np.array([5, 8]), 2, "dual_chunk", 8)
    shared = CpPack(*(torch.from_numpy(x) for x in (slices.positions(0), slices.bounds(), slices.real())), None, None)
    assert whole_sequences(shared, tokens=12).tolist() == [[0, 5, 13, 21], [0, 8, 16, 24]]
