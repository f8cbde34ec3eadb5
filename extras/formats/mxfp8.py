"""MXFP8: a power of two as the scale of each 32 numbers along the contraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.compat import te_field
from extras.formats.casts import (
    E4M3,
    WEIGHT,
    Block,
    Element,
    Quantized,
    block_along,
    block_amax,
    blocked,
    round_to,
    unblocked,
)
from extras.formats.recipe import BLACKWELL, Recipe
from extras.formats.te_storage import fp8_numbers, scaled, side_of

MX_BLOCK = 32


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    title = "MXFP8"
    capability = BLACKWELL
    multiple = 32
    default_format = "e4m3"
    shard_rows = MX_BLOCK
    te_class = "MXFP8BlockScaling"
    stat_name = "mxfp8"

    enable_2d_quantization: bool = False  # of weights, in squares of 32 x 32
    exact_in_bf16 = True

    def quantize(
        self, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
    ) -> Quantized:
        square = role == WEIGHT and self.enable_2d_quantization
        return quantize_mx(x, block_along(MX_BLOCK, along, square), self.element(role))

    def stored(self, tensor: Any, along: int) -> Quantized | None:
        data, scales = side_of(tensor, along)
        if data is None:
            return None
        exponents = scales.int()
        decode = exponent_value(exponents.clamp(max=254)).masked_fill(exponents == 255, torch.nan)
        return scaled(fp8_numbers(data, te_field(tensor, "fp8_dtype")), decode, block_along(MX_BLOCK, along))


def quantize_mx(x: Tensor, block: Block, element: Element = E4M3) -> Quantized:
    """MXFP8: an E8M0 scale (a power of two) for each block of x [R, C]: (1, 32) or (32, 1), along the contraction."""
    blocks = blocked(x, block)
    ratio = block_amax(blocks).mul_(1 / element.largest)
    bits = ratio.view(torch.int32)
    # The exponent of the power of two at or above: any bit of the mantissa carries. 2^-127 is half a step into fp32's
    # subnormals; infinity takes the largest scale, NaN stays.
    exponent = ((bits + 0x7FFFFF) >> 23).masked_fill_(bits <= 0x400000, 0).clamp_(max=254)
    encode = exponent_value(254 - exponent).masked_fill_(ratio.isnan(), torch.nan)
    decode = exponent_value(exponent)
    values = round_to(blocks * encode, element).mul_(decode)
    return Quantized(unblocked(values, x, x.dtype), torch.ones((), device=x.device), decode.expand_as(blocks))


def exponent_value(biased: Tensor) -> Tensor:
    """An E8M0 scale: 2^(biased - 127) as fp32, for int32 in 0..254."""
    return (biased << 23).masked_fill_(biased == 0, 0x400000).view(torch.float32)


FORMAT = MXFP8BlockScaling
