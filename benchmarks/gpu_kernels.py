"""The kernels of a step alone, on one GPU: attention by each implementation, the matmuls, and an empty launch.

    python -m benchmarks.gpu_kernels --output table.md                                 on a GPU, in two minutes
    python -m benchmarks.gpu_kernels --device cpu --sizes tiny --tokens 128            tries the script itself

Attention: forward and backward pass over a pack of proteins, bf16, by torch's varlen attention with the kernels that
--attention names, and by cuDNN over a jagged tensor. Matmuls: the four matmuls of a layer, forward and both backward
ones, by cuBLAS and cuBLASLt, with a bf16 and an fp32 result, and in FP8 (`_scaled_mm`, scales of one). Empty: what a
host takes to launch a kernel that does nothing. An implementation that is not here says so in its cell.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_clocks import HEADS, cells, finish, matmul_tflops, watched
from benchmarks.gpu_models import SIZES, check_choices, failure, gpu_name
from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.compat import scaled_mm
from common.flags import Flags, flag, parse_arguments
from common.models.layers.attention import rotated_attention
from common.models.layers.backend import Heads
from extras.plan.step_model.model import typical_pack

JAGGED = "cudnn, jagged"
ATTENTION = ("flash2", "flash3", "flash4", "cudnn", JAGGED)
HEAD_DIMS = (64, 128)
LIBRARIES = {"cuda": ("cublas", "cublaslt"), "cpu": ("",)}
PARTS = ("attention", "matmuls", "launch")
REPEATS, LAUNCHES = 20, 1000


@dataclass
class Arguments(Flags):
    device: str = flag("cuda", "cuda or cpu.")
    sizes: str = flag("650M,3B,15B", f"Whose matmuls: {', '.join(SIZES)}.")
    tokens: int = flag(16384, "Tokens of a pack.")
    parts: str = flag(",".join(PARTS), "Which, in this order.")
    output: str | None = flag(None, "Also write the tables there.")

    def check(self) -> None:
        check_choices(self, self.device, sizes=SIZES, parts=PARTS)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """A call, without the first three."""
    for number in range(repeats + 3):
        if number == 3:
            finish(device)
            started = time.perf_counter()
        call()
    finish(device)
    return 1e3 * (time.perf_counter() - started) / repeats


def cell(call: Callable[[], str]) -> str:
    """Its result, or why there is none."""
    try:
        return call()
    except Exception as error:  # not installed, not on this device: the other cells count
        return failure(error)


# ---- attention -------------------------------------------------------------------------------------------------


def attention_ms(name: str, qkv: list[Tensor], bounds: Tensor, longest: int) -> float:
    """Forward and backward pass. qkv: three of [T, H, D]."""
    device, weights = qkv[0].device, torch.ones_like(qkv[0]).flatten(1)

    def by_flash() -> None:
        torch.autograd.grad(rotated_attention(*qkv, bounds, longest), qkv, weights)

    def by_cudnn() -> None:
        jagged = [torch.nested.nested_tensor_from_jagged(x, bounds).transpose(1, 2) for x in qkv]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*jagged).transpose(1, 2)
        torch.autograd.grad(out.values(), qkv, weights.view_as(out.values()))

    if name == JAGGED:
        return milliseconds(by_cudnn, device)
    if device.type == "cuda":
        from extras.speed.attention_kernels import choose_kernels

        choose_kernels(name, Heads(qkv[0].shape[1], *qkv[1].shape[1:]), device, shared=False)
    elif name != "flash2":  # whose name the CPU's own kernel has here
        raise UserError("no GPU here")
    return milliseconds(by_flash, device)


def attention_lines(args: Arguments) -> Iterator[str]:
    yield f"| heads of | {' | '.join(f'{name}, ms' for name in ATTENTION)} |"
    yield "|--:|" + "--:|" * len(ATTENTION)
    batch, device = typical_pack(args.tokens), torch.device(args.device)
    bounds = batch["cu_seqlens"].to(device)
    for width in HEAD_DIMS:
        shape = len(batch["input_ids"]), 1280 // width, width
        qkv = [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]
        found = [
            cell(lambda name=name, qkv=qkv: f"{attention_ms(name, qkv, bounds, batch['max_seqlen']):.2f}")
            for name in ATTENTION
        ]
        yield f"| {width} | {' | '.join(found)} |"


# ---- matmuls ---------------------------------------------------------------------------------------------------


class Matmul(NamedTuple):
    """[rows, depth] x [depth, columns]; turned: whether the first and the second operand are stored transposed."""

    name: str
    rows: int
    columns: int
    depth: int
    turned: tuple[bool, bool]


def matmuls(size: str, tokens: int) -> Iterator[Matmul]:
    """A layer's: forward, the input's gradient, the weight's [out, wide]."""
    hidden = SIZES[size][1]
    for name, out, wide in (
        ("qkv", 3 * hidden, hidden),
        ("proj", hidden, hidden),
        ("fc1", 4 * hidden, hidden),
        ("fc2", hidden, 4 * hidden),
    ):
        yield Matmul(f"{name}, forward", tokens, out, wide, (False, True))
        yield Matmul(f"{name}, input's gradient", tokens, wide, out, (False, False))
        yield Matmul(f"{name}, weight's gradient", out, wide, tokens, (True, False))


