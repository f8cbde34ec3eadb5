"""The number formats by definition: nearest even among the numbers that a format can represent.

Written from the specifications (see extras/formats/casts.py), not from the code. Scales are computed in fp32, as
the specifications of NVFP4 and of Transformer Engine have it; all else is exact in float64. Tensors are fp32 [R, C];
blocks are (rows, columns), those at the edges smaller.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

f32 = np.float32
LARGEST = np.finfo(f32).max


def representable(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> list[float]:
    """All finite numbers >= 0 of a binary format, ascending: the position is the bit pattern."""
    numbers = []
    for exponent in range(1 << exponent_bits):
        for mantissa in range(1 << mantissa_bits):
            fraction = mantissa / (1 << mantissa_bits)
            value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            if value <= largest:
                numbers.append(value)
    return numbers


E4M3 = representable(4, 3, 7, 448.0)
E5M2 = representable(5, 2, 15, 57344.0)
E2M1 = representable(2, 1, 1, 6.0)
assert (len(E4M3), len(E5M2)) == (127, 124)
assert E2M1 == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


class Cast(NamedTuple):
    """numbers [R, C]: of the format. scales [R, C]: of each number's block; multiplied, the tensor."""

    numbers: np.ndarray
    scales: np.ndarray


@cache
def _edges(numbers: tuple[float, ...], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """The numbers, and what is above edge i is at least number i + 1: ties go to an even bit pattern."""
    grid = np.array(numbers, dtype)
    middle = (grid[:-1] + grid[1:]) / 2  # exact
    return grid, np.where(np.arange(len(middle)) % 2, np.nextafter(middle, dtype(0)), middle)


def nearest_even(x, numbers: list[float]) -> np.ndarray:
    """Of numbers or arrays. Saturating; NaN stays NaN."""
    x = np.asarray(x)
    grid, edges = _edges(tuple(numbers), f32 if x.dtype == f32 else np.float64)
    return np.where(np.isnan(x), x, np.copysign(grid[np.searchsorted(edges, np.abs(x))], x)).astype(np.float64)


def of_blocks(x: np.ndarray, block: tuple[int, int], function) -> np.ndarray:
    """function(what a block's numbers have, flat, one row a block) -> one number a block; here one for each number."""
    (rows, columns), (r, c) = x.shape, block
    padded = np.zeros((-(-rows // r) * r, -(-columns // c) * c), x.dtype)
    padded[:rows, :columns] = x
    blocks = padded.reshape(len(padded) // r, r, -1, c).swapaxes(1, 2)
    found = function(blocks.reshape(-1, r * c)).reshape(blocks.shape[:2])
    return found.repeat(r, 0).repeat(c, 1)[:rows, :columns]


def largest_of(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Of each number's block, the largest by magnitude; NaN if there is one."""
    return of_blocks(np.abs(x), block, lambda blocks: blocks.max(1))


def fp8_tensor(x: np.ndarray, scale, numbers: list[float]) -> np.ndarray:
    """The dequantised tensor is this times 1 / scale (one number, or one of each number's block)."""
    with np.errstate(all="ignore"):
        return nearest_even(np.asarray(x, f32) * np.asarray(scale, f32), numbers)


def fp8_scale(amax, largest: float, power_of_2: bool) -> np.ndarray:
    """Of numbers or arrays. 1 where nothing follows from the largest: it is 0, infinite or NaN."""
    amax = np.asarray(amax, f32)
    with np.errstate(all="ignore"):
        scale = np.minimum(f32(largest) / amax, LARGEST)
        if power_of_2:
            scale = np.ldexp(f32(0.5), np.frexp(scale)[1]).astype(f32)
    return np.where((amax > 0) & np.isfinite(amax), scale, f32(1)).astype(f32)[()]


def fp8_blocks_cast(x: np.ndarray, block: tuple[int, int], numbers: list[float], power_of_2: bool) -> Cast:
    scale = fp8_scale(largest_of(x, block), numbers[-1], power_of_2)
    return Cast(fp8_tensor(x, scale, numbers), f32(1) / scale)


def fp8_blocks(x: np.ndarray, block: tuple[int, int], numbers: list[float], power_of_2: bool) -> np.ndarray:
    """Dequantised."""
    cast = fp8_blocks_cast(x, block, numbers, power_of_2)
    with np.errstate(all="ignore"):
        return (cast.numbers.astype(f32) * cast.scales).astype(np.float64)


def mx_cast(x: np.ndarray, block: tuple[int, int], numbers: list[float]) -> Cast:
    """The scale: the smallest power of two, 2^-127 to 2^127, at which the block's largest value fits."""
    amax = largest_of(x, block)
    with np.errstate(all="ignore"):
        fraction, exponent = np.frexp((amax * (f32(1) / f32(numbers[-1]))).astype(f32))
        exponent = np.where(fraction == 0, -127, exponent - (fraction == 0.5))
        exponent = np.where(np.isinf(amax), 127, exponent).clip(-127, 127)
        scales = np.where(np.isnan(amax), np.nan, np.ldexp(1.0, exponent))
        return Cast(nearest_even(x.astype(np.float64) / scales, numbers), scales)


def mx(x: np.ndarray, block: tuple[int, int], numbers: list[float]) -> np.ndarray:
    """Dequantised."""
    return np.prod(mx_cast(x, block, numbers), axis=0)


def nvfp4_cast(x: np.ndarray, block: tuple[int, int], rounded=None) -> tuple[Cast, np.float32]:
    """(numbers and block scales, tensor scale). rounded: another way to E2M1 than to the nearest."""
    rounded = rounded or (lambda values: nearest_even(values, E2M1))
    with np.errstate(all="ignore"):
        amax = f32(np.abs(x).max())
        encode_tensor = np.minimum(f32(448 * 6) / amax, LARGEST) if amax > 0 else f32(1)
        encode_tensor = f32(encode_tensor if encode_tensor > 0 else 1)
        decode_tensor = f32(1) / encode_tensor
        sixth = encode_tensor * (f32(1) / f32(6))
        scales = nearest_even(largest_of(x, block).astype(f32) * sixth, E4M3).astype(f32)
        encode = np.minimum(f32(1) / (scales * decode_tensor), LARGEST)
        return Cast(rounded(x.astype(f32) * encode), scales.astype(np.float64)), decode_tensor


def nvfp4(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.float32]:
    """(values times block scales, tensor scale)."""
    cast, scale = nvfp4_cast(x, block)
    return np.prod(cast, axis=0), scale
