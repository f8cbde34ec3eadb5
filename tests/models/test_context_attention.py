"""Ranks that share packs compute what one process does: logits, loss and the gradient of every parameter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.models.layers import cpu
from extras.speed.block_attention import QUERIES_AT_A_TIME, attend_by_matmuls, gradients_by_matmuls
from extras.speed.context_attention import CpLayout, attend_blocks, gradients_of_block
from extras.speed.context_parallel import ContextGroup, CpPack, CpSplit
from extras.speed.cp_model import whole_sequences
from tests.models.context_cases import CPU, LENGTHS, all_cases, compare, decoder_cases, hold_blocks
from tests.training_fixtures import on_ranks

ROUNDING = 1e-5  # of fp32, relative to the tensor: sums in another order, over some hundred terms
ROUNDING_BF16 = 0.03  # of bf16: 2^-8 a step, and a few steps


@pytest.mark.parametrize(
    ("cp_size", "dp_size"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_context_attention_equals_single_process(tmp_path, cp_size, dp_size):
    cases = all_cases(cp_size)
    if dp_size > 1:
        cases = [case for case in cases if case[5] == "mixed"][::2]
    hold_cases(tmp_path, cp_size, dp_size, cases)


@pytest.mark.parametrize(
    ("cp_size", "dp_size"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_context_attention_of_decoders_equals_single_process(tmp_path, cp_size, dp_size):
    cases = decoder_cases(cp_size)
    hold_cases(tmp_path, cp_size, dp_size, cases[::4] if dp_size > 1 else cases)


def hold_cases(tmp_path: Path, cp_size: int, dp_size: int, cases: list[tuple]) -> None:
    codes, said = on_ranks(cp_size * dp_size, compare, cp_size, cases, str(tmp_path / "found"))
    assert codes == [0] * cp_size * dp_size, "\n".join(said)
    wrong = []
    for case, what, distance, scale, cosine in torch.load(tmp_path / "found"):
        bf16 = case[4]
        bound = ROUNDING_BF16 if bf16 else ROUNDING
        if not distance <= bound * scale or cosine < (0.999 if bf16 else 0.999999):
            wrong.append((case, what, distance, scale, cosine))
    assert not wrong, "\n".join(map(str, wrong[:20]))


class Group(NamedTuple):
    """What a layout asks of a process group."""

    number: int
    ranks: int
    group_name: str = "alone"

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize("multiple", [1, 8], ids=["padded to 2 x cp", "to 16 x cp"])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_causal_blocks_equal_torchs_attention_in_float64(cp_size, multiple):
    """All ranks' turns, one rank after the other: output and the gradients of queries, keys and values; documents of
    odd lengths across the borders of chunks, and grouped heads."""
    lengths, heads, kv_heads, dim = LENGTHS["mixed"], 4, 2, 8
    starts = np.cumsum([0, *lengths])
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(starts[-1], n, dim, generator=random, dtype=torch.float64).requires_grad_()
        for n in (heads, kv_heads, kv_heads, heads)
    )
    parts = [[x[a:b].transpose(0, 1) for x in (q, k, v)] for a, b in zip(starts, starts[1:], strict=False)]
    whole = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    expected = torch.cat(whole, 1).transpose(0, 1)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad)

    split = CpSplit(np.array(lengths), cp_size, "dual_chunk", 2 * cp_size * multiple)
    real, bounds = torch.from_numpy(split.real()), torch.from_numpy(split.bounds())
    layouts = [CpLayout(real, bounds, CPU, ContextGroup(Group(rank, cp_size))) for rank in range(cp_size)]
    places = [(split.positions(r) + starts[split.sequences(r)])[layouts[r].own] for r in range(cp_size)]
    q, k, v, grad = (x.detach() for x in (q, k, v, grad))
    kv = torch.stack((k, v), 1)
    blocks = [layout.block(kv[place]) for layout, place in zip(layouts, places, strict=True)]
    out, dq, dkv = torch.zeros_like(q), torch.zeros_like(q), torch.zeros_like(kv)
    for rank, (layout, place) in enumerate(zip(layouts, places, strict=True)):
        turns = [((rank - turn) % cp_size, blocks[(rank - turn) % cp_size]) for turn in range(cp_size)]
        out[place], lse = attend_blocks(q[place], iter(turns), layout, causal=True)
        for other, block in turns:
            saved = grad[place], q[place], out[place], lse
            of_queries, of_block = gradients_of_block(saved, other, block, layout, causal=True)
            dq[place] += of_queries
            dkv[places[other]] += of_block[: len(places[other])]
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-12)
    for found, exact in zip((dq, *dkv.unbind(1)), expected_grads, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("queries", "causal"), [(9, False), (9, True), (QUERIES_AT_A_TIME + 50, False)])
def test_attention_by_matmuls_equals_the_cpus_kernel(queries, causal):
    random = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(t, n, 8, generator=random, dtype=torch.float64)
        for t, n in ((queries, 4), (9, 2), (9, 2), (queries, 4))
    )
    forward = cpu.flash(q, k, v, causal)
    for found, expected in zip(attend_by_matmuls(q, k, v, causal), forward, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    backward = (f(grad, q, k, v, *forward, causal) for f in (gradients_by_matmuls, cpu.flash_backward))
    for found, expected in zip(*backward, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_ring_blocks_holds_two_blocks(tmp_path):
    codes, said = on_ranks(4, hold_blocks)
    assert codes == [0] * 4, "\n".join(said)


def test_whole_sequences_gives_te_boundaries():
    """With cp 2: [5, 8] padded to [8, 8], and 4 fillers on each rank."""
    slices = CpSplit(np.array([5, 8]), 2, "dual_chunk", 8)
    shared = CpPack(*(torch.from_numpy(x) for x in (slices.positions(0), slices.bounds(), slices.real())), None, None)
    assert whole_sequences(shared, tokens=12).tolist() == [[0, 5, 13, 21], [0, 8, 16, 24]]
