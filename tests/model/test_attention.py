"""Packed attention against float64 softmax attention written out from its definition."""

from __future__ import annotations

import math

import pytest
import torch

from common.model import attention
from common.model.attention import packed_attention, rotary_tables

LENGTHS = [1, 2, 17, 100, 64, 333]
HEADS, DIM = 4, 16


def definition(qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """softmax(R(q) R(k)^T / sqrt(D)) v, sequence by sequence, with rotations as complex products (RoFormer)."""
    out = []
    for part in qkv.split(lengths):
        angles = torch.arange(len(part)).double()[:, None] / 10000 ** (torch.arange(0, DIM, 2).double() / DIM)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k, v = part.unbind(2)
        q, k = (torch.complex(*x.chunk(2, -1)) * turn for x in (q, k))
        q, k = (torch.cat((x.real, x.imag), -1) for x in (q, k))
        weights = torch.einsum("ihd,jhd->hij", q, k).div(math.sqrt(DIM)).softmax(-1)
        out.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(out).flatten(1)


def run(function, qkv, grad):
    qkv = qkv.clone().requires_grad_()
    out = function(qkv)
    out.backward(grad)
    return out.detach().double(), qkv.grad.double()


def error(ours, exact):
    return ((ours - exact).norm() / exact.norm()).item()


def ours(qkv):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cos, sin = rotary_tables(positions, DIM)
    if qkv.dtype == torch.float64:
        cos, sin = cos.double(), sin.double()
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return packed_attention(qkv, cos, sin, cu_seqlens, max(LENGTHS))


@pytest.fixture(params=[1.0, 6.0], ids=["mild scores", "peaked scores"])
def inputs(request):
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), HEADS, 3, DIM, dtype=torch.float64)
    qkv[:, :, :2] *= request.param**0.5
    return qkv, torch.randn(sum(LENGTHS), HEADS * DIM, dtype=torch.float64)


# Bounds: fp32 and fp64 a few times machine epsilon through a softmax (angles are fp32 in both); bf16 five units in
# the last place (2^-8 = 0.4 %) of the inputs' own rounding, which the exact result is computed after.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-5), (torch.float32, 2e-5), (torch.bfloat16, 0.02)])
def test_forward_and_backward(dtype, bound, inputs):
    qkv, grad = (x.to(dtype) for x in inputs)
    exact = run(lambda x: definition(x, LENGTHS), qkv.double(), grad.double())
    out, grads = run(ours, qkv, grad)
    assert error(out, exact[0]) < bound
    for which in range(3):
        assert error(grads[:, :, which], exact[1][:, :, which]) < bound, "qkv"[which]


def test_bf16_is_as_good_as_the_librarys_kernel(inputs):
    """The CPU path is arranged for speed; its error stays within a bit (a factor of two) of the library's kernel."""
    qkv, grad = (x.bfloat16() for x in inputs)
    exact = run(lambda x: definition(x, LENGTHS), qkv.double(), grad.double())

    def library(x):
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        cos, sin = rotary_tables(positions, DIM)
        q, k, v = x.unbind(2)
        q, k = attention.rotate(q, cos, sin), attention.rotate(k, cos, sin)
        parts = zip(*(y.transpose(0, 1).split(LENGTHS, dim=1) for y in (q, k, v)), strict=True)
        done = [torch.nn.functional.scaled_dot_product_attention(*(y[None] for y in part))[0] for part in parts]
        return torch.cat(done, dim=1).transpose(0, 1).flatten(1)

    mine, theirs = run(ours, qkv, grad), run(library, qkv, grad)
    for m, t, e in zip(mine, theirs, exact, strict=True):
        assert error(m, e) < 2 * error(t, e)


def test_long_sequences_are_split_over_heads(inputs, monkeypatch):
    """A small scratch block must not change a bit of the result: heads do not mix."""
    qkv, grad = (x.bfloat16() for x in inputs)
    whole = run(ours, qkv, grad)
    monkeypatch.setattr(attention, "SCRATCH_ELEMENTS", 50_000)
    split = run(ours, qkv, grad)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_nothing_leaks_between_sequences(inputs):
    qkv, _ = (x.float() for x in inputs)
    before = ours(qkv)
    changed = qkv.clone()
    changed[-1] += 100.0  # the last sequence
    after = ours(changed)
    first = sum(LENGTHS[:-1])
    assert torch.equal(before[:first], after[:first])
    assert not torch.equal(before[first:], after[first:])
