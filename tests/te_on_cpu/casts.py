"""Transformer Engine's casts: tensors in its own storages, numbers from tests/precision/format_reference.py.

Layouts are those its Python asks for (`inner_tensor_specs`): numbers as bytes, scales padded as matmuls read them.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.precision import format_reference as formats
from tests.te_on_cpu.contracts import check_cast, check_splits

__all__ = ["create_empty_quantized_tensor", "quantize", "split_quantize"]

TORCH = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
FP8 = {7: (formats.E4M3, torch.float8_e4m3fn), 8: (formats.E5M2, torch.float8_e5m2)}
FP4_BLOCK, MX_BLOCK, FP8_BLOCK = 16, 32, 128
FP4_NUMBERS = torch.tensor([*formats.E2M1, *(-number for number in formats.E2M1)])  # by bit pattern


def torch_dtype(of) -> torch.dtype:
    """Of one of Transformer Engine's numbers for it, or of itself."""
    return of if isinstance(of, torch.dtype) else TORCH[int(of)]


def flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _array(x: Tensor) -> np.ndarray:
    return flat(x.detach()).float().contiguous().numpy()


def _bytes(numbers: np.ndarray, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).to(dtype).view(torch.uint8)


def _largest(x: np.ndarray) -> float:
    """NaN does not count, as for the GPU's fmax."""
    return float(np.fmax.reduce(np.abs(x), axis=None, initial=0.0))


def _around_nan(values: np.ndarray, cast) -> formats.Cast:
    """The kernels' scales do not see a NaN; the number itself stays one."""
    found = cast(np.where(np.isnan(values), np.float32(0), values))
    return formats.Cast(np.where(np.isnan(values), np.nan, found.numbers), found.scales)


