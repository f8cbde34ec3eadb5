"""y = x W^T + b on a CPU: fp32 by the faster of two libraries, bf16 also where there are no instructions for it.

common.model.cpu says which. fp32 products of oneDNN are as exact as MKL's: fp32 inputs and accumulators. A bf16
product without instructions is the fp32 product of the bf16 numbers, rounded once: exact products and fp32 sums, as
the instructions have them. What is kept between forward and backward is bf16 then, too: numbers are widened a block
of rows at a time, which stays in the cache and takes no memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model.cpu import BF16_PRODUCTS, FP32_BY_ONEDNN

ROWS_PER_THREAD = 512  # that are widened at a time: 2.6 MB of fp32 for the widest operand of the 8M model


class Linear(nn.Linear):
    """`nn.Linear` by way of `linear`, or of what takes its place as `product`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.product = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x [..., in], weight [out, in], bias [out]; by autocast's rules where that is on."""
    if x.device.type != "cpu" or x.dim() != 2:
        return F.linear(x, weight, bias)
    if not BF16_PRODUCTS and _autocast_to_bf16() and x.dtype != torch.float64:
        x, weight = x.bfloat16(), weight.bfloat16()
        bias = None if bias is None else bias.bfloat16()
    elif torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if _takes(x, weight) else F.linear(x, weight, bias)


def _autocast_to_bf16() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of these is ours to make, and not the library's."""
    if not torch.compiler.is_compiling() and x.numel() == 0:
        return False
    ours = FP32_BY_ONEDNN if x.dtype == torch.float32 else x.dtype == torch.bfloat16 and not BF16_PRODUCTS
    return ours and x.dtype == weight.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weight.t(), None)
        if ctx.needs_input_grad[1]:
            grad_weight = _summed_over_rows(grad, x)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a [m, k] times the transpose of b [n, k]; any strides."""
    return (_product_in_a_graph if torch.compiler.is_compiling() else _multiply)(a, b, bias)


def _summed_over_rows(a: Tensor, b: Tensor) -> Tensor:
    """The transpose of a [m, n] times b [m, k]: [n, k]."""
    return (_sum_in_a_graph if torch.compiler.is_compiling() else _sum)(a, b)


@torch.autocast("cpu", enabled=False)  # which would turn fp32 products into bf16 ones
def _multiply(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.dtype == torch.float32:
        return _fp32(a, b, bias)
    b = b.float()
    bias = None if bias is None else bias.float()
    if not a.is_contiguous():
        return _fp32(a.float(), b, bias).to(a.dtype)
    out = a.new_empty(len(a), len(b))
    for rows in _blocks(len(a)):
        out[rows] = _fp32(a[rows].float(), b, bias)
    return out


@torch.autocast("cpu", enabled=False)
def _sum(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float32:
        return _fp32_sum(a, b)
    total = torch.zeros(a.shape[1], b.shape[1])
    for rows in _blocks(len(a)):
        left, right = a[rows].float(), b[rows].float()
        if FP32_BY_ONEDNN:
            total += _fp32_sum(left, right)
        else:
            total.addmm_(left.t(), right)
    return total.to(a.dtype)


def _blocks(rows: int) -> list[slice]:
    step = ROWS_PER_THREAD * torch.get_num_threads()
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _fp32(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if FP32_BY_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return F.linear(a, b, bias)


def _fp32_sum(a: Tensor, b: Tensor) -> Tensor:
    # Both factors are read column-wise here; the wider one is faster as oneDNN's second.
    wide = a.shape[1] > b.shape[1]
    return _fp32(b.t(), a.t(), None).t() if wide else _fp32(a.t(), b.t(), None)


# Inductor takes oneDNN's own operator for one of inference, whose weights are constants; these it calls as they are.
# It would also leave out the rounding to bf16 of what is widened again.
@torch.library.custom_op("esm2::product", mutates_args=())
def _product_in_a_graph(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(a, b, bias)


@_product_in_a_graph.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op("esm2::product_summed_over_rows", mutates_args=())
def _sum_in_a_graph(a: Tensor, b: Tensor) -> Tensor:
    return _sum(a, b).contiguous()


@_sum_in_a_graph.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[1], b.shape[1])
