"""--emulate_precision: a model whose matmuls round as FP8, MXFP8 and NVFP4 hardware does, on any device.

The encoder's four matmuls (qkv, proj, fc1, fc2; the last two of each expert) are replaced; embeddings, norms, router,
attention and LM head are not. Each operand is quantised as its recipe has Transformer Engine do it: in the forward
pass x W^T, in the backward pass dy W and dy^T x, in blocks along the dimension that is summed over, from the same
unquantised tensor. The matmul itself is fp32 (or bf16 with --bf16, exact for the operands) with fp32 accumulators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.compat import disable_dynamo
from common.data.counter_rng import ROUNDING, derive_key
from common.distributed.world import World
from common.models.layers.linear import linear
from common.models.layers.residual import Model
from extras.formats.casts import COLUMNS, GRADIENT, INPUT, ROLES, ROWS, WEIGHT, Quantized
from extras.formats.master_weights import with_weights
from extras.formats.recipe import Plan, Recipe

Factor = tuple[Tensor, Tensor]  # values, scale: see extras.formats.casts


class Watcher(Protocol):
    """Receives every operand and every result (extras.formats.stats)."""

    def operand(
        self, layer: int, matmul: int, role: int, along: int, x: Tensor, cast: Tensor, quantized: Quantized
    ) -> None: ...

    def result(self, layer: int, matmul: int, tensor: str, x: Tensor) -> None: ...


class Emulation:
    """State shared by a model's emulated matmuls: scales, and the key of the random bits.

    ranks: world size; gradients are that many times the global batch's until they are averaged. group: the ranks that
    share this one's packs: a per-tensor scale takes the amax of the whole pack. Blocks are of the rank's own tokens.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        seed: int,
        device: torch.device | str = "cpu",
        ranks: int = 1,
        group: dist.ProcessGroup | None = None,
    ):
        self.plan, self.seed, self.ranks, self.group, self.training = plan, seed, ranks, group, False
        self.key = 0
        # The current pack holds fillers only: how many such packs there are depends on the number of ranks.
        self.empty = False
        self.watcher: Watcher | None = None  # set in steps that log statistics
        self.scales: Any = None  # of a format that keeps them from step to step
        # Of each layer the number of its first matmul, among those of all.
        self.first = list(accumulate(map(count_matmuls, model.layers), initial=0))
        if keeping := next((recipe for recipe in plan if recipe is not None and recipe.keeps_scales), None):
            # For all layers, whatever their format: a checkpoint fits a run with another plan.
            self.scales = keeping.new_scales(self.first[-1], device)
        set_matmuls(model, plan, partial(EmulatedMatmul, self))

    def begin_pack(self, step: int, pack: int, empty: bool = False) -> None:
        """Before the pass over a pack, numbered within the global step: the same random bits on any rank. An empty
        pack does not count for the scales."""
        self.key = derive_key(self.seed, ROUNDING, step, pack)
        self.training, self.empty = True, empty

    def rescale_gradients(self, factor: float) -> None:
        """Nothing to do: histories and scales are in units of the global batch."""

    def nonfinite(self, value: Tensor, weights: Iterable[Tensor]) -> Tensor:
        """value, or NaN if a weight is infinite: the emulated formats keep a NaN, and saturate infinity."""
        return with_weights(value, weights)

    def end_step(self, world: World, skipped: bool) -> None:
        """After the optimiser step, also a skipped one; all ranks together."""
        self.training = self.empty = False
        if self.scales is not None:
            self.scales.end_step(world, skipped)

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors, the same on every rank, that a checkpoint holds and restores in place."""
        return {} if self.scales is None else self.scales.state


def count_matmuls(layer: Any) -> int:
    """How many matrices a layer multiplies by: qkv, proj, and fc1 and fc2 of each expert."""
    return 2 + 2 * getattr(layer.layernorm_mlp, "experts", 1)


def set_matmuls(model: Model, plan: Plan, make: Callable[[Recipe, int, int], Callable[..., Tensor]]) -> None:
    """Replace `linear` in layers that have a recipe. make: (recipe, layer, which of its matmuls) -> the replacement.

    Those are qkv, proj, fc1, fc2; of a layer with experts qkv, proj, fc1 of each expert, fc2 of each.
    """
    for number, (layer, recipe) in enumerate(zip(model.layers, plan, strict=True)):
        if recipe is not None:
            qkv, proj, *rest = (make(recipe, number, matmul) for matmul in range(count_matmuls(layer)))
            layer.self_attention.layernorm_qkv.matmul = qkv
            layer.self_attention.proj.matmul = proj
            mlp, half = layer.layernorm_mlp, len(rest) // 2
            fc1, fc2 = rest[:half], rest[half:]
            by_expert = hasattr(mlp, "experts")
            mlp.fc1_matmul, mlp.fc2_matmul = (ByExpert(fc1), ByExpert(fc2)) if by_expert else (*fc1, *fc2)


class ByExpert:
    """Takes the place of `extras.families.decoders.grouped.grouped_linear`: a matmul for each expert."""

    def __init__(self, matmuls: list[Callable[..., Tensor]]):
        self.matmuls = matmuls

    def __call__(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """x [A, in] sorted by expert, weight [experts * out, in], counts int64 [experts] that sum to A -> [A, out].

        An expert without rows gets one of zeros: all ranks then take part in the amax of its tensors, and its weight's
        counts as in Transformer Engine.
        """
        parts = zip(self.matmuls, x.split(counts.tolist()), weight.chunk(len(self.matmuls)), strict=True)
        return torch.cat([matmul(_some(rows), matrix, None)[: len(rows)] for matmul, rows, matrix in parts])


def _some(rows: Tensor) -> Tensor:
    return rows if len(rows) else rows.new_zeros(1, rows.shape[1])


class EmulatedMatmul:
    """Takes the place of `common.models.layers.linear.linear` in a layer."""

    def __init__(self, emulation: Emulation, recipe: Recipe, layer: int, matmul: int):
        self.emulation, self.recipe = emulation, recipe
        self.layer, self.matmul = layer, matmul

    @disable_dynamo
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            # The weight is quantised as it comes: fp32, or gathered in bf16.
            x = x.to(torch.get_autocast_dtype(device))
        fillers = -len(x) % self.recipe.multiple  # zeros, as hardware needs; ESM-2's packs have them already
        if not fillers:
            return _QuantizedLinear.apply(x, weight, bias, self, self.emulation.key)
        y = _QuantizedLinear.apply(F.pad(x, (0, 0, 0, fillers)), weight, bias, self, self.emulation.key)
        return F.pad(y, (0, 0, 0, -fillers))  # a copy: FSDP2 warns if a layer returns a view

    @property
    def whole_tensor(self) -> bool:
        return self.recipe.whole_tensor

    def quantize(self, x: Tensor, role: int, along: int, dtype: torch.dtype, key: int = 0) -> Factor:
        """x [R, C] as the factor of a matmul in `dtype` that sums over its columns or its rows."""
        cast = self.recipe.transform(x, role, along)
        quantized = self._quantize(cast, role, along, key)
        if self.emulation.watcher:
            self.emulation.watcher.operand(self.layer, self.matmul, role, along, x, cast, quantized)
        return quantized.values.to(dtype) if self.recipe.exact_in_bf16 else quantized.values, quantized.scale

    def _quantize(self, x: Tensor, role: int, along: int, key: int) -> Quantized:
        if not self.recipe.keeps_scales:
            draws = role == GRADIENT and self.recipe.draws
            noise_key = derive_key(key, self.layer, self.matmul, along) if draws else 0
            return self.recipe.quantize(x, role, along, noise_key, self.emulation.group)
        number = (self.emulation.first[self.layer] + self.matmul) * len(ROLES) + role
        ranks = self.emulation.ranks if role == GRADIENT else 1
        return self.emulation.scales.quantize(
            number, x, ranks, counts=self.emulation.training and not self.emulation.empty
        )

    def watch_result(self, tensor: str, x: Tensor) -> None:
        """x: the `output`, `dgrad` or `wgrad` of a matmul."""
        if self.emulation.watcher:
            self.emulation.watcher.result(self.layer, self.matmul, tensor, x)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, matmul: EmulatedMatmul, key: int) -> Tensor:
        ctx.matmul, ctx.key = matmul, key
        quantized = matmul.quantize(x, INPUT, COLUMNS, x.dtype)
        if matmul.whole_tensor:
            ctx.save_for_backward(weight, *quantized)
        else:
            ctx.save_for_backward(weight, x)
        y = _multiply(quantized, matmul.quantize(weight, WEIGHT, COLUMNS, x.dtype), x.dtype, bias)
        matmul.watch_result("output", y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor):  # pyrefly: ignore[bad-override]  # torch passes one gradient an output
        matmul: EmulatedMatmul = ctx.matmul
        key, dtype = ctx.key, grad.dtype
        weight, *saved = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = along_columns = None
        if need_x or matmul.whole_tensor:
            along_columns = matmul.quantize(grad, GRADIENT, COLUMNS, dtype, key)
            if need_x:
                values, scale = matmul.quantize(weight, WEIGHT, ROWS, dtype)
                grad_x = _multiply(along_columns, (values.t(), scale), dtype)
                matmul.watch_result("dgrad", grad_x)
        if need_weight:
            if matmul.whole_tensor and along_columns:
                (rows, row_scale), (values, scale) = along_columns, saved
            else:
                rows, row_scale = matmul.quantize(grad, GRADIENT, ROWS, dtype, key)
                values, scale = matmul.quantize(saved[0], INPUT, ROWS, dtype)
            # Both factors are read column-wise here; the wider one is faster as the second.
            if weight.shape[0] > weight.shape[1]:
                grad_weight = _multiply((values.t(), scale), (rows.t(), row_scale), dtype).t()
            else:
                grad_weight = _multiply((rows.t(), row_scale), (values.t(), scale), dtype)
            matmul.watch_result("wgrad", grad_weight)
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, grad.sum(0) if need_bias else None, None, None


def _multiply(a: Factor, b: Factor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [m, k] times the transpose of b [n, k], both scales applied to the result: [m, n] of `dtype`."""
    (left, left_scale), (right, right_scale) = a, b
    with torch.autocast(left.device.type, enabled=False):
        kind = torch.promote_types(left.dtype, right.dtype)
        # Not in place: selective checkpointing keeps the matmul's result.
        result = linear(left.to(kind), right.to(kind)).float() * (left_scale * right_scale)
        return (result if bias is None else result.add_(bias)).to(dtype)
