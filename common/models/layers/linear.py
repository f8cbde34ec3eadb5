"""y = x W^T + b, with bf16 copies of the weights that are made once a step, and fp32 gradients of W on a GPU.

Autocast rounds a weight at every use: in every micro-batch, and again where a layer is recomputed, because its cache
lasts for one autocast region and a compiled graph has none. Rounded once a step, the numbers are the same.

On a GPU the gradient of a copied weight comes out of the matmul in fp32: neither rounded to bf16, nor written in bf16
and read again to be widened. On a CPU it is bf16 up to the weight, and accumulated in fp32. CPU matmuls are in
common.models.layers.cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.compat import foreach_copy_
from common.models.layers import cpu
from common.models.layers.cpu import device_type

_COPY = "in_bf16"  # attribute of a parameter


class RoundedWeights:
    """bf16 copies of some layers' weights: of the parameters that their modules list as `matmul_weights`."""

    def __init__(self, layers: Iterable[nn.Module]):
        modules = [module for layer in layers for module in layer.modules()]
        self.weights = [getattr(module, name) for module in modules for name in getattr(module, "matmul_weights", ())]
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16, requires_grad=False) for weight in self.weights]
        for weight, copy in zip(self.weights, self.copies, strict=True):
            use_copy(weight, copy)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy again: the weights have been set or updated."""
        if self.copies:
            foreach_copy_(self.copies, self.weights)


def use_copy(weight: Tensor, copy: Tensor) -> None:
    """From now on `linear` multiplies by the copy under bf16 autocast."""
    setattr(weight, _COPY, copy)


def copy_of(weight: Tensor) -> Tensor | None:
    return getattr(weight, _COPY, None)


def rounded(weight: Tensor) -> Tensor:
    """The bf16 copy of the weight, if there is one; gradients go to the weight."""
    copy = copy_of(weight)
    return weight if copy is None else _Rounded.apply(weight, copy)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        return grad.to(ctx.dtype), None


class Linear(nn.Module):
    """x W^T + b by `linear`, or by the `matmul` set in its place (emulated precision)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.matmul: Callable[..., Tensor] = linear
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.matmul_weights = ("weight", "bias") if bias else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Sums the gradient of a bf16 table, as FSDP2 gathers it, in fp32: findings/torch_embedding_bfloat16.sh."""

    def forward(self, input: Tensor) -> Tensor:
        if device_type(self.weight) == "cpu" and self.weight.dtype == torch.bfloat16:
            return F.embedding(input, self.weight.float()).to(self.weight.dtype)
        return super().forward(input)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x [..., in], weight [out, in], bias [out]; by autocast's rules where that is on."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
        copy, bias_copy = copy_of(weight), None if bias is None else copy_of(bias)
        if copy is not None and _takes_copies(x):
            return _LinearByCopies.apply(x.bfloat16(), weight, bias, copy, bias_copy)
        weight, bias = rounded(weight), None if bias is None else rounded(bias)
    return cpu.linear(x, weight, bias) if device_type(x) == "cpu" else F.linear(x, weight, bias)


def gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass of `linear`: grad W and grad^T x, for grad [m, out], x [m, in], W [out, in] of one dtype."""
    if device_type(x) == "cpu":
        return cpu.linear_gradients(grad, x, weight)
    return grad @ weight, grad.t() @ x


def _takes_copies(x: Tensor) -> bool:
    """Whether a matmul where x lies can write fp32 gradients of bf16 operands."""
    return device_type(x) == "cuda" and x.dim() == 2


class _LinearByCopies(torch.autograd.Function):
    """Multiplies bf16 copies; the gradients of the fp32 originals are not rounded to bf16 on their way."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor, bias_copy: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, copy)
        ctx.dtype = weight.dtype
        return F.linear(x, copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        x, copy = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_x = grad @ copy if need_x else None
        grad_weight = weight_gradient(grad, x, ctx.dtype) if need_weight else None
        grad_bias = grad.sum(0, dtype=ctx.dtype) if need_bias else None
        return grad_x, grad_weight, grad_bias, None, None


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """grad^T x [out, in] in the weight's dtype, for grad [T, out], x [T, in]; fp32 is what the matmul sums in."""
    if dtype != torch.float32 or grad.dtype == dtype:
        return grad.t() @ x
    if device_type(grad) == "cuda":
        return torch.mm(grad.t(), x, out_dtype=dtype)
    return grad.t().float() @ x.float()
