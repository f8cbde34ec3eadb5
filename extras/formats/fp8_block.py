"""FP8 with a scale for each 128 numbers of a line, and for each 128 x 128 of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.compat import te_field
from extras.formats.casts import (
    COLUMNS,
    E4M3,
    WEIGHT,
    Block,
    Element,
    Quantized,
    block_along,
    block_amax,
    blocked,
    fp8_scale,
    round_to,
    unblocked,
)
from extras.formats.recipe import Recipe
from extras.formats.te_storage import fp8_numbers, scaled, side_of

FP8_BLOCK = 128


@dataclass(frozen=True)
class BlockScaling(Recipe):
    title = "FP8, blocks of 128"
    default_format = "e4m3"
    shard_rows = FP8_BLOCK
    te_class = "Float8BlockScaling"
    te_variables = {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "say --fp8_recipe_kwargs '{\"use_f32_scales\": true}'"}
    stat_name = "fp8_block_scaling"

    use_f32_scales: bool = False

    @property
    def exact_in_bf16(self) -> bool:
        return not self.use_f32_scales

    def quantize(
        self, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
    ) -> Quantized:
        block = block_along(FP8_BLOCK, along, square=role == WEIGHT)
        return quantize_fp8_blocks(x, block, self.element(role), not self.use_f32_scales)

    def stored(self, tensor: Any, along: int) -> Quantized | None:
        data, scales = side_of(tensor, along)
        if data is None:
            return None
        square = te_field(tensor, "is_2D_scaled")
        # Scales of lines lie line after line of blocks; those of squares as the numbers do.
        decode = scales if square == (along == COLUMNS) else scales.t()
        numbers = fp8_numbers(data, te_field(tensor, "fp8_dtype"), transposed=along != COLUMNS)
        return scaled(numbers, decode, block_along(FP8_BLOCK, along, square))

    @property
    def te_power_of_2(self) -> bool:
        return not self.use_f32_scales


def quantize_fp8_blocks(x: Tensor, block: Block, element: Element = E4M3, power_of_2: bool = True) -> Quantized:
    """FP8 with an fp32 factor for each block of x [R, C]; blocks at the rim may be smaller."""
    blocks = blocked(x, block)
    scale = fp8_scale(block_amax(blocks), element, power_of_2=power_of_2)
    decode = scale.reciprocal()
    values = round_to(blocks * scale, element).mul_(decode)
    # Values times powers of two are exact in bf16 too; others stay fp32.
    dtype = x.dtype if power_of_2 else torch.float32
    return Quantized(unblocked(values, x, dtype), torch.ones((), device=x.device), decode.expand_as(blocks))


FORMAT = BlockScaling
