"""What Transformer Engine has stored of an operand, as the formats' `Quantized`: numbers, scales of blocks, scale.

Written against Transformer Engine 2.20. Its storages hold one copy for each dimension that products sum over; scales
are padded, and a copy for columns may lie transposed (`get_scale_shape` and `dequantize` of its tensors say how).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from common.precision.formats import E2M1, E4M3, FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK, Block, Quantized, exponent_value
from common.precision.operands import COLUMNS

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


def stored(tensor, along: int) -> Quantized | None:
    """[R, C], stored for products that sum over its columns or its rows; None where there is no such copy."""
    if isinstance(tensor, Float8TensorStorage):  # one scale: both copies hold the same numbers
        if tensor._data is None:
            return None
        return Quantized(_numbers(tensor._data, tensor._fp8_dtype), tensor._scale_inv.float().squeeze())
    side = "rowwise" if along == COLUMNS else "columnwise"
    data, scales = getattr(tensor, f"_{side}_data"), getattr(tensor, f"_{side}_scale_inv")
    if data is None:
        return None
    one = torch.ones((), device=data.device)
    if isinstance(tensor, MXFP8TensorStorage):
        exponents = scales.int()
        decode = exponent_value(exponents.clamp(max=254)).masked_fill(exponents == 255, torch.nan)
        return _scaled(_numbers(data, tensor._fp8_dtype), decode, _line(MX_BLOCK, along), one)
    if isinstance(tensor, Float8BlockwiseQTensorStorage):
        numbers = _numbers(data, tensor._fp8_dtype, transposed=along != COLUMNS)
        # Scales of lines lie line after line of blocks; those of squares as the numbers do.
        decode = scales if tensor._is_2D_scaled == (along == COLUMNS) else scales.t()
        block = (FP8_BLOCK, FP8_BLOCK) if tensor._is_2D_scaled else _line(FP8_BLOCK, along)
        return _scaled(numbers, decode, block, one)
    assert isinstance(tensor, NVFP4TensorStorage), type(tensor)
    # Two numbers a byte, the first in its lower half; columns lie as rows. A square's scale stands in all its rows.
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
    table = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=data.device)
    numbers, decode = _matrix(table[codes], along != COLUMNS), scales.view(torch.float8_e4m3fn).float()
    decode = decode if along == COLUMNS else decode.t()
    amax = getattr(tensor, f"_amax_{side}").float().squeeze()
    return _scaled(numbers, decode, _line(NVFP4_BLOCK, along), amax / (E4M3.largest * E2M1.largest))


def _numbers(data: Tensor, dtype, transposed: bool = False) -> Tensor:
    return _matrix(data.view(TE_DType_To_Torch[dtype]).float(), transposed)


def _matrix(x: Tensor, transposed: bool) -> Tensor:
    """[R, C] of [..., C], or of [C, ...]."""
    return x.flatten(1).t() if transposed else x.flatten(0, -2)


def _line(size: int, along: int) -> Block:
    return (1, size) if along == COLUMNS else (size, 1)


def _scaled(numbers: Tensor, decode: Tensor, block: Block, scale: Tensor) -> Quantized:
    """decode [R / r, C / c] or padded beyond that."""
    (rows, columns), (r, c) = numbers.shape, block
    decode = decode[: -(-rows // r), : -(-columns // c)]
    values = numbers * decode.repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :columns]
    return Quantized(values, scale, decode[:, None, :, None].expand(-1, r, -1, c))
