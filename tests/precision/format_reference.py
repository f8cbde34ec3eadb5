"""The number formats by definition, one number at a time: nearest even among the numbers a format can represent.

Written from the specifications (see common/precision/formats.py), not from the code; slow. Scales are computed in fp32
(numpy.float32 scalars), as the specifications of NVFP4 and of Transformer Engine have it; all else in float64.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np


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


def nearest_even(x: float, numbers: list[float]) -> float:
    """Saturating; NaN stays NaN."""
    if math.isnan(x):
        return x
    size = abs(x)
    if size >= numbers[-1]:
        return math.copysign(numbers[-1], x)
    above = bisect_left(numbers, size)
    if numbers[above] == size:
        return x
    below = above - 1
    to_above, to_below = numbers[above] - size, size - numbers[below]
    up = to_above < to_below or (to_above == to_below and above % 2 == 0)
    return math.copysign(numbers[above if up else below], x)


def _over_blocks(x: np.ndarray, block: tuple[int, int], quantize) -> np.ndarray:
    result = np.empty(x.shape, np.float64)
    for r in range(0, x.shape[0], block[0]):
        for c in range(0, x.shape[1], block[1]):
            here = np.s_[r : r + block[0], c : c + block[1]]
            result[here] = quantize(x[here])
    return result


def _each(x: np.ndarray, function) -> np.ndarray:
    return np.array([function(v) for v in x.ravel()], np.float64).reshape(x.shape)


def fp8_tensor(x: np.ndarray, scale: np.float32, numbers: list[float]) -> np.ndarray:
    """x fp32; the dequantised tensor is this times 1 / scale."""
    return _each(x, lambda v: nearest_even(float(np.float32(v) * scale), numbers))


def fp8_scale(amax: float, largest: float, power_of_2: bool) -> np.float32:
    if amax == 0 or not math.isfinite(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(np.float32(largest) / np.float32(amax), np.finfo(np.float32).max)
    return np.float32(2.0 ** (math.frexp(scale)[1] - 1)) if power_of_2 else np.float32(scale)


def fp8_blocks(x: np.ndarray, block: tuple[int, int], numbers: list[float], power_of_2: bool) -> np.ndarray:
    def quantize(part):
        scale = fp8_scale(float(np.abs(part).max()), numbers[-1], power_of_2)
        values = fp8_tensor(part, scale, numbers)
        return (values.astype(np.float32) * (np.float32(1) / scale)).astype(np.float64)

    return _over_blocks(x, block, quantize)


def mx(x: np.ndarray, block: tuple[int, int], numbers: list[float]) -> np.ndarray:
    """The scale: the smallest power of two, 2^-127 to 2^127, at which the block's largest value fits."""

    def quantize(part):
        amax = float(np.abs(part).max())
        if math.isnan(amax):
            return np.full(part.shape, np.nan)
        ratio = float(np.float32(amax) * (np.float32(1) / np.float32(numbers[-1])))
        exponent = next((e for e in range(-127, 128) if 2.0**e >= ratio), 127)
        return _each(part, lambda v: nearest_even(float(v) / 2.0**exponent, numbers) * 2.0**exponent)

    return _over_blocks(x, block, quantize)


def nvfp4(x: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.float32]:
    """(values times block scales, tensor scale)."""
    largest = np.finfo(np.float32).max
    with np.errstate(all="ignore"):
        amax = np.float32(np.abs(x).max())
        encode_tensor = min(np.float32(448 * 6) / amax, largest) if amax > 0 else np.float32(1)
        encode_tensor = np.float32(encode_tensor if encode_tensor > 0 else 1)
        decode_tensor = np.float32(1) / encode_tensor
        sixth = encode_tensor * (np.float32(1) / np.float32(6))

    def quantize(part):
        with np.errstate(all="ignore"):
            scale = np.float32(nearest_even(float(np.float32(np.abs(part).max()) * sixth), E4M3))
            encode = min(np.float32(1) / (scale * decode_tensor), largest)
            return _each(part, lambda v: nearest_even(float(np.float32(v) * encode), E2M1) * float(scale))

    return _over_blocks(x, block, quantize), decode_tensor
