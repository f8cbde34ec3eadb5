"""Packed attention against float64 softmax attention written out from its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import varlen

from common.models.layers import attention
from common.models.layers.attention import packed_attention, rotary_tables, rotated_attention, use_kernels

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


def ours(qkv, at=None):
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cos, sin = rotary_tables(positions, DIM)
    if qkv.dtype == torch.float64:
        cos, sin = cos.double(), sin.double()
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return packed_attention(qkv, cos, sin, cu_seqlens, max(LENGTHS), at)


@pytest.fixture(params=[1.0, 6.0], ids=["mild scores", "peaked scores"])
def inputs(request):
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), HEADS, 3, DIM, dtype=torch.float64)
    qkv[:, :, :2] *= request.param**0.5
    return qkv, torch.randn(sum(LENGTHS), HEADS * DIM, dtype=torch.float64)


# Bounds: fp32 and fp64 a few times machine epsilon through a softmax (angles are fp32 in both); bf16 five units in
# the last place (2^-8 = 0.4 %) of the inputs' own rounding, which the exact result is computed after.
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-5), (torch.float32, 2e-5), (torch.bfloat16, 0.02)])
def test_attention_equals_reference(dtype, bound, inputs):
    qkv, grad = (x.to(dtype) for x in inputs)
    exact = run(lambda x: definition(x, LENGTHS), qkv.double(), grad.double())
    out, grads = run(ours, qkv, grad)
    assert error(out, exact[0]) < bound
    for which in range(3):
        assert error(grads[:, :, which], exact[1][:, :, which]) < bound, "qkv"[which]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-5), (torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_attention_of_some_tokens_equals_reference(dtype, bound, with_gradients, inputs):
    """In any order, twice one of them, and of some sequences none."""
    qkv, at = inputs[0].to(dtype), torch.tensor([516, 0, 25, 90, 25])
    with torch.set_grad_enabled(with_gradients):
        some = ours(qkv.requires_grad_(with_gradients), at)
    assert error(some.detach().double(), definition(qkv.detach().double(), LENGTHS)[at]) < bound
    assert some.requires_grad == with_gradients


def test_attention_bf16_products_are_exact(inputs):
    """Beside fp32 arithmetic on the same bf16 numbers only q, k, the output and the gradients are rounded."""
    qkv, grad = (x.bfloat16() for x in inputs)
    narrow, wide = run(ours, qkv, grad), run(ours, qkv.float(), grad.float())
    for n, w in zip(narrow, wide, strict=True):
        assert error(n, w) < 4 * 2**-8


def test_attention_does_not_leak_between_sequences(inputs):
    qkv, _ = (x.float() for x in inputs)
    before = ours(qkv)
    changed = qkv.clone()
    changed[-1] += 100.0  # the last sequence
    after = ours(changed)
    first = sum(LENGTHS[:-1])
    assert torch.equal(before[:first], after[:first])
    assert not torch.equal(before[first:], after[first:])


@pytest.fixture
def kernels():
    """--attention's choice, for one test."""
    yield use_kernels
    use_kernels("auto")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
def test_attention_by_sdpa_equals_reference(kernels, monkeypatch, dtype, bound, inputs):
    """--attention sdpa on a CPU, without the CPU's own operator."""
    kernels("sdpa")
    monkeypatch.setattr(attention.cpu, "attention", None)
    test_attention_equals_reference(dtype, bound, inputs)


@pytest.fixture
def enabled(monkeypatch):
    """What torch allowed (cuDNN, flash) when its varlen attention was called, of a torch that would choose by it."""
    seen = []

    def stand_in(q, k, v, *bounds, **options):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return q + k + v

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "varlen_takes_cudnn", lambda: True)
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda q: True)
    return seen


@pytest.mark.parametrize(
    ("choice", "allowed"), [("auto", (False, True)), ("flash4", (False, True)), ("cudnn", (True, False))]
)
def test_torch_takes_cudnn_when_asked_alone(kernels, enabled, choice, allowed):
    kernels(choice)
    before = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    q = torch.randn(9, 2, 8)
    rotated_attention(q, q, q, torch.tensor([0, 9]), 9)
    assert enabled == [allowed]
    assert before == (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())


def test_choice_of_kernels_is_traced_in_one_graph(monkeypatch, enabled):
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, *bounds, **options: q + k + v)
    q = torch.randn(9, 2, 8)
    traced = torch.compile(rotated_attention, backend="eager", fullgraph=True)
    assert torch.equal(traced(q, q, q, torch.tensor([0, 9]), 9), (3 * q).flatten(1))
