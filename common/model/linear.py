"""y = x W^T + b, with the faster of two fp32 products on a CPU.

PyTorch multiplies fp32 matrices with MKL, which takes its AVX2 path on processors that are not Intel's: less than half
of what the core can do with AVX-512. oneDNN, which PyTorch brings along for bf16, has no such preference, so that
fp32 products go there (benchmarks/results/train_throughput_cpu.md). It is as exact: fp32 inputs and accumulators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_AVAILABLE = torch.backends.mkldnn.is_available()  # asked for once: a graph that is compiled would break there


class Linear(nn.Linear):
    """`nn.Linear` by way of `linear`, or of what takes its place as `product`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.product = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for x [..., in], weight [out, in], bias [out]."""
    if x.dim() == 2 and _onednn_takes(x, weight):
        return _OneDnnLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def _onednn_takes(x: Tensor, weight: Tensor) -> bool:
    return (
        _AVAILABLE
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and (torch.compiler.is_compiling() or (x.numel() > 0 and torch.backends.mkldnn.enabled))
    )


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [m, k] times the transpose of b [n, k]; any strides."""
    if torch.compiler.is_compiling():
        return _product_in_a_graph(a, b, bias)
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


# Inductor takes oneDNN's own operator for one of inference, whose weights are constants; this one it calls as it is.
@torch.library.custom_op("esm2::product", mutates_args=())
def _product_in_a_graph(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


@_product_in_a_graph.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weight.t())
        if ctx.needs_input_grad[1]:
            # Both factors are read column-wise here; the wider one is faster as the second.
            wide = weight.shape[0] > weight.shape[1]
            grad_weight = _product(x.t(), grad.t()).t() if wide else _product(grad.t(), x.t())
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias
