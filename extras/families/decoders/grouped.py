"""Matmuls of the rows of each expert with its matrix, as one operator: its shapes follow from those of its inputs.

So a compiled layer with experts is one graph, whatever the router chooses. On a GPU bf16 takes torch's grouped matmul
(`F.grouped_mm`, which reads the counts on the device; no GPU has run it here); all else an expert at a time.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.layers.compiling import OPERATORS
from common.models.layers.cpu import device_type
from common.models.layers.linear import gradients, linear

OPERATORS.append(sys.modules[__name__])
ALIGNED = 8  # bf16 numbers in 16 bytes: what rows of grouped_mm's operands are multiples of


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [A, in], rows sorted by expert, weight [experts * out, in], counts int64 [experts] that sum to A -> [A, out].

    Row a of expert e is x[a] times the transpose of weight[e * out : (e + 1) * out]. By autocast's rules where that
    is on. An expert may have no rows: its gradient is 0.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
    return _grouped(x, weight, counts)


# Inputs have their dtype already: inside, autocast would round fp32 operands, and those of the backward pass.
@torch.library.custom_op("decoders::grouped_linear", mutates_args=())
def _grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        if _by_one_kernel(x, weight, counts):
            return F.grouped_mm(x, _by_expert(weight, counts).transpose(1, 2), offs=_ends(counts))
        pairs = zip(x.split(counts.tolist()), weight.chunk(len(counts)), strict=True)
        return torch.cat([linear(rows, matrix) for rows, matrix in pairs])


@_grouped.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // counts.shape[0])


@torch.library.custom_op("decoders::grouped_linear_backward", mutates_args=())
def _grouped_backward(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        if _by_one_kernel(x, weight, counts):
            ends = _ends(counts)
            grad_x = F.grouped_mm(grad, _by_expert(weight, counts), offs=ends)
            return grad_x, F.grouped_mm(grad.t(), x, offs=ends).view(weight.shape)
        sizes = counts.tolist()
        parts = zip(grad.split(sizes), x.split(sizes), weight.chunk(len(sizes)), strict=True)
        of_rows, of_matrices = zip(*(gradients(*part) for part in parts), strict=True)
        return torch.cat(of_rows), torch.cat(of_matrices)


@_grouped_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad: Tensor):
    return *_grouped_backward(grad.contiguous(), *ctx.saved_tensors), None


_grouped.register_autograd(_differentiate, setup_context=_save)


def _by_one_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> bool:
    aligned = not (x.shape[1] % ALIGNED or weight.shape[0] // len(counts) % ALIGNED)
    return device_type(x) == "cuda" and x.dtype == torch.bfloat16 and aligned


def _by_expert(weight: Tensor, counts: Tensor) -> Tensor:
    return weight.view(len(counts), -1, weight.shape[1])


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).int()
