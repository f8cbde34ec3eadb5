"""Transformer Engine's stored operands as `Quantized`: what the formats share.

Its storages hold one copy for each dimension that matmuls sum over; scales are padded, and a copy for columns may lie
transposed (`get_scale_shape` and `dequantize` of its tensors say how).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.compat import te_field
from extras.formats.casts import COLUMNS, Block, Quantized


def side_of(tensor: Any, along: int) -> tuple[Any, Any]:
    """(numbers, scales) for matmuls that sum over columns or rows; (None, None) where there is no such copy."""
    side = "rowwise" if along == COLUMNS else "columnwise"
    return te_field(tensor, f"{side}_data"), te_field(tensor, f"{side}_scale_inv")


def stored_whole(tensor: Any) -> Quantized | None:
    """A tensor with one scale: both copies hold the same numbers."""
    if te_field(tensor, "data") is None:
        return None
    numbers = fp8_numbers(te_field(tensor, "data"), te_field(tensor, "fp8_dtype"))
    return Quantized(numbers, te_field(tensor, "scale_inv").float().squeeze())


def fp8_numbers(data: Tensor, dtype: Any, transposed: bool = False) -> Tensor:
    """The numbers of FP8 bytes, fp32 [R, C]."""
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return matrix(data.view(TE_DType_To_Torch[dtype]).float(), transposed)


def matrix(x: Tensor, transposed: bool) -> Tensor:
    """[R, C] of [..., C], or of [C, ...]."""
    return x.flatten(1).t() if transposed else x.flatten(0, -2)


def scaled(numbers: Tensor, decode: Tensor, block: Block, scale: Tensor | None = None) -> Quantized:
    """decode [R / r, C / c] or padded beyond that; scale: of the tensor, default 1."""
    (rows, columns), (r, c) = numbers.shape, block
    decode = decode[: -(-rows // r), : -(-columns // c)]
    values = numbers * decode.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
    scale = torch.ones((), device=numbers.device) if scale is None else scale
    return Quantized(values, scale, decode[:, None, :, None].expand(-1, r, -1, c))
