"""The decoder's causal attention: the CPU's operator beside the definition in float64."""

from __future__ import annotations

import pytest
import torch

from common.models.layers import cpu
from common.models.layers.attention import rotary_tables, use_kernels
from extras.families.decoders.layers import causal_attention

LENGTHS, DIM = [1, 2, 17, 40], 8


def attend(qkv: torch.Tensor, kv_heads: int) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    tables = [x.double() if qkv.dtype == torch.float64 else x for x in rotary_tables(positions, DIM)]
    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return causal_attention(qkv, kv_heads, *tables, cu_seqlens, max(LENGTHS))


def run(qkv: torch.Tensor, kv_heads: int, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    qkv = qkv.clone().requires_grad_()
    out = attend(qkv, kv_heads)
    out.backward(grad.to(out.dtype))
    return out.detach().double(), qkv.grad.double()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
def test_causal_attention_equals_float64(heads, kv_heads, dtype, bound):
    """float64 takes torch's own attention, sequence by sequence; fp32 and bf16 the CPU's operator."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    qkv = torch.randn(sum(LENGTHS), heads + 2 * kv_heads, DIM, generator=generator).to(dtype)
    grad = torch.randn(sum(LENGTHS), heads * DIM, generator=generator).to(dtype)
    exact = run(qkv.double(), kv_heads, grad)
    for found, expected in zip(run(qkv, kv_heads, grad), exact, strict=True):
        assert (found - expected).norm() / expected.norm() < bound


def test_causal_attention_by_sdpa_equals_float64(monkeypatch):
    """--attention sdpa, without the CPU's operator."""
    qkv, grad = torch.randn(sum(LENGTHS), 8, DIM), torch.randn(sum(LENGTHS), 4 * DIM)
    monkeypatch.setattr(cpu, "attention", None)
    use_kernels("sdpa")
    try:
        for found, exact in zip(run(qkv, 2, grad), run(qkv.double(), 2, grad), strict=True):
            assert (found - exact).norm() / exact.norm() < 2e-5
    finally:
        use_kernels("auto")


def test_causal_attention_sees_no_later_token_nor_other_sequence():
    qkv = torch.randn(sum(LENGTHS), 8, DIM, generator=torch.Generator().manual_seed(1))
    before, last = attend(qkv, 2), sum(LENGTHS) - 1
    changed = qkv.clone()
    changed[last] += 10.0
    after = attend(changed, 2)
    assert torch.equal(before[:last], after[:last])
    assert not torch.equal(before[last], after[last])
