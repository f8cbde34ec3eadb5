"""Encoder matmuls of 8-bit integers on a CPU (W8A8), for --int8.

Each weight [out, in] is rounded to 127 levels either side of zero by a scale of each row, each activation [T, in] by a
scale of each token, found anew for every token. oneDNN multiplies the integers and sums them in int32, exactly. All
else, attention, norms, residual stream and LM head, stays in fp32.

Smoothing (Xiao et al. 2023, "SmoothQuant", arXiv 2211.10438, their alpha 0.5): channels whose activations are large
are made smaller and their weights larger by the same factor, the root of the ratio of both's largest absolute values,
as seen on a sample of the user's proteins. A product is the same; what one channel's range costs the others is less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from common.cli import UserError
from common.compat import onednn_int8_linear, onednn_int8_weight
from common.models.layers.cpu_features import Cpu, onednn_level, this_cpu
from common.models.layers.linear import linear

LEVELS = 127
ROWS = 256  # tokens multiplied at a time: what is between the matmuls of an MLP then stays in the cache
SAMPLE = 4096  # tokens whose activations smoothing is fitted to
# 1.5 x 2^23, at which fp32 numbers are whole: a sum with it is rounded, and its low byte is the code, from 1 to 255.
ROUNDED = float(3 << 22) + 128


def has_int8_matmuls(cpu: Cpu, environment: Mapping[str, str]) -> bool:
    """Whether the CPU multiplies int8 and sums in int32 by an instruction (VNNI, AMX), and oneDNN may use it.

    Without one oneDNN adds pairs of products in int16, which overflow, and is no faster than fp32.
    """
    level = onednn_level(environment)
    if level in ("sse41", "avx", "avx2", "avx512_core"):
        return False
    instructions = {"avx_vnni"} if level.startswith("avx2") else {"avx512_vnni", "avx_vnni", "amx_int8"}
    return not cpu.flags.isdisjoint(instructions)


INT8_MATMULS = torch.backends.mkldnn.is_available() and has_int8_matmuls(this_cpu(), os.environ)


def check_int8(device: torch.device, bf16: bool = False) -> None:
    """UserError where --int8 cannot be had, or would be slower than without it."""
    if bf16:
        raise UserError("--int8 --bf16: one or the other: with --int8 all but the matmuls is in fp32")
    if device.type != "cpu":
        raise UserError("--int8: for CPUs only, and this runs on a GPU: drop it, or add --use_cpu")
    if not INT8_MATMULS and has_int8_matmuls(this_cpu(), {}):
        raise UserError("--int8: ONEDNN_MAX_CPU_ISA (or DNNL_MAX_CPU_ISA) keeps oneDNN from VNNI and AMX: unset it")
    if not INT8_MATMULS:
        raise UserError("--int8: this CPU has no instructions for it (VNNI, AMX) and would be slower: drop it")


class Int8Matmul:
    """x W^T + b in place of `linear`, for x fp32 [..., in] -> fp32 [..., out].

    weight: fp32 [out, in]; smoothing: fp32 [in], what its columns are multiplied by and x's divided by.
    """

    def __init__(self, weight: Tensor, smoothing: Tensor):
        weight = weight * smoothing
        self.divide_by = smoothing.reciprocal()
        self.scale = weight.abs().amax(1).clamp_(min=1e-20) / LEVELS
        codes = (weight / self.scale[:, None]).round_().to(torch.int8)
        self.out_features, self.in_features = weight.shape
        self.codes = onednn_int8_weight(codes, None) if INT8_MATMULS else codes
        self.zeros = torch.zeros(self.out_features, dtype=torch.int32)

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """weight: not looked at."""
        flat, scratch = x.flatten(0, -2), self.scratch()
        out = x.new_empty(len(flat), self.out_features)
        for rows in blocks(len(flat)):
            self.multiply(flat[rows], bias, *scratch, out=out[rows])
        return out.view(*x.shape[:-1], self.out_features)

    def scratch(self) -> tuple[Tensor, Tensor]:
        """Memory for `multiply`, of at most ROWS tokens."""
        return torch.empty(ROWS, self.in_features), torch.empty(ROWS, self.in_features, dtype=torch.uint8)

    def multiply(
        self, x: Tensor, bias: Tensor | None, smooth: Tensor, codes: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """x [n, in] -> [n, out], in `out` if given; n <= ROWS. smooth, codes: of `scratch`."""
        smooth, codes = smooth[: len(x)], codes[: len(x)]
        torch.mul(x, self.divide_by, out=smooth)
        largest = torch.maximum(smooth.amax(1, True), smooth.amin(1, True).neg_()).clamp_(min=1e-20)
        smooth.mul_(LEVELS / largest).add_(ROUNDED)
        codes.copy_(smooth.view(torch.int32))  # the low bytes
        products = self.products(codes)
        out = torch.mul(products, largest.div_(LEVELS), out=products if out is None else out)
        return out if bias is None else out.add_(bias)

    def products(self, codes: Tensor) -> Tensor:
        """(codes - 128) W^T times the weight's scales, fp32 [n, out]."""
        if INT8_MATMULS:
            weight, made = (self.codes, self.scale, self.zeros), (None, 1.0, 0, torch.float32, "none", [], "")
            return onednn_int8_linear(codes, 1.0, 128, *weight, *made)  # no bias, scale 1, nothing done afterwards
        return ((codes.float() - 128) @ self.codes.float().t()).mul_(self.scale)


