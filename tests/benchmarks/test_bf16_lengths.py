"""benchmarks/bf16_lengths.py: attention of rounded inputs, and its measures of error."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.bf16_lengths import errors, rounded_attention


def test_rounded_attention_rounds_and_nothing_else():
    query, key, value = torch.randn(3, 1, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    found, _ = rounded_attention(None, query, key, value, None, scaling=0.3)
    exact = F.scaled_dot_product_attention(query, key, value, scale=0.3).transpose(1, 2)
    assert found.dtype == torch.float32
    assert 1e-4 < (found - exact).abs().max() < 0.05  # values of about 1, of eight bits
    rounded = [each.bfloat16().float() for each in (query, key, value)]
    expected = F.scaled_dot_product_attention(*rounded, scale=0.3).transpose(1, 2)
    assert (found - expected).abs().max() < (found - exact).abs().max()


def test_errors_see_the_worst_residue():
    hidden, logs = torch.randn(30, 16), torch.randn(30, 20).clamp(-2, 2).log_softmax(-1)
    assert max(errors((hidden, logs), (hidden, logs))) < 1e-12
    turned = hidden.clone()
    turned[7] = -turned[7]
    moved = logs.clone()
    moved[3] += 0.25
    mean, worst, mean_p, worst_p = errors((turned, moved), (hidden, logs))
    assert abs(worst - 2) < 1e-6
    assert mean < worst
    assert abs(worst_p - 0.25) < 1e-5
    assert abs(mean_p - 0.25 / 30) < 1e-5
