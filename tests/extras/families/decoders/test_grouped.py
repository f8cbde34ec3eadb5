"""Matmuls of experts, grouped in one operator, beside float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from common.models.layers.cpu import as_on_a_gpu
from extras.families.decoders.grouped import grouped_linear

COUNTS, INPUTS, OUTPUTS = (5, 0, 16, 1), 24, 40


def run(dtype: torch.dtype, bf16: bool = False) -> list[torch.Tensor]:
    """The result, and gradients of x and the weight, for inputs that bf16 holds."""
    random = torch.Generator().manual_seed(0)
    rows, experts = sum(COUNTS), len(COUNTS)
    shapes = (rows, INPUTS), (experts * OUTPUTS, INPUTS), (rows, OUTPUTS)
    x, weight, grad = (torch.randn(shape, generator=random).bfloat16().to(dtype) for shape in shapes)
    x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        y = grouped_linear(x, weight, torch.tensor(COUNTS))
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, weight.grad]


def by_definition() -> list[torch.Tensor]:
    """An expert at a time, in float64."""
    random = torch.Generator().manual_seed(0)
    rows, experts = sum(COUNTS), len(COUNTS)
    shapes = (rows, INPUTS), (experts * OUTPUTS, INPUTS), (rows, OUTPUTS)
    x, weight, grad = (torch.randn(shape, generator=random).bfloat16().double() for shape in shapes)
    y, of_x, of_weight, begin = torch.zeros(rows, OUTPUTS).double(), torch.zeros_like(x), torch.zeros_like(weight), 0
    for expert, count in enumerate(COUNTS):
        at, own = slice(begin, begin + count), slice(expert * OUTPUTS, (expert + 1) * OUTPUTS)
        y[at], of_x[at], of_weight[own] = x[at] @ weight[own].T, grad[at] @ weight[own], grad[at].T @ x[at]
        begin += count
    return [y, of_x, of_weight]


@pytest.mark.parametrize(
    ("dtype", "bf16", "bound"),
    [(torch.float64, False, 1e-14), (torch.float32, False, 1e-6), (torch.float32, True, 2**-8)],
)
@pytest.mark.parametrize("one_kernel", [False, True])
def test_grouped_linear_equals_float64(dtype, bf16, bound, one_kernel):
    """Also an expert without rows. one_kernel: as on a GPU, where bf16 takes torch's grouped matmul."""
    with as_on_a_gpu() if one_kernel else nullcontext():
        found = run(dtype, bf16)
    for tensor, expected in zip(found, by_definition(), strict=True):
        assert tensor.shape == expected.shape
        assert (tensor.double() - expected).norm() < bound * expected.norm()


def test_grouped_linear_operator_is_sound():
    """What torch.compile relies on: fake results are like real ones, and nothing is changed in place."""
    x, weight = torch.randn(sum(COUNTS), INPUTS), torch.randn(len(COUNTS) * OUTPUTS, INPUTS)
    inputs = (x.requires_grad_(), weight.requires_grad_(), torch.tensor(COUNTS))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.decoders.grouped_linear.default, inputs, test_utils=checks)