def operand(rows: int, columns: int, turned: bool, device: torch.device) -> Tensor:
    x = torch.randn(*((columns, rows) if turned else (rows, columns)), dtype=torch.bfloat16, device=device)
    return x.t() if turned else x


def matmul_speed(matmul: Matmul, device: torch.device, way: str) -> float:
    """way: bf16, fp32 (bf16 operands, the result in fp32) or fp8, whose operands are always turned alike."""
    m, n, k = matmul.rows, matmul.columns, matmul.depth
    turned = (False, True) if way == "fp8" else matmul.turned
    left, right = operand(m, k, turned[0], device), operand(k, n, turned[1], device)
    call: Callable[[], Tensor] = partial(torch.mm, left, right)
    if way == "fp32":
        call = partial(torch.mm, left, right, out_dtype=torch.float32)
    elif way == "fp8":
        low, one = torch.float8_e4m3fn, torch.ones((), device=device)
        options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        call = partial(scaled_mm, left.to(low), right.to(low), **options)
    return 2 * m * n * k / milliseconds(call, device) / 1e9


def matmul_lines(args: Arguments) -> Iterator[str]:
    libraries, device = LIBRARIES[args.device], torch.device(args.device)
    ways = [(library, way) for library in libraries for way in ("bf16", "fp32")] + [(libraries[-1], "fp8")]
    yield f"| model | matmul | rows x columns x depth | {' | '.join(f'{lib} {way}'.strip() for lib, way in ways)} |"
    yield "|---|---|---|" + "--:|" * len(ways)
    for size in args.sizes.split(","):
        for matmul in matmuls(size, args.tokens):
            found = []
            for library, way in ways:
                if library:
                    torch.backends.cuda.preferred_blas_library(library)
                found.append(cell(lambda way=way, matmul=matmul: f"{matmul_speed(matmul, device, way):.3g}"))
            shape = f"{matmul.rows} x {matmul.columns} x {matmul.depth}"
            yield f"| {size} | {matmul.name} | {shape} | {' | '.join(found)} |"


def launch_lines(args: Arguments) -> Iterator[str]:
    device = torch.device(args.device)
    empty = torch.empty(0, device=device)
    one = torch.zeros(1, device=device)
    yield "| a call of | microseconds |\n|---|--:|"
    for name, call in (("an empty tensor's add_", lambda: empty.add_(1)), ("one number's add_", lambda: one.add_(1))):
        yield f"| {name} | {1e3 * milliseconds(call, device, LAUNCHES):.2f} |"


LINES = {"attention": attention_lines, "matmuls": matmul_lines, "launch": launch_lines}
UNITS = {"attention": "Attention, forward and backward", "matmuls": "Matmuls, TFLOPS", "launch": "Launching"}


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    where, command = where_measured("benchmarks.gpu_kernels", "torch")
    device = torch.device(args.device)
    lines = [f"{gpu_name(args.device)}; {where}; a pack of {args.tokens} tokens, bf16", "", command]
    lines += ["", f"| part | {' | '.join(HEADS)} |", "|---|" + "--:|" * len(HEADS)]
    below: list[str] = []
    for part in args.parts.split(","):
        row = {"matmul_tflops": matmul_tflops(device)}
        below += ["", f"{UNITS[part]}:", ""]
        with watched(device) as clocks:
            for line in LINES[part](args):
                below.append(line)
                say(line)
                if args.output:
                    Path(args.output).write_text("\n".join([*lines, *below]) + "\n")
        lines.append(f"| {part} | {cells(row | clocks)} |")
    publish("\n".join([*lines, *below]) + "\n", args.output)


if __name__ == "__main__":
    run(main)
