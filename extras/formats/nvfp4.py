"""NVFP4: E2M1 numbers with two levels of scales, of 16 numbers and of the tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.compat import te_field
from common.data.counter_rng import GAMMA, MULTIPLIERS
from extras.formats.casts import (
    COLUMNS,
    E2M1,
    E4M3,
    FP32_LARGEST,
    GRADIENT,
    ROWS,
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
from extras.formats.te_storage import matrix, scaled, side_of

NVFP4_BLOCK, HADAMARD_SIZE = 16, 16
# The signs that make Transformer Engine's Hadamard transform "random": fixed ones, the same for every tensor.
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    title = "NVFP4"
    flag = "--fp4"
    capability = BLACKWELL
    multiple = 32
    default_format = "e4m3"  # of the scales
    te_class = "NVFP4BlockScaling"
    te_variables = {
        "NVTE_NVFP4_DISABLE_RHT": "say --fp4_recipe_kwargs '{\"disable_rht\": true}'",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "say --fp4_recipe_kwargs '{\"disable_stochastic_rounding\": true}'",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "say --fp4_recipe_kwargs '{\"disable_2d_quantization\": true}'",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "activations have one scale a tensor",
        "NVTE_NVFP4_4OVER6": "blocks are scaled to 6",
    }
    fp8_params = False
    hides_nan = True  # E2M1 has none: the cast turns it into 6
    stat_feature = "LogNvfp4TensorStats"

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    exact_in_bf16 = True

    def quantize(
        self, x: Tensor, role: int, along: int, key: int = 0, group: dist.ProcessGroup | None = None
    ) -> Quantized:
        square = role == WEIGHT and not self.disable_2d_quantization
        return quantize_nvfp4(
            x, block_along(NVFP4_BLOCK, along, square), key if role == GRADIENT and self.draws else None
        )

    def transform(self, x: Tensor, role: int, along: int) -> Tensor:
        """Both operands of the weights' gradient have the Hadamard transform."""
        return hadamard_rows(x) if not self.disable_rht and along == ROWS and role != WEIGHT else x

    def element(self, role: int) -> Element:
        return E2M1

    @property
    def draws(self) -> bool:
        return not self.disable_stochastic_rounding

    @property
    def full_title(self) -> str:
        return self.title

    def stored(self, tensor: Any, along: int) -> Quantized | None:
        data, scales = side_of(tensor, along)
        if data is None:
            return None
        # Two numbers a byte, the first in its lower half; columns lie as rows. A square's scale stands in all its
        # rows.
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
        table = torch.tensor((*_E2M1, *(-number for number in _E2M1)), device=data.device)
        decode = scales.view(torch.float8_e4m3fn).float()
        amax = te_field(tensor, f"amax_{'rowwise' if along == COLUMNS else 'columnwise'}").float().squeeze()
        return scaled(
            matrix(table[codes], along != COLUMNS),
            decode if along == COLUMNS else decode.t(),
            block_along(NVFP4_BLOCK, along),
            amax / (E4M3.largest * E2M1.largest),
        )


def quantize_nvfp4(x: Tensor, block: Block, key: int | None = None) -> Quantized:
    """E2M1 numbers with an E4M3 scale for each block of x [R, C], (1, 16), (16, 1) or (16, 16), and an fp32 scale.

    key: of the random bits of stochastic rounding; None rounds to nearest.
    """
    blocks = blocked(x, block)
    of_blocks = block_amax(blocks)
    amax = of_blocks.amax()
    encode_tensor = (amax.new_tensor(E4M3.largest * E2M1.largest) / amax).clamp(max=FP32_LARGEST)
    encode_tensor = torch.where((amax == 0) | (encode_tensor == 0), 1.0, encode_tensor)
    decode_tensor = encode_tensor.reciprocal()
    scale = round_to(of_blocks * (encode_tensor * (1 / E2M1.largest)), E4M3)
    encode = (scale * decode_tensor).reciprocal().clamp(max=FP32_LARGEST)
    noise = None if key is None else rounding_noise(key, blocks.numel(), x.device).view(blocks.shape)
    values = round_to(blocks * encode, E2M1, noise).mul_(scale)
    return Quantized(unblocked(values, x, x.dtype), decode_tensor, scale.expand_as(blocks))


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


FORMAT = NVFP4BlockScaling
