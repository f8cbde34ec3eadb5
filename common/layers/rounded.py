"""bf16 copies of the weights that products take under autocast, made once a step.

Autocast rounds a weight wherever it is used: in every micro-batch, and again where a layer is recomputed, for its
cache lasts from entering to leaving it, and a graph that is compiled has none. Rounded ahead the numbers are the same.
So are the gradients on a CPU: in bf16 up to the weight, added up in fp32. On a GPU they are fp32 from the product on
(common.layers.linear).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COPY = "in_bf16"  # attribute of a parameter


class RoundedWeights:
    """Those of some layers, whose modules say which of their parameters go into products as they are: `multiplied`."""

    def __init__(self, layers: Iterable[nn.Module]):
        modules = [module for layer in layers for module in layer.modules()]
        self.weights = [getattr(module, name) for module in modules for name in getattr(module, "multiplied", ())]
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False) for weight in self.weights]
        for weight, copy in zip(self.weights, self.copies, strict=True):
            use_copy(weight, copy)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have been set or updated."""
        if self.copies:
            torch._foreach_copy_(self.copies, self.weights)


def use_copy(weight: Tensor, copy: Tensor) -> None:
    """From now on `rounded` gives the copy."""
    setattr(weight, _COPY, copy)


def copy_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, _COPY, None)


def rounded(weight: Tensor) -> Tensor:
    """The copy in the place of the weight, if there is one."""
    copy = copy_of(weight)
    return weight if copy is None else _Rounded.apply(weight, copy)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.to(ctx.dtype), None
