"""Where the time of a training step on a GPU goes: kernels by what they do, from torch's profiler.

    python -m benchmarks.gpu_profile --output table.md                                   on a GPU, in two minutes
    python -m benchmarks.gpu_profile --device cpu --size tiny --tokens 512 --modes torch      tries the script itself

Steps, models and proteins are benchmarks.gpu_throughput's. Kernels are grouped by name: matmuls (cuBLAS'),
attention, the optimiser, clipping of gradients, casts for FP8; the rest is elementwise work, reductions and copies.
Idle is the rest of the wall time, which the profiler itself lengthens.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import gc
import re
import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_models import KINDS, SIZES, batches_for, check_choices, config_of, failure, gpu_name, steps_of
from benchmarks.measuring import publish, say, where_measured
from common.cli import run
from common.flags import Flags, flag, parse_arguments

GROUPS = {
    "attention": r"flash|fmha|sdpa|cudnn.*(attn|mha)",  # whose kernels are made with CUTLASS
    "matmuls": r"gemm|cutlass|nvjet|cublas|splitK|aten::.*mm",
    "optimiser, clipping": r"multi_tensor|adam|foreach",
    "casts to FP8": r"quantize|cast_transpose|fp8|amax|float8",
}
WARMUP, STEPS = 3, 3


@dataclass
class Arguments(Flags):
    device: str = flag("cuda", "cuda or cpu.")
    size: str = flag("650M", f"Which: {', '.join(SIZES)}.")
    modes: str = flag("torch-compiled,te,te-fp8", f"Which: {', '.join(KINDS)}.")
    tokens: int = flag(16384, "Tokens in a pack.")
    fp8_recipe: str = flag("delayed", "Of the FP8 rows.")
    slowest: int = flag(12, "Kernels listed below the table.")
    output: str | None = flag(None, "Also write the tables there.")

    def check(self) -> None:
        check_choices(self, self.device, size=SIZES, modes=KINDS)


def group_of(kernel: str) -> str:
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "the rest")


def measure(mode: str, args: Arguments) -> tuple[float, Counter, Counter]:
    """(wall time of a step in ms; by kernel: ms a step, launches a step)."""
    config = config_of(mode, args.size)
    step = steps_of(mode, config, args.device, args.fp8_recipe)
    batches = batches_for(mode, args.tokens, WARMUP + STEPS)
    for batch in batches[:WARMUP]:
        step(batch)
    on_gpu = args.device == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    if on_gpu:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    with profile(activities=activities) as seen:
        for batch in batches[WARMUP:]:
            step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    spent, started = Counter(), Counter()
    for event in seen.key_averages():
        if event.key.startswith("Optimizer."):
            continue  # the profiler's own mark around the optimiser's kernels
        if event.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU):
            spent[event.key] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3 / STEPS
            started[event.key] += event.count / STEPS
    return seconds * 1e3 / STEPS, spent, started


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    where, command = where_measured("benchmarks.gpu_profile", "torch", "transformers")
    columns = [*GROUPS, "the rest", "idle"]
    lines = [
        f"{gpu_name(args.device)}; {where}; {args.size}, {args.tokens} tokens a step; milliseconds a step",
        "",
        command,
        "",
    ]
    lines += [
        f"| layers by | a step | {' | '.join(columns)} | kernels started |",
        "|---|" + "--:|" * (len(columns) + 2),
    ]
    below = []
    for mode in args.modes.split(","):
        try:
            clock, spent, started = measure(mode, args)
        except Exception as error:  # what is not here, or does not fit: the other rows count
            lines.append(f"| {KINDS[mode]} | {failure(error)} |")
            continue
        finally:
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
        sums = Counter()
        for kernel, milliseconds in spent.items():
            sums[group_of(kernel)] += milliseconds
        sums["idle"] = clock - sum(spent.values())
        cells = " | ".join(f"{sums[column]:.1f}" for column in columns)
        lines.append(f"| {KINDS[mode]} | {clock:.1f} | {cells} | {sum(started.values()):.0f} |")
        below += ["", f"{KINDS[mode]}:", "", "| kernel | group | a step, ms | starts |", "|---|---|--:|--:|"]
        for kernel, milliseconds in spent.most_common(args.slowest):
            short = kernel.replace("|", "/")[:90]
            below.append(f"| `{short}` | {group_of(kernel)} | {milliseconds:.2f} | {started[kernel]:.0f} |")
        say(lines[-1])
    publish("\n".join(lines + below) + "\n", args.output)


if __name__ == "__main__":
    run(main)
