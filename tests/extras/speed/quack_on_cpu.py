"""The two functions of quack.gemm_interface that --fused_gelu calls, in plain torch, from what quack-kernels 0.6.5
documents: `act(A B + bias)` and `d_act(A B, PreAct)`, computed in fp32 (float64 in float64), each result rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU by its definition, x P(X < x) of a standard normal X, and its derivative."""
    below = 0.5 + 0.5 * torch.erf(x / math.sqrt(2))
    return x * below, below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@torch.autocast("cpu", enabled=False)  # a kernel's products are no operators of torch
def gemm_act(A: Tensor, B: Tensor, *, bias: Tensor, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    """A [M, K], B [K, N], bias [N] -> (before the activation, after it), each [M, N]."""
    assert (activation, tuned, A.stride(-1)) == ("gelu_erf", False, 1)
    sums = _wide(A) @ _wide(B) + _wide(bias)
    return sums.to(A.dtype), _gelu(sums)[0].to(A.dtype)


@torch.autocast("cpu", enabled=False)
def gemm_dact(A: Tensor, B: Tensor, PreAct: Tensor, *, activation: str, tuned: bool) -> tuple[Tensor, Tensor]:
    """A [M, K], B [K, N], PreAct [M, N] -> (gradient before the activation, the activation again), each [M, N]."""
    assert (activation, tuned, A.stride(-1)) == ("gelu_erf", False, 1)
    activated, derivative = _gelu(_wide(PreAct))
    return (_wide(A) @ _wide(B) * derivative).to(A.dtype), activated.to(PreAct.dtype)
