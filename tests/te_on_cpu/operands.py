"""Dequantised values of a tensor, rowwise or columnwise: the operands of matmuls, and the result of `dequantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.te_on_cpu.casts import FP4_BLOCK, FP4_NUMBERS, FP8, FP8_BLOCK, MX_BLOCK, flat, torch_dtype

__all__ = ["dequantize"]


def _over(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def _of_tensor(t, columnwise: bool) -> Tensor:
    dtype = FP8[int(t._fp8_dtype)][1]
    if not columnwise:
        return flat(t._data.view(dtype).float()) * t._scale_inv
    if t._transpose is not None and not t._transpose_invalid:
        data = t._transpose.view(dtype).float()
        return data.reshape(data.shape[0], -1).t() * t._scale_inv
    if torch.cuda.get_device_capability() < (10, 0):
        raise RuntimeError("FP8 matmuls of Hopper take rows of the transposed tensor, and there is none")
    return _of_tensor(t, False)


def _of_blocks(t, columnwise: bool) -> Tensor:
    side = "columnwise" if columnwise else "rowwise"
    data = getattr(t, f"_{side}_data").view(FP8[int(t._fp8_dtype)][1]).float()
    data = data.reshape(data.shape[0], -1).t() if columnwise else flat(data)
    scales, square = getattr(t, f"_{side}_scale_inv"), t._is_2D_scaled
    scales = scales.t() if columnwise == square else scales
    block = (FP8_BLOCK, FP8_BLOCK) if square else ((FP8_BLOCK, 1) if columnwise else (1, FP8_BLOCK))
    return data * _over(scales, block, data.shape)


def _of_mx_blocks(t, columnwise: bool) -> Tensor:
    side, block = ("columnwise", (MX_BLOCK, 1)) if columnwise else ("rowwise", (1, MX_BLOCK))
    data = flat(getattr(t, f"_{side}_data").view(FP8[int(t._fp8_dtype)][1]).float())
    exponents = getattr(t, f"_{side}_scale_inv").int()
    scales = torch.ldexp(torch.ones(()), exponents - 127).masked_fill(exponents == 255, torch.nan)
    return data * _over(scales, block, data.shape)


def _of_fp4_blocks(t, columnwise: bool) -> Tensor:
    side = "columnwise" if columnwise else "rowwise"
    codes = getattr(t, f"_{side}_data")
    data = torch.stack((FP4_NUMBERS[(codes & 15).long()], FP4_NUMBERS[(codes >> 4).long()]), -1).flatten(-2)
    data = data.reshape(-1, data.shape[-1])
    scales = getattr(t, f"_{side}_scale_inv").view(torch.float8_e4m3fn).float()
    of_tensor = getattr(t, f"_amax_{side}") / (448 * 6)
    data = data * _over(scales, (1, FP4_BLOCK), data.shape) * of_tensor
    return data.t() if columnwise else data


_KINDS = {"Float8TensorStorage": _of_tensor, "Float8BlockwiseQTensorStorage": _of_blocks}
_KINDS |= {"MXFP8TensorStorage": _of_mx_blocks, "NVFP4TensorStorage": _of_fp4_blocks}


def kind_of(t) -> str | None:
    """The name of its storage; None of an ordinary tensor."""
    return next((base.__name__ for base in type(t).__mro__ if base.__name__ in _KINDS), None)


def values(t, columnwise: bool) -> Tensor:
    """fp32 [R, C] of a tensor as a matmul reads it: along its rows, or its columns."""
    kind = kind_of(t)
    if kind is None:
        return flat(t.detach().float())
    has = getattr(t, "_data", None) if kind == "Float8TensorStorage" and not columnwise else t
    side = "columnwise" if columnwise else "rowwise"
    if has is None or getattr(t, f"_{side}_data", has) is None:
        raise RuntimeError(f"{kind} has no {side} numbers")
    return _KINDS[kind](t, columnwise)


def dequantize(t, /, otype) -> Tensor:
    rows = getattr(t, "_rowwise_data", getattr(t, "_data", None))
    return values(t, rows is None).to(torch_dtype(otype)).view(t.size())
