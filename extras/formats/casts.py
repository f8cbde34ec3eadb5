"""FP8, MXFP8 and NVFP4 in plain PyTorch, on any device: what a recipe stores for an operand of a matmul.

As in Transformer Engine 2.20, blocks lie along the dimension that the matmul sums over, weights are scaled in
squares where the recipe has them, and both operands of the weights' gradient pass NVFP4's Hadamard transform.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.data.counter_rng import GAMMA, MULTIPLIERS
from common.precision.plan import BlockScaling, CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe

# Every `quantize_*` returns `Quantized`: the tensor is values * scale. `values` are numbers of the format times the
# scale of their block, if any, and are exact in bfloat16 (except for blocks with fp32 scales); `scale`
# is the fp32 scale of the whole tensor. So a matmul of two such tensors is the matmul of their values, in any dtype,
# times both scales, as in matrix units.
#
# Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0; NVIDIA, Pretraining
# Large Language Models with NVFP4 (arXiv 2509.25149). Where a specification leaves a choice, it is Transformer
# Engine's (2.20): conversions saturate (infinity too), MX block scales are rounded up so that the largest value fits
# (the specification's example rounds down, and clips), NVFP4's tensor scale maps the largest value to 448 x 6.


class Element(NamedTuple):
    """A format of one number: the largest, bits of the mantissa, and the exponent of the smallest normal one."""

    largest: float
    mantissa_bits: int
    smallest_exponent: int


E4M3, E5M2, E2M1 = Element(448.0, 3, -6), Element(57344.0, 2, -14), Element(6.0, 1, 0)
MX_BLOCK, NVFP4_BLOCK, FP8_BLOCK, HADAMARD_SIZE = 32, 16, 128, 16
FP32_LARGEST = torch.finfo(torch.float32).max
# The signs that make Transformer Engine's Hadamard transform "random": fixed ones, the same for every tensor.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)

Block = tuple[int, int]  # rows, columns that share a scale


class Quantized(NamedTuple):
    """A tensor x [R, C] in a format: it is values * scale."""

    values: Tensor  # [R, C]: stored numbers, times the scale of their block
    scale: Tensor  # fp32 scalar
    block_scale: Tensor | None = None  # fp32, expanded to [R / r, r, C / c, c]: what is in `values` already


def round_to(x: Tensor, element: Element, noise: Tensor | None = None) -> Tensor:
    """x (fp32, contiguous, is overwritten) to the nearest numbers of the format, ties to even; saturating, NaN stays.

    noise: in (-0.5, 0.5), shape of x: instead, up with the probability of x's distance from the number below
    (stochastic rounding).
    """
    x.clamp_(-element.largest, element.largest)
    # Numbers around x are 2^(floor(log2 |x|) - mantissa bits) apart, subnormals as far as the smallest normal. Adding
    # 1.5 * 2^23 times that in fp32 drops all smaller bits: fp32's own rounding, to nearest even, does ours.
    smallest = (127 + element.smallest_exponent) << 23
    power = x.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=smallest).view(torch.float32)
    if noise is not None:
        x.addcmul_(noise, power, value=2.0**-element.mantissa_bits)
    power.mul_(1.5 * 2.0 ** (23 - element.mantissa_bits))
    return x.add_(power).sub_(power)


# ---- one scale a tensor: FP8 with delayed or current scaling -----------------------------------------------------


def tensor_amax(x: Tensor) -> Tensor:
    """fp32 scalar: the largest absolute value. Two reductions, no copy of x."""
    low, high = x.aminmax()
    return torch.maximum(-low, high).float()


def fp8_scale(amax: Tensor, element: Element, previous: Tensor | float = 1.0, power_of_2: bool = False) -> Tensor:
    """fp32 factors that take amax (any shape) to the largest number of the format. `previous` where there is none:
    amax is 0 or not finite."""
    scale = (amax.new_tensor(element.largest) / amax).clamp(max=FP32_LARGEST)
    if power_of_2:
        scale = scale.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, previous)


def quantize_tensor(x: Tensor, scale: Tensor, element: Element) -> Quantized:
    """FP8 with one fp32 factor `scale` for all of x [R, C]."""
    values = round_to(x.float() * scale, element).to(x.dtype)
    return Quantized(values, scale.reciprocal())


# ---- one scale a block: FP8 128 x 128 or 1 x 128, and MXFP8 ------------------------------------------------------


def quantize_fp8_blocks(x: Tensor, block: Block, element: Element = E4M3, power_of_2: bool = True) -> Quantized:
    """FP8 with an fp32 factor for each block of x [R, C]; blocks at the rim may be smaller."""
    blocks = blocked(x, block)
    scale = fp8_scale(_block_amax(blocks), element, power_of_2=power_of_2)
    decode = scale.reciprocal()
    values = round_to(blocks * scale, element).mul_(decode)
    # Values times powers of two are exact in bf16 too; others stay fp32.
    dtype = x.dtype if power_of_2 else torch.float32
    return Quantized(_unblocked(values, x, dtype), torch.ones((), device=x.device), decode.expand_as(blocks))


def quantize_mx(x: Tensor, block: Block, element: Element = E4M3) -> Quantized:
    """MXFP8: an E8M0 scale (a power of two) for each block of x [R, C]: (1, 32) or (32, 1), along the contraction."""
    blocks = blocked(x, block)
    ratio = _block_amax(blocks).mul_(1 / element.largest)
    bits = ratio.view(torch.int32)
    # The exponent of the power of two at or above: any bit of the mantissa carries. 2^-127 is half a step into fp32's
    # subnormals; infinity takes the largest scale, NaN stays.
    exponent = ((bits + 0x7FFFFF) >> 23).masked_fill_(bits <= 0x400000, 0).clamp_(max=254)
    encode = exponent_value(254 - exponent).masked_fill_(ratio.isnan(), torch.nan)
    decode = exponent_value(exponent)
    values = round_to(blocks * encode, element).mul_(decode)
    return Quantized(_unblocked(values, x, x.dtype), torch.ones((), device=x.device), decode.expand_as(blocks))


def exponent_value(biased: Tensor) -> Tensor:
    """An E8M0 scale: 2^(biased - 127) as fp32, for int32 in 0..254."""
    return (biased << 23).masked_fill_(biased == 0, 0x400000).view(torch.float32)


# ---- two levels of scales: NVFP4 ---------------------------------------------------------------------------------


def quantize_nvfp4(x: Tensor, block: Block, key: int | None = None) -> Quantized:
    """E2M1 numbers with an E4M3 scale for each block of x [R, C], (1, 16), (16, 1) or (16, 16), and an fp32 scale.

    key: of the random bits of stochastic rounding; None rounds to nearest.
    """
    blocks = blocked(x, block)
    block_amax = _block_amax(blocks)
    amax = block_amax.amax()
    encode_tensor = (amax.new_tensor(E4M3.largest * E2M1.largest) / amax).clamp(max=FP32_LARGEST)
    encode_tensor = torch.where((amax == 0) | (encode_tensor == 0), 1.0, encode_tensor)
    decode_tensor = encode_tensor.reciprocal()
    scale = round_to(block_amax * (encode_tensor * (1 / E2M1.largest)), E4M3)
    encode = (scale * decode_tensor).reciprocal().clamp(max=FP32_LARGEST)
    noise = None if key is None else rounding_noise(key, blocks.numel(), x.device).view(blocks.shape)
    values = round_to(blocks * encode, E2M1, noise).mul_(scale)
    return Quantized(_unblocked(values, x, x.dtype), decode_tensor, scale.expand_as(blocks))


def rounding_noise(key: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [count] of the 256 numbers (k + 0.5) / 256 - 0.5: eight random bits each, as matrix units use.

    A counter-based hash, `common.data.counter_rng.hash_counters` on the device: eight numbers from each 64 bits.
    """

    def shifted(x: Tensor, bits: int) -> Tensor:  # as unsigned
        return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)

    words = torch.arange(-(-count // 8), device=device)
    words.mul_(_signed(GAMMA)).add_(_signed(key))
    words.bitwise_xor_(shifted(words, 30)).mul_(_signed(MULTIPLIERS[0]))
    words.bitwise_xor_(shifted(words, 27)).mul_(_signed(MULTIPLIERS[1]))
    words.bitwise_xor_(shifted(words, 31))
    return words.view(torch.uint8)[:count].to(torch.float32).add_(-127.5).mul_(1 / 256)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def hadamard_matrix(device: torch.device | str = "cpu") -> Tensor:
    """fp32 [16, 16]: random signs times the Hadamard matrix over 4, orthogonal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < HADAMARD_SIZE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (torch.tensor(HADAMARD_SIGNS)[:, None] * matrix / HADAMARD_SIZE**0.5).to(device)


def hadamard_rows(x: Tensor) -> Tensor:
    """The transform of every 16 rows of x [R, C], R a multiple of 16. Both factors of a matmul whose contraction runs
    over the rows may be transformed: x^T y stays, and outliers are spread over 16 rows before they are quantised."""
    # bf16 widened to fp32 and rounded once: a bf16 matmul, also on a CPU without the instructions.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    matrix = hadamard_matrix(x.device).to(wide.dtype)
    return torch.matmul(matrix.t(), wide.unflatten(0, (-1, HADAMARD_SIZE))).flatten(0, 1).to(x.dtype)


# ---- blocks ------------------------------------------------------------------------------------------------------


def blocked(x: Tensor, block: Block) -> Tensor:
    """x [R, C] as fp32 [R / r, r, C / c, c], zeros added at the end where a block is not full."""
    rows, columns = (-size % step for size, step in zip(x.shape, block, strict=True))
    if rows or columns:
        x = F.pad(x, (0, columns, 0, rows))
    return x.float().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))


def _block_amax(blocks: Tensor) -> Tensor:
    """fp32 [R / r, 1, C / c, 1], a new tensor."""
    return blocks.abs().amax((1, 3), keepdim=True)


def _unblocked(blocks: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    # Contiguous: oneDNN multiplies rows with gaps between them, those of a cut-off rim, a hundred times slower.
    return blocks.flatten(2, 3).flatten(0, 1)[: like.shape[0], : like.shape[1]].contiguous().to(dtype)


INPUT, WEIGHT, GRADIENT = ROLES = range(3)
COLUMNS, ROWS = 1, 0  # the dimension a matmul sums over, that is along which blocks lie


def element_of(recipe: Recipe, role: int) -> Element:
    return E5M2 if recipe.fp8_format == "hybrid" and role == GRADIENT else E4M3


def transformed(recipe: Recipe, x: Tensor, role: int, along: int) -> Tensor:
    """What is cast in place of x: both operands of the weights' gradient have NVFP4's Hadamard transform."""
    turns = isinstance(recipe, NVFP4BlockScaling) and not recipe.disable_rht and along == ROWS and role != WEIGHT
    return hadamard_rows(x) if turns else x


def quantize_operand(
    recipe: Recipe, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
) -> Quantized:
    """x [R, C] for a matmul that sums over its columns or its rows, by a recipe that keeps nothing between steps.

    key: of NVFP4's random bits for gradients; group: the ranks that share a pack, and with it the scale of a tensor.
    """
    element = element_of(recipe, role)
    if isinstance(recipe, NVFP4BlockScaling):
        square = role == WEIGHT and not recipe.disable_2d_quantization
        stochastic = role == GRADIENT and not recipe.disable_stochastic_rounding
        return quantize_nvfp4(x, _block(NVFP4_BLOCK, along, square), key if stochastic else None)
    if isinstance(recipe, MXFP8BlockScaling):
        square = role == WEIGHT and recipe.enable_2d_quantization
        return quantize_mx(x, _block(MX_BLOCK, along, square), element)
    if isinstance(recipe, BlockScaling):
        return quantize_fp8_blocks(x, _block(FP8_BLOCK, along, role == WEIGHT), element, not recipe.use_f32_scales)
    assert isinstance(recipe, CurrentScaling)  # delayed scaling keeps its scales
    amax = tensor_amax(x)
    if group is not None and role != WEIGHT:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return quantize_tensor(x, fp8_scale(amax, element, 1.0, recipe.use_power_2_scales), element)


def _block(size: int, along: int, square: bool = False) -> tuple[int, int]:
    return (size, size) if square else (1, size) if along == COLUMNS else (size, 1)
