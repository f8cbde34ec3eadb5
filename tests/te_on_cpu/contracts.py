"""What shapes and types the kernels behind Transformer Engine take, asserted where they would be launched.

Sources: the checks of its csrc (`checkCuDim`, cast kernels, `hadamard_transform`) and cuBLASLt's manual: leading
dimensions of FP8 and FP4 operands are multiples of 16 bytes. A kernel that gets another shape fails on the GPU, with a
status from cuBLAS that names none of it.
"""

from __future__ import annotations

import torch

MX_BLOCK, FP4_BLOCK = 32, 16


class Refused(RuntimeError):
    """What a kernel would have refused."""


def _require(fits: bool, what: str, shape) -> None:
    if not fits:
        raise Refused(f"{what}, not {tuple(shape)}")


def check_cast(kind: str, shape: tuple[int, int], dtype: torch.dtype, transform: bool = False) -> None:
    """Of a tensor [R, C] that is to be cast by a quantizer of this kind. transform: Hadamard's is asked for."""
    if kind == "MXFP8Quantizer":
        _require(not any(size % MX_BLOCK for size in shape), "MXFP8 casts take multiples of 32", shape)
    if kind == "NVFP4Quantizer":
        _require(not any(size % FP4_BLOCK for size in shape), "NVFP4 casts take multiples of 16", shape)
        if transform and dtype != torch.bfloat16:
            raise Refused(f"NVFP4's Hadamard transform takes bf16, not {dtype}")


def check_splits(tensor: torch.Tensor, sections: list[int], quantizers: list) -> None:
    """Of rows that are to be cast in sections, by a quantizer each (`split_quantize_nvfp4_impl`)."""
    if type(quantizers[0]).__name__ == "NVFP4Quantizer":
        _require(tensor.shape[-1] % 128 == 0, "sections in NVFP4 have rows of multiples of 128", tensor.shape)
        _require(not any(size % 128 for size in sections), "NVFP4 takes sections of multiples of 128", sections)
        if any(of.with_2d_quantization or of.with_amax_reduction for of in quantizers):
            raise Refused("sections in NVFP4 have no squares, nor an amax of several ranks")


def check_operand(kind: str, shape: tuple[int, int], inner: int) -> None:
    """Of an operand [R, C] of a matmul that sums over its dimension `inner` (0 or 1)."""
    if kind.startswith("MXFP8"):
        _require(not any(size % MX_BLOCK for size in shape), "MXFP8 matmuls take multiples of 32", shape)
    elif kind.startswith("NVFP4"):
        _require(shape[inner] % 32 == 0, "NVFP4 matmuls sum over multiples of 32 (16 bytes)", shape)
        _require(shape[1 - inner] % 8 == 0, "NVFP4 matmuls have results of multiples of 8", shape)
    else:
        _require(shape[0] % 8 == 0 and shape[1] % 16 == 0, "FP8 matmuls take multiples of 8 and 16", shape)
