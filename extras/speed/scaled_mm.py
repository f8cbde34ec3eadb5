"""fp8_scaled_mm: FP8 by torch's own scaled matmuls in torch's layers, where emulation has its own.

Current scaling: every operand has one fp32 scale, of its own largest value, as emulation computes it. Casts are plain
operations, which a compiled layer fuses with the norms and GELU around them. A CPU has these matmuls too, to try it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError
from common.distributed.world import World
from common.models.layers.residual import Model
from extras.formats.casts import GRADIENT, INPUT, WEIGHT, tensor_amax
from extras.formats.emulation import set_matmuls
from extras.formats.fp8_current import CurrentScaling
from extras.formats.recipe import Plan, Recipe

Operand = tuple[Tensor, Tensor]  # FP8 [R, C], and the fp32 scalar that its numbers are to be multiplied by


def use_scaled_mm(model: Model, plan: Plan, world: World) -> None:
    """Have the layers of the plan multiply in FP8. UserError where this torch or the run cannot."""
    if not hasattr(F, "scaled_mm"):
        raise UserError(f"--fp8_scaled_mm: torch {torch.__version__} has no scaled_mm: drop the flag, or upgrade")
    if world.cp_size > 1:
        raise UserError("--fp8_scaled_mm: not with --cp_size: a scale is of the whole pack: drop one of the two")

    def matmul_of(recipe: Recipe, layer: int, matmul: int) -> ScaledMatmul:
        assert isinstance(recipe, CurrentScaling)  # the flags allow no other
        return ScaledMatmul(recipe)

    set_matmuls(model, plan, matmul_of)


class ScaledMatmul:
    """Takes the place of `common.models.layers.linear.linear` in a layer."""

    def __init__(self, recipe: CurrentScaling):
        self.recipe = recipe

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            # The weight is cast as it comes: fp32, or gathered in bf16.
            x = x.to(torch.get_autocast_dtype(device))
        fillers = -len(x) % self.recipe.multiple
        y = _ScaledLinear.apply(F.pad(x, (0, 0, 0, fillers)) if fillers else x, weight, self.recipe)
        y = y[: len(x)] if fillers else y
        return y if bias is None else y + bias.to(y.dtype)


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: CurrentScaling) -> Tensor:
        inputs, weights = to_fp8(x, recipe, INPUT), to_fp8(weight, recipe, WEIGHT)
        ctx.save_for_backward(*inputs, *weights)
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        return multiply(inputs, weights, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        values, scale = to_fp8(grad, ctx.recipe, GRADIENT)
        grad_x = multiply((values, scale), (weight.t(), weight_scale), grad.dtype)
        grad_weight = multiply((values.t(), scale), (x.t(), x_scale), torch.float32)
        return grad_x, grad_weight.to(ctx.dtype), None


def to_fp8(x: Tensor, recipe: CurrentScaling, role: int) -> Operand:
    """x in the format that the recipe has for the role, by the scale of extras.formats.casts.fp8_scale."""
    kind = torch.float8_e5m2 if recipe.fp8_format == "hybrid" and role == GRADIENT else torch.float8_e4m3fn
    amax = tensor_amax(x)
    # From finfo: a compiled graph takes floats of our modules for its inputs, which an autograd.Function cannot have.
    largest = torch.finfo(kind).max
    scale = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    if recipe.use_power_2_scales:
        scale = scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0)
    return (x.float() * scale).clamp(-largest, largest).to(kind), scale.reciprocal()


def multiply(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """a [m, k] times the transpose of b [n, k]: [m, n] of `dtype`."""
    (left, left_scale), (right, right_scale) = a, b
    whole = F.ScalingType.TensorWise
    # FP8 tensor cores read both operands along k.
    operands = left.contiguous(), right.contiguous().t()
    return F.scaled_mm(*operands, left_scale, whole, right_scale, whole, output_dtype=dtype)
