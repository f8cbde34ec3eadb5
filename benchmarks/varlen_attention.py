"""Attention of a pack, forward and backward, by each kernel that is here: FA2, FA3, FA4 and cuDNN's varlen path.

    python -m benchmarks.varlen_attention [--output benchmarks/results/varlen_attention.md]

Heads are those of 650M (20 of 64) and of 15B (40 of 128), lengths those of benchmarks.gpu_models' packs, in bf16.
FLOPs: 4 x hidden for each pair of tokens of a sequence forward, 2.5 times that backward. On a CPU it times the CPU's
kernel, which tries the script; no training run uses cuDNN's path.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_models import failure, gpu_name, proteins
from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.compat import cudnn_attention_backward, cudnn_attention_forward
from common.flags import flag, parse_arguments
from common.models.layers.attention import rotated_attention
from common.models.layers.backend import Heads

HEADS = {"650M": Heads(20, 20, 64), "15B": Heads(40, 40, 128)}
KERNELS = ("fa2", "fa3", "fa4", "cudnn")


@dataclass
class Arguments:
    tokens: int = flag(16384, "Tokens in a pack.")
    packs: int = flag(5, "Packs, each of other lengths.")
    rounds: int = flag(5, "Times that each pack is timed.")
    output: str | None = flag(None, "Also write the table there.")


class CudnnAttention(torch.autograd.Function):
    """cuDNN's attention of a pack; its operators have no formula for autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        bounds = cu_seqlens, cu_seqlens, longest, longest
        out, lse, _, _, _, _, seed, offset, _ = cudnn_attention_forward(q, k, v, None, *bounds, True)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, cu_seqlens)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        q, k, v, out, lse, seed, offset, cu_seqlens = ctx.saved_tensors
        bounds = cu_seqlens, cu_seqlens, ctx.longest, ctx.longest
        state = lse, seed, offset, None
        return *cudnn_attention_backward(grad, q, k, v, out, *state, *bounds, 0.0, False), None, None


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    return CudnnAttention.apply(q, k, v, cu_seqlens, longest).flatten(1)


def kernel(name: str, heads: Heads, device: torch.device) -> tuple[str, Callable[..., Tensor]]:
    """What the table calls it, and attention by it. UserError where it is not here."""
    if device.type == "cpu":
        return "the CPU's", rotated_attention
    from extras.flash_attention import choose_kernels

    recorded, _ = choose_kernels("fa2" if name == "cudnn" else name, heads, device, shared=False)
    return ("cuDNN", by_cudnn) if name == "cudnn" else (recorded, rotated_attention)


def seconds(attend: Callable[..., Tensor], heads: Heads, lengths: np.ndarray, device: torch.device) -> float:
    """Of a forward and backward pass over a pack."""
    cu_seqlens = torch.tensor([0, *lengths.cumsum()], dtype=torch.int32, device=device)
    shape = int(lengths.sum()), heads.queries, heads.dim
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn(shape, device=device, dtype=torch.bfloat16).flatten(1)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    torch.autograd.grad(attend(q, k, v, cu_seqlens, int(lengths.max())), (q, k, v), grad)
    wait()
    return time.perf_counter() - started


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packs = [proteins(args.tokens, rng)[0].lengths for rng in map(np.random.default_rng, range(args.packs))]
    lines = [
        "# Attention of a pack by each kernel",
        "",
        f"{gpu_name(device.type)}, {args.tokens:,} tokens a pack, bf16",
    ]
    lines += ["", *where_measured("benchmarks.varlen_attention", "torch"), ""]
    lines += ["| heads of | kernel | ms a layer and pack | TFLOP/s |", "|---|---|--:|--:|"]
    for size, heads in HEADS.items():
        for name in KERNELS if device.type == "cuda" else KERNELS[:1]:
            try:
                called, attend = kernel(name, heads, device)
                timed = [
                    [seconds(attend, heads, lengths, device) for lengths in packs]
                    for _ in range(args.rounds + 1)  # the first compiles
                ]
                mean = statistics.median(sum(each) for each in timed[1:]) / len(packs)
                pairs = statistics.mean(float((lengths.astype(float) ** 2).sum()) for lengths in packs)
                flops = 3.5 * 4 * heads.queries * heads.dim * pairs
                row = f"{called} | {mean * 1e3:.2f} | {flops / mean / 1e12:.3g}"
            except UserError as error:
                row = f"{name}: {error} | | "
            except Exception as error:  # a kernel that refuses a shape leaves the others
                row = f"{name}: {failure(error)} | | "
            lines.append(f"| {size}, {heads.queries} x {heads.dim} | {row} |")
            say(lines[-1])
    publish("\n".join(lines) + "\n", args.output)


if __name__ == "__main__":
    run(main)