class Int8MLP:
    """fc2(gelu(fc1(x))), a block of tokens at a time. approximate: GELU's, as of `F.gelu`."""

    def __init__(self, fc1: Int8Matmul, fc2: Int8Matmul, approximate: str):
        self.fc1, self.fc2, self.approximate = fc1, fc2, approximate

    def __call__(self, x: Tensor, _fc1: Tensor, fc1_bias: Tensor, _fc2: Tensor, fc2_bias: Tensor) -> Tensor:
        out, first, second = x.new_empty(len(x), self.fc2.out_features), self.fc1.scratch(), self.fc2.scratch()
        for rows in blocks(len(x)):
            inner = self.fc1.multiply(x[rows], fc1_bias, *first)
            inner = torch.ops.aten.gelu_(inner, approximate=self.approximate)
            self.fc2.multiply(inner, fc2_bias, *second, out=out[rows])
        return out


def blocks(tokens: int) -> Iterator[slice]:
    """All tokens, ROWS at a time."""
    return (slice(begin, begin + ROWS) for begin in range(0, tokens, ROWS))


class Ranges:
    """`linear` that notes the largest absolute value of each of x's columns: `largest`, fp32 [in]."""

    largest = torch.zeros(1)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.largest = torch.maximum(self.largest, x.abs().flatten(0, -2).amax(0))
        return linear(x, weight, bias)


T = TypeVar("T", bound=Sized)
Place = tuple[nn.Module, str, str]  # a module, and its attributes of a matmul and of the weight


def matmuls_of(model: Any) -> Iterator[Place]:
    for layer in model.layers:
        attention, mlp = layer.self_attention, layer.layernorm_mlp
        yield from ((attention.layernorm_qkv, "matmul", "weight"), (attention.proj, "matmul", "weight"))
        yield from ((mlp, "fc1_matmul", "fc1_weight"), (mlp, "fc2_matmul", "fc2_weight"))


def smoothing_of(largest: Tensor, weight: Tensor) -> Tensor:
    """fp32 [in], for the largest absolute activation of each column, and a weight [out, in]; 1 where either is 0."""
    ratio = (largest / weight.abs().amax(0)).sqrt()
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)


def first(items: Iterable[T]) -> Iterator[T]:
    """The first items with a length, until they have SAMPLE together."""
    total = 0
    for item in items:
        yield item
        total += len(item)
        if total >= SAMPLE:
            return


def fit_int8(encoder: Any, sequences: Iterable[np.ndarray]) -> None:
    """Make the matmuls of an `Encoder`'s layers int8 ones, smoothed for the first of these token ids, SAMPLE of them.

    The layers' weights, which nothing needs any more, are given up.
    """
    ranges = [Ranges() for _ in matmuls_of(encoder.model)]
    sample = list(first(sequence[: encoder.flags.max_seq_length] for sequence in sequences))
    for (module, matmul, _), of_input in zip(matmuls_of(encoder.model), ranges, strict=True):
        setattr(module, matmul, of_input)
    encoder.hidden(sample)
    for (module, matmul, name), of_input in zip(matmuls_of(encoder.model), ranges, strict=True):
        weight = getattr(module, name).detach()
        setattr(module, matmul, Int8Matmul(weight, smoothing_of(of_input.largest, weight)))
        getattr(module, name).data = weight.new_empty(0)
    for layer in encoder.model.layers:
        mlp = layer.layernorm_mlp
        if hasattr(mlp, "fused"):
            mlp.fused = Int8MLP(mlp.fc1_matmul, mlp.fc2_matmul, mlp.approximate)


def fit_linears(model: nn.Module, run: Callable[[], object]) -> None:
    """Make the matmuls of all `nn.Linear` in a stock encoder int8 ones, smoothed for what `run` gives them.

    Their weights are given up: none may be tied to others, as a decoder's to the embeddings.
    """
    ranges = {module: Ranges() for module in model.modules() if isinstance(module, nn.Linear)}
    for module, of_input in ranges.items():
        module.forward = partial(_by, of_input, module)
    run()
    for module, of_input in ranges.items():
        weight = module.weight.detach()
        module.forward = partial(_by, Int8Matmul(weight, smoothing_of(of_input.largest, weight)), module)
        module.weight.data = weight.new_empty(0)


def _by(matmul: Callable[..., Tensor], module: nn.Linear, x: Tensor) -> Tensor:
    return matmul(x, module.weight, module.bias)
