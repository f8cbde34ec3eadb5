"""The small pack by which a run tries its attention kernels: right ones pass, wrong ones are found."""

from __future__ import annotations

import math

import pytest
import torch

from common.cli import UserError
from common.models.layers.attention import rotated_attention
from common.models.layers.backend import Heads
from extras.speed import attention_kernels
from extras.speed.attention_kernels import TOLERANCE, choose_kernels, worst_difference

CPU = torch.device("cpu")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def as_flash_rounds(q, k, v, cu_seqlens, longest, causal):
    """What flash attention's kernels round to bf16: probabilities, their gradients, each result; the rest is fp32."""
    return torch.cat([FlashInBf16.apply(*x, causal) for x in parts(q, k, v, cu_seqlens)]).flatten(1)


def parts(q, k, v, cu_seqlens):
    return zip(*(x.split(cu_seqlens.diff().tolist()) for x in (q, k, v)), strict=True)


class FlashInBf16(torch.autograd.Function):
    """One sequence, [T, H, D], H heads of keys."""

    @staticmethod
    def forward(ctx, *inputs):
        *inputs, causal = inputs
        q, k, v = (x.transpose(0, 1).float() for x in inputs)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = (weights.bfloat16().float() @ v / weights.sum(-1, keepdim=True)).bfloat16()
        ctx.save_for_backward(q, k, v, scores.softmax(-1), out)
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, weights, out = ctx.saved_tensors
        grad = grads[0].transpose(0, 1).float()
        rows = (grad * out).sum(-1, keepdim=True)
        of_scores = (weights * (grad @ v.mT - rows) * q.shape[-1] ** -0.5).bfloat16().float()
        found = of_scores @ k, of_scores.mT @ q, weights.bfloat16().float().mT @ grad
        return *(x.transpose(0, 1).bfloat16() for x in found), None


@pytest.mark.parametrize("heads", [Heads(20, 20, 16), Heads(20, 20, 64), Heads(4, 4, 128, causal=True)])
def test_small_pack_finds_right_kernels_right(monkeypatch, heads):
    """Bf16 against fp32: this CPU's, and the roundings of a GPU's."""
    assert 0 < worst_difference(heads, CPU, shared=True) < TOLERANCE / 2
    by_function(monkeypatch, as_flash_rounds)
    assert 0 < worst_difference(heads, CPU, shared=False) < TOLERANCE / 2


def test_small_pack_takes_grouped_queries():
    assert 0 < worst_difference(Heads(4, 2, 16, causal=True), CPU, shared=False) < TOLERANCE / 2


def by_function(monkeypatch, function) -> None:
    """Attention in bf16 by a function, as it were a kernel; the fp32 that it is held to stays."""

    def attend(q, *others):
        return (rotated_attention if q.dtype == torch.float32 else function)(q, *others)

    monkeypatch.setattr(attention_kernels, "rotated_attention", attend)


def one_key_of_the_next(q, k, v, cu_seqlens, longest, causal):
    """A kernel that is wrong at the end of a tile: queries after the 128th see a key of the sequence behind theirs."""
    out = rotated_attention(q, k, v, cu_seqlens, longest, causal).view(q.shape)
    begin, end = cu_seqlens[3:5].tolist()  # the sequence of 129
    wider = torch.tensor([0, end - begin + 1], dtype=torch.int32)
    more = rotated_attention(*(x[begin : end + 1] for x in (q, k, v)), wider, longest, causal)
    return torch.cat((out[: end - 1], more.view(-1, *q.shape[1:])[-2:-1], out[end:])).flatten(1)


def half_a_gradient(q, k, v, *pack):
    """Right forward, wrong backward: as of grouped queries, half of which were forgotten."""
    return rotated_attention(q, k + (k.detach() - k) / 2, v, *pack)


def nan_alone(q, k, v, cu_seqlens, *pack):
    """NaN for the sequence of one token."""
    first = rotated_attention(q, k, v, cu_seqlens, *pack)
    return first.index_fill(0, cu_seqlens[2:3].long(), math.nan)


@pytest.mark.parametrize("wrong", [one_key_of_the_next, half_a_gradient, nan_alone])
def test_small_pack_finds_wrong_kernels_wrong(hopper, monkeypatch, wrong):
    by_function(monkeypatch, wrong)
    assert not worst_difference(Heads(4, 4, 64), CPU, shared=False) <= TOLERANCE
    with pytest.raises(
        UserError, match=r"^--attention sdpa: its results on a small pack differ .* by .*: choose auto"
    ):
        choose_kernels("sdpa", Heads(4, 4, 64), CPU, shared=False)
    with pytest.raises(
        UserError, match=r"^--attention auto: not flash4: .*; not flash2: its results .*: choose .*sdpa$"
    ):
        choose_kernels("auto", Heads(4, 4, 64), CPU, shared=False)
