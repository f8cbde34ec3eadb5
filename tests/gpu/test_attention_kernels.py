"""FA3 and FA4 on a GPU that has them: the attention of fp32 on the host, and the same bits under --deterministic.

No GPU has run these yet (docs/hardware.md).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import attention as switch

from common.models.layers.attention import rotated_attention
from common.models.layers.backend import Heads
from extras.speed.attention_kernels import choose_kernels, lacking

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture(params=["fa4", "fa3"])
def kernels(request):
    """--flash_attention's value, where this machine has it."""
    if reason := lacking(request.param.upper(), 64, torch.device("cuda")):
        pytest.skip(f"{request.param}: {reason}")
    yield request.param
    if switch.current_flash_attention_impl():
        switch.restore_flash_attention_impl()


# 8M, 35M, 650M, a Llama's shared heads.
@pytest.mark.parametrize("heads", [Heads(20, 20, 16), Heads(20, 20, 24), Heads(20, 20, 64), Heads(32, 8, 128, True)])
def test_flash_attention_is_attention(kernels, heads):
    """Held to the host's by `choose_kernels` itself, of blocks that ranks share too."""
    recorded, _ = choose_kernels(kernels, heads, torch.device("cuda"), shared=not heads.causal)
    assert recorded.split()[0] == kernels.upper() == switch.current_flash_attention_impl()


def test_flash_attention_is_deterministic(kernels):
    device, cu_seqlens = torch.device("cuda"), torch.tensor([0, 1000, 1100, 4096], dtype=torch.int32, device="cuda")
    choose_kernels(kernels, Heads(8, 8, 64), device, shared=False)
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(4096, 8, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(3):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = rotated_attention(*leaves, cu_seqlens, 2996)
            runs.append((out, *torch.autograd.grad(out, leaves, grad.flatten(1))))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))
