"""Casts beside Transformer Engine's own reference quantisers, which come with its Python: run by a forked process.

Theirs are written in torch by the authors of the kernels; ours are the stand-in's, in numpy from the definitions, and
the emulation's. References exist for current scaling and for NVFP4. Tensors are [R, C].
"""

from __future__ import annotations

import torch
from torch import Tensor

from extras.formats import casts as formats
from extras.formats import nvfp4
from tests.precision.samples import samples
from tests.te_on_cpu import boot

ODD, IN_BLOCKS = (37, 83), (48, 80)  # NVFP4 takes multiples of 16: three and five blocks
FP8 = {"E4M3": (torch.float8_e4m3fn, formats.E4M3), "E5M2": (torch.float8_e5m2, formats.E5M2)}


def whole_numbers(shape: tuple[int, int]) -> Tensor:
    """From -256 to 256, which bf16 holds, times a power of two a column: no order of 16 of them makes another sum."""
    numbers = torch.randint(-256, 257, shape, generator=torch.Generator().manual_seed(2)).float()
    return numbers * torch.exp2(torch.arange(shape[1]) % 7 - 3)


def differences(ours: Tensor, theirs: Tensor) -> int:
    """How many numbers are not the same; NaN is NaN, -0 is 0 (which the reference of NVFP4 has no -0 of)."""
    ours, theirs = ours.float(), theirs.float()
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return int((~((ours == theirs) | (ours.isnan() & theirs.isnan()))).sum())


def of_current_scaling(x: Tensor, name: str, power_of_2: bool) -> dict[str, int]:
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    dtype, element = FP8[name]
    kind = DType.kFloat8E4M3 if name == "E4M3" else DType.kFloat8E5M2
    theirs = CurrentScalingQuantizerRef(dtype, pow_2_scales=power_of_2).quantize(x)
    stood = Float8CurrentScalingQuantizer(kind, x.device, force_pow_2_scales=power_of_2)(x)
    scale = formats.fp8_scale(formats.tensor_amax(x), element, power_of_2=power_of_2)
    emulated = formats.quantize_tensor(x, scale, element)
    return {
        "stand-in, bits": differences(stood._data, theirs.data.view(torch.uint8)),
        "stand-in, scale": differences(stood._scale_inv, theirs.scale),
        "emulation": differences(emulated.values, theirs.data),
        "emulation, scale": differences(emulated.scale.view(1), theirs.scale),
    }


def of_nvfp4(x: Tensor, square: bool, transform: bool) -> dict[str, int]:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, cast_from_fp4x2
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    block, across = ((16, 16), (16, 16)) if square else ((1, 16), (16, 1))
    columns = x
    if transform:  # in fp32, rounded once: not every CPU's bf16 matmul is
        turn = NVFP4QuantizerRef(Fp4Formats.E2M1, with_rht=True)._apply_rht
        columns = turn(x.t().float().contiguous()).to(x.dtype).t().contiguous()
    stood = NVFP4Quantizer(with_rht=transform, with_post_rht_amax=transform, with_2d_quantization=square)(x)
    emulated = {"rowwise": nvfp4.quantize_nvfp4(x, block)}
    emulated["columnwise"] = nvfp4.quantize_nvfp4(nvfp4.hadamard_rows(x) if transform else x, across)
    found = {}
    for side, given in (("rowwise", x), ("columnwise", columns.t().contiguous())):
        theirs = NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=block).quantize(given)
        numbers, scales = cast_from_fp4x2(theirs.data, torch.float32), theirs.scale.float()
        codes, (rows, blocks) = getattr(stood, f"_{side}_data"), scales.shape
        padded = getattr(stood, f"_{side}_scale_inv").view(torch.float8_e4m3fn)
        values = emulated[side].values if side == "rowwise" else emulated[side].values.t()
        found |= {
            f"stand-in, {side}": differences(cast_from_fp4x2(codes, torch.float32), numbers),
            f"stand-in, scales, {side}": differences(padded[:rows, :blocks], scales),
            f"stand-in, amax, {side}": differences(getattr(stood, f"_amax_{side}"), theirs.global_amax_row),
            f"emulation, {side}": differences(values, numbers * scales.repeat_interleave(16, 1)),
        }
    return found


def compare(path: str) -> None:
    """Write {case: {what: numbers that differ}}."""
    boot.start((10, 0))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for tensor, x in samples(ODD).items():
            if dtype == torch.bfloat16 and tensor == "subnormal":
                continue  # the reference takes bf16's largest number for a scale beyond fp32, the kernel fp32's
            for case in ((name, power_of_2) for name in FP8 for power_of_2 in (False, True)):
                found["current", tensor, dtype, *case] = of_current_scaling(x.to(dtype).cuda(), *case)
        infinite = samples(IN_BLOCKS)["normal"]
        infinite[20, 30] = -torch.inf
        for tensor, x in (samples(IN_BLOCKS) | {"infinite": infinite}).items():
            for square in (False, True):
                found["nvfp4", tensor, dtype, square] = of_nvfp4(x.to(dtype).cuda(), square, transform=False)
    for tensor, x in {"whole": whole_numbers(IN_BLOCKS), "zeros": torch.zeros(IN_BLOCKS)}.items():
        found["nvfp4, transform", tensor] = of_nvfp4(x.bfloat16().cuda(), square=False, transform=True)
    torch.save(found, path)
