"""What an operand of a product becomes by a recipe: in which blocks, along which dimension, in numbers of which kind.

As Transformer Engine 2.20 has it: blocks lie along the dimension that the product sums over, weights are scaled in
squares where the recipe has them, and both operands of the weights' gradient pass NVFP4's Hadamard transform.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from common.precision.formats import (
    E4M3,
    E5M2,
    FP8_BLOCK,
    MX_BLOCK,
    NVFP4_BLOCK,
    Element,
    Quantized,
    fp8_scale,
    hadamard_rows,
    quantize_fp8_blocks,
    quantize_mx,
    quantize_nvfp4,
    quantize_tensor,
    tensor_amax,
)
from common.precision.plan import BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

INPUT, WEIGHT, GRADIENT = ROLES = range(3)
COLUMNS, ROWS = 1, 0  # the dimension a product sums over, that is along which blocks lie


def element_of(recipe: Recipe, role: int) -> Element:
    return E5M2 if recipe.fp8_format == "hybrid" and role == GRADIENT else E4M3


def transformed(recipe: Recipe, x: Tensor, role: int, along: int) -> Tensor:
    """What is cast in place of x: both operands of the weights' gradient have NVFP4's Hadamard transform."""
    turns = isinstance(recipe, NVFP4BlockScaling) and not recipe.disable_rht and along == ROWS and role != WEIGHT
    return hadamard_rows(x) if turns else x


def quantize_operand(
    recipe: Recipe, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
) -> Quantized:
    """x [R, C] for a product that sums over its columns or its rows, by a recipe that keeps nothing between steps.

    key: of NVFP4's random bits for gradients; group: the ranks that share a pack, and with it the scale of a tensor.
    """
    element = element_of(recipe, role)
    if isinstance(recipe, NVFP4BlockScaling):
        square = role == WEIGHT and not recipe.disable_2d_quantization
        stochastic = role == GRADIENT and not recipe.disable_stochastic_rounding
        return quantize_nvfp4(x, _block(NVFP4_BLOCK, along, square), key if stochastic else None)
    if isinstance(recipe, MXFP8BlockScaling):
        square = role == WEIGHT and recipe.enable_2d_quantization
        return quantize_mx(x, _block(MX_BLOCK, along, square), element)
    if isinstance(recipe, BlockScaling):
        return quantize_fp8_blocks(x, _block(FP8_BLOCK, along, role == WEIGHT), element, not recipe.use_f32_scales)
    amax = tensor_amax(x)
    if group is not None and role != WEIGHT:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return quantize_tensor(x, fp8_scale(amax, element, 1.0, recipe.use_power_2_scales), element)


def _block(size: int, along: int, square: bool = False) -> tuple[int, int]:
    return (size, size) if square else (1, size) if along == COLUMNS else (size, 1)