def _over_group(amax: float, quantizer) -> float:
    if not getattr(quantizer, "with_amax_reduction", False):
        return amax
    box = torch.tensor(amax)
    dist.all_reduce(box, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    return box.item()


def _per_tensor(x: Tensor, quantizer) -> dict[str, Tensor]:
    values, (numbers, dtype) = _array(x), FP8[int(quantizer.dtype)]
    if hasattr(quantizer, "scale"):  # delayed scaling
        scale = quantizer.scale.item()
        quantizer.amax.fill_(max(quantizer.amax.item(), _largest(values)))
    else:
        amax = max(_over_group(_largest(values), quantizer), quantizer.amax_epsilon)
        scale = formats.fp8_scale(amax, numbers[-1], quantizer.force_pow_2_scales)
    data = _bytes(formats.fp8_tensor(values, scale, numbers), dtype)
    inverse = torch.tensor([float(np.float32(1) / np.float32(scale))])
    return {"_data": data, "_transpose": data.t(), "_scale_inv": inverse}


def _in_blocks(x: Tensor, quantizer) -> dict[str, Tensor]:
    """128 numbers of a row or of a column, or 128 x 128. Scales of rows lie column by column: [C / 128, R]."""
    values, (numbers, dtype) = _array(x), FP8[int(quantizer.dtype)]
    found, square = {}, quantizer.block_scaling_dim == 2
    for side, block in (("rowwise", (1, FP8_BLOCK)), ("columnwise", (FP8_BLOCK, 1))):
        block = (FP8_BLOCK, FP8_BLOCK) if square else block
        power_of_2 = quantizer.force_pow_2_scales
        cast = _around_nan(values, lambda x, b=block: formats.fp8_blocks_cast(x, b, numbers, power_of_2))  # noqa: B023
        data, scales = _bytes(cast.numbers, dtype), torch.from_numpy(cast.scales[:: block[0], :: block[1]].copy())
        by_column = side == "columnwise"
        found[f"_{side}_data"] = data.t() if by_column else data
        found[f"_{side}_scale_inv"] = scales.t() if by_column == square else scales
    return found


def _in_mx_blocks(x: Tensor, quantizer) -> dict[str, Tensor]:
    values, (numbers, dtype) = _array(x), FP8[int(quantizer.dtype)]
    found = {}
    for side, block in (("rowwise", (1, MX_BLOCK)), ("columnwise", (MX_BLOCK, 1))):
        cast = _around_nan(values, lambda x, b=block: formats.mx_cast(x, b, numbers))
        scales = cast.scales[:: block[0], :: block[1]]
        exponents = np.where(np.isnan(scales), 255, np.frexp(scales)[1] + 126)
        found[f"_{side}_data"] = _bytes(cast.numbers, dtype)
        found[f"_{side}_scale_inv"] = torch.from_numpy(exponents.astype(np.uint8))
    return found


def round_stochastically(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """To E2M1, toward zero after 0 to 255 / 256 of the step at `values` were added (the GPU's cvt.rs)."""
    grid = np.array(formats.E2M1)
    size = np.abs(values).astype(np.float64)
    step = np.where(size >= 4, 2.0, np.where(size >= 2, 1.0, 0.5))
    at = np.searchsorted(grid, (size + bits / 256 * step).astype(np.float32), "right") - 1
    return np.copysign(grid[np.minimum(at, len(grid) - 1)], values)


def _in_fp4_blocks(x: Tensor, quantizer) -> dict[str, Tensor]:
    """Of columns: those of the transposed tensor, after Hadamard's transform if that is asked for."""
    values, found = _array(x), {}
    block = (FP4_BLOCK, FP4_BLOCK) if quantizer.with_2d_quantization else (1, FP4_BLOCK)
    for side, part in (("rowwise", values), ("columnwise", values.T)):
        if side == "columnwise" and quantizer.with_rht:
            turned = torch.from_numpy(part.copy()).view(-1, FP4_BLOCK) @ quantizer.rht_matrix.float()
            part = turned.bfloat16().float().view(part.shape).numpy()
        rounded = None
        if quantizer.stochastic_rounding:
            bits = torch.randint(0, 256, part.shape).numpy()  # of torch's generator, as a GPU's are of its
            rounded = lambda values, bits=bits: round_stochastically(values, bits)  # noqa: E731
        cast = _around_nan(part, lambda x, r=rounded: formats.nvfp4_cast(x, block, r)[0])
        codes = np.searchsorted(formats.E2M1, np.nan_to_num(np.abs(cast.numbers), nan=6)) + 8 * np.signbit(part)
        found[f"_{side}_data"] = torch.from_numpy((codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8))
        found[f"_{side}_scale_inv"] = _bytes(cast.scales[:, ::FP4_BLOCK], torch.float8_e4m3fn)
        found[f"_amax_{side}"] = torch.tensor([_largest(part)])
    return found


_CASTS = {
    "Float8Quantizer": _per_tensor,
    "Float8CurrentScalingQuantizer": _per_tensor,
    "Float8BlockQuantizer": _in_blocks,
    "MXFP8Quantizer": _in_mx_blocks,
    "NVFP4Quantizer": _in_fp4_blocks,
}


def create_empty_quantized_tensor(quantizer, shape, dtype, device, pin_memory):
    """A tensor of the quantizer's kind without values, its parts as its own Python describes them."""
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        Float8TensorStorage,
    )

    shape = tuple(shape)
    if isinstance(quantizer, Float8Quantizer):  # which has no description of its own: current scaling's fits
        kind = Float8TensorStorage if quantizer.internal else Float8Tensor
        rest = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}
        specs = Float8CurrentScalingQuantizer.inner_tensor_specs(quantizer, shape)
    else:
        described = quantizer.storage_metadata(dtype)
        kind, rest = described["cls"], dict(described["nontensor_kwargs"])
        rest.pop("fake_dtype")
        specs = quantizer.inner_tensor_specs(shape)
    parts = ((name, argument, specs.get(name)) for name, argument in kind._INNER_TENSORS)
    given = {argument: torch.zeros(spec[0], dtype=spec[1]) if spec else None for _, argument, spec in parts}
    if quantizer.internal:
        return kind(**given, **rest, fake_dtype=dtype)
    return kind(shape=shape, dtype=dtype, **given, **rest, requires_grad=False, device=torch.device("cpu"))


def quantize(tensor: Tensor, quantizer, output=None, noop=None):
    """In a new tensor, or in the parts that `output` has."""
    kind, matrix = type(quantizer).__name__, flat(tensor)
    check_cast(kind, tuple(matrix.shape), tensor.dtype, getattr(quantizer, "with_rht", False))
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, None, False)
    for name, value in _CASTS[kind](tensor, quantizer).items():
        part = getattr(output, name, None)
        if part is None:
            continue
        if part.numel() == value.numel():
            part.copy_(value.reshape(part.shape))
        else:
            part[: value.shape[0], : value.shape[1]] = value
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = output._transpose is None
    return output


def split_quantize(tensor, split_sections, quantizer_list, disable_bulk_allocation=False):
    """A tensor for each section of rows. One without rows is allocated, and sees no cast."""
    check_splits(tensor, split_sections, quantizer_list)
    parts = zip(tensor.split(split_sections), quantizer_list, strict=True)
    return [
        quantize(part, of) if len(part) else create_empty_quantized_tensor(of, part.shape, part.dtype, None, False)
        for part, of in parts
    ]
