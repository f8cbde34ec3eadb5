"""Matmuls of ESM-2's layers on this CPU: fp32 by MKL and by oneDNN, bf16 by the library and by
common.models.layers.cpu.

    python -m benchmarks.cpu_products [--output benchmarks/results/cpu_products.md]

Every level is a fresh process, with the instructions restricted by the libraries' own variables; a level that the CPU
lacks cannot be enabled. A level's figures are GF/s of forward, input gradient and weight gradient together, on one
thread, of CPU time, the best of the rounds. In brackets: what a training run takes at that level.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import os
import time
from dataclasses import dataclass

from benchmarks.measuring import measured_afresh, say, where_measured, worker_or_table
from common.cli import UserError, run
from common.flags import flag, parse_arguments

AVX512 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"}
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
MKL_AVX2 = {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LEVELS = {
    "this CPU": {},
    "AVX-512 without bf16": AVX512,
    "AVX-512 without bf16, MKL with AVX2": AVX512 | MKL_AVX2,
    "AVX2": AVX2 | MKL_AVX2,
}
HIDDEN = {"8M": 320, "35M": 480, "150M": 640, "650M": 1280}
COLUMNS = {"mkl": "fp32, MKL", "onednn": "fp32, oneDNN", "library": "bf16, library", "ours": "bf16, widened"}


@dataclass
class Arguments:
    sizes: str = flag("8M", f"Of {', '.join(HIDDEN)}.")
    tokens: int = flag(4096, "Rows of the activations.")
    rounds: int = flag(3, "Repetitions of every matmul.")
    output: str | None = flag(None, "Also write the table there.")
    worker: bool = flag(False, "Internal: measure in this process and print JSON.")

    def __post_init__(self) -> None:
        if unknown := set(self.sizes.split(",")) - set(HIDDEN):
            raise UserError(f"--sizes {self.sizes}: no {', '.join(sorted(unknown))}: choose of {', '.join(HIDDEN)}")


def measure(args: Arguments) -> dict:
    """GF/s of each way and size, and which way a training run takes."""
    import torch

    from common.distributed.process_group import keep_freed_memory
    from common.models.layers import cpu
    from common.models.layers.cpu import BF16_MATMULS, FP32_BY_ONEDNN

    keep_freed_memory()
    torch.set_num_threads(1)
    ways = {  # dtype, then the constants of common.models.layers.cpu under which `linear` takes that way
        "mkl": (torch.float32, {"FP32_BY_ONEDNN": False}),
        "onednn": (torch.float32, {"FP32_BY_ONEDNN": True}),
        "library": (torch.bfloat16, {"BF16_MATMULS": True}),
        "ours": (torch.bfloat16, {"BF16_MATMULS": False, "FP32_BY_ONEDNN": FP32_BY_ONEDNN}),
    }
    found = {}
    for size in args.sizes.split(","):
        hidden = HIDDEN[size]
        shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
        seconds = dict.fromkeys(ways, 0.0)
        for outputs, inputs in shapes:
            best = dict.fromkeys(ways, float("inf"))
            for number in range(args.rounds + 1):  # the first is for warmth
                for way, (dtype, constants) in ways.items():
                    vars(cpu).update(constants)
                    x, weight = (torch.randn(n, inputs).to(dtype).requires_grad_() for n in (args.tokens, outputs))
                    upstream = torch.randn(args.tokens, outputs).to(dtype)
                    started = time.process_time()
                    cpu.linear(x, weight, None).backward(upstream)
                    if number:
                        best[way] = min(best[way], time.process_time() - started)
            for way in ways:
                seconds[way] += best[way]
        work = 3 * 2 * args.tokens * sum(a * b for a, b in shapes) / 1e9
        found[size] = {way: work / s for way, s in seconds.items()}
    return {"taken": ["onednn" if FP32_BY_ONEDNN else "mkl", "library" if BF16_MATMULS else "ours"], "speeds": found}


def compare(args: Arguments) -> str:
    hardware, command = where_measured("benchmarks.cpu_products", "torch")
    lines = [
        "# Matmuls of fp32 and bf16 on a CPU",
        "",
        f"{args.tokens} tokens, one thread; in brackets: what a training run takes. {hardware}",
        "",
        command,
        "",
    ]
    lines += ["| instructions | shapes of | " + " | ".join(f"{c}, GF/s" for c in COLUMNS.values()) + " |"]
    lines += ["|---|---|" + "--:|" * len(COLUMNS)]
    flags = {"worker": True} | {name: getattr(args, name) for name in ("sizes", "tokens", "rounds")}
    clean = {k: v for k, v in os.environ.items() if k not in AVX2 | MKL_AVX2}
    for level, environment in LEVELS.items():
        done = measured_afresh("benchmarks.cpu_products", flags, clean | environment, str(environment))
        for size, speeds in done["speeds"].items():
            cells = (f"[{speeds[way]:.0f}]" if way in done["taken"] else f"{speeds[way]:.0f}" for way in COLUMNS)
            lines.append(f"| {level} | {size} | {' | '.join(cells)} |")
            say(lines[-1])
    return "\n".join(lines) + "\n"


def main() -> None:
    worker_or_table(parse_arguments(__doc__, Arguments), measure, compare)


if __name__ == "__main__":
    run(main)
