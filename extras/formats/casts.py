"""What the number formats below bf16 share: elements, rounding, scales of a tensor, blocks; in plain PyTorch, on any
device. Each format's own cast is in its file.

As in Transformer Engine 2.20, blocks lie along the dimension that the matmul sums over.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Every `quantize_*` returns `Quantized`: the tensor is values * scale. `values` are numbers of the format times the
# scale of their block, if any, and are exact in bfloat16 (except for blocks with fp32 scales); `scale`
# is the fp32 scale of the whole tensor. So a matmul of two such tensors is the matmul of their values, in any dtype,
# times both scales, as in matrix units.
#
# Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0; NVIDIA, Pretraining
# Large Language Models with NVFP4 (arXiv 2509.25149). Where a specification leaves a choice, it is Transformer
# Engine's (2.20): conversions saturate (infinity too), MX block scales are rounded up so that the largest value fits
# (the specification's example rounds down, and clips), NVFP4's tensor scale maps the largest value to 448 x 6.


class Element(NamedTuple):
    """A format of one number: the largest, bits of the mantissa, and the exponent of the smallest normal one."""

    largest: float
    mantissa_bits: int
    smallest_exponent: int


E4M3, E5M2, E2M1 = Element(448.0, 3, -6), Element(57344.0, 2, -14), Element(6.0, 1, 0)
FP32_LARGEST = torch.finfo(torch.float32).max

Block = tuple[int, int]  # rows, columns that share a scale


class Quantized(NamedTuple):
    """A tensor x [R, C] in a format: it is values * scale."""

    values: Tensor  # [R, C]: stored numbers, times the scale of their block
    scale: Tensor  # fp32 scalar
    block_scale: Tensor | None = None  # fp32, expanded to [R / r, r, C / c, c]: what is in `values` already


def round_to(x: Tensor, element: Element, noise: Tensor | None = None) -> Tensor:
    """x (fp32, contiguous, is overwritten) to the nearest numbers of the format, ties to even; saturating, NaN stays.

    noise: in (-0.5, 0.5), shape of x: instead, up with the probability of x's distance from the number below
    (stochastic rounding).
    """
    x.clamp_(-element.largest, element.largest)
    # Numbers around x are 2^(floor(log2 |x|) - mantissa bits) apart, subnormals as far as the smallest normal. Adding
    # 1.5 * 2^23 times that in fp32 drops all smaller bits: fp32's own rounding, to nearest even, does ours.
    smallest = (127 + element.smallest_exponent) << 23
    power = x.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=smallest).view(torch.float32)
    if noise is not None:
        x.addcmul_(noise, power, value=2.0**-element.mantissa_bits)
    power.mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
    return x.add_(power).sub_(power)


# ---- one scale a tensor: FP8 with delayed or current scaling -----------------------------------------------------


def tensor_amax(x: Tensor) -> Tensor:
    """fp32 scalar: the largest absolute value. Two reductions, no copy of x."""
    low, high = x.aminmax()
    return torch.maximum(-low, high).float()


def fp8_scale(amax: Tensor, element: Element, previous: Tensor | float = 1.0, power_of_2: bool = False) -> Tensor:
    """fp32 factors that take amax (any shape) to the largest number of the format. `previous` where there is none:
    amax is 0 or not finite."""
    scale = (amax.new_tensor(element.largest) / amax).clamp(max=FP32_LARGEST)
    if power_of_2:
        scale = scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, previous)


def quantize_tensor(x: Tensor, scale: Tensor, element: Element) -> Quantized:
    """FP8 with one fp32 factor `scale` for all of x [R, C]."""
    values = round_to(x.float() * scale, element).to(x.dtype)
    return Quantized(values, scale.reciprocal())


# ---- blocks ------------------------------------------------------------------------------------------------------


def blocked(x: Tensor, block: Block) -> Tensor:
    """x [R, C] as fp32 [R / r, r, C / c, c], zeros added at the end where a block is not full."""
    rows, columns = (-size % step for size, step in zip(x.shape, block, strict=True))
    if rows or columns:
        x = F.pad(x, (0, columns, 0, rows))
    return x.float().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))


def block_amax(blocks: Tensor) -> Tensor:
    """fp32 [R / r, 1, C / c, 1], a new tensor."""
    return blocks.abs().amax((1, 3), keepdim=True)


def unblocked(blocks: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    # Contiguous: oneDNN multiplies rows with gaps between them, those of a cut-off rim, a hundred times slower.
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]].contiguous().to(dtype)


INPUT, WEIGHT, GRADIENT = ROLES = range(3)
COLUMNS, ROWS = 1, 0  # the dimension a matmul sums over, that is along which blocks lie


def block_along(size: int, along: int, square: bool = False) -> Block:
    return (size, size) if square else (1, size) if along == COLUMNS else (size, 1)
