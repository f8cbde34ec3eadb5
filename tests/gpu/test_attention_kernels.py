"""--attention on a GPU: each choice that it has gives the attention of fp32 on the host, is found in a profile by its
name, and gives the same bits under --deterministic.

No GPU has run these yet (docs/hardware.md).
"""

from __future__ import annotations

import pytest
import torch

from common.models.layers.attention import rotated_attention, use_kernels
from common.models.layers.backend import ATTENTION, Heads
from extras.speed.attention_kernels import SWITCHED, KernelWatch, choose_kernels, lacking

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


@pytest.fixture(params=ATTENTION[1:])
def kernels(request):
    """--attention's value, where this machine has it."""
    if reason := lacking(request.param, 64, torch.device("cuda")):
        pytest.skip(f"{request.param}: {reason}")
    yield request.param
    choose_kernels("flash2", Heads(1, 1, 64), torch.device("cuda"), shared=False)
    use_kernels("auto")


def attended(heads: int = 8) -> list[torch.Tensor]:
    """Output and gradients of a pack."""
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 1000, 1100, 4096], dtype=torch.int32, device="cuda")
    q, k, v, grad = (torch.randn(4096, heads, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rotated_attention(*leaves, cu_seqlens, 2996)
    return [out, *torch.autograd.grad(out, leaves, grad.flatten(1))]


# 8M, 35M, 650M, a Llama's shared heads.
@pytest.mark.parametrize("heads", [Heads(20, 20, 16), Heads(20, 20, 24), Heads(20, 20, 64), Heads(32, 8, 128, True)])
def test_kernels_are_attention(kernels, heads):
    """Held to the host's by `choose_kernels` itself; flash attention's of blocks that ranks share, too."""
    shared = not heads.causal and (kernels in SWITCHED or kernels == "flash2")
    recorded, _ = choose_kernels(kernels, heads, torch.device("cuda"), shared=shared)
    assert recorded.split()[0] == kernels


def test_kernels_that_are_chosen_run(kernels):
    choose_kernels(kernels, Heads(8, 8, 64), torch.device("cuda"), shared=False)
    watch = KernelWatch()
    watch.begin()
    attended()
    torch.cuda.synchronize()
    watch.end()
    assert watch.found == kernels


def test_flash_runs_where_nothing_is_chosen():
    """torch 2.15 would take cuDNN's."""
    watch = KernelWatch()
    watch.begin()
    attended()
    torch.cuda.synchronize()
    watch.end()
    assert watch.found == "flash2"


def test_kernels_are_deterministic(kernels):
    choose_kernels(kernels, Heads(8, 8, 64), torch.device("cuda"), shared=False)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [attended() for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))
