"""Where the time of a training step on a GPU goes: kernels by what they do, from torch's profiler.

    python -m benchmarks.gpu_profile --output table.md                                   on a GPU, in two minutes
    python -m benchmarks.gpu_profile --device cpu --size tiny --tokens 1024 --modes torch     tries the script itself

Rows are benchmarks.gpu_throughput's: the train scripts' own runs. Kernels are grouped by name: matmuls (cuBLAS'),
attention, the optimiser and clipping, casts for FP8; the rest is elementwise work, reductions and copies. Idle is the
rest of the wall time, which the profiler itself lengthens.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.dry_run import DDP
from benchmarks.gpu_clocks import HEADS, cells
from benchmarks.gpu_models import KINDS, MAX_LENGTH, SIZES, check_choices, gpu_name, row_flags
from benchmarks.gpu_row import PROFILED, end_rows_with_me, row_of
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
    row_seconds: float = flag(180.0, "Give a row up after this.")
    slowest: int = flag(12, "Kernels listed below the table.")
    output: str | None = flag(None, "Also write the tables there.")

    def check(self) -> None:
        check_choices(self, self.device, size=SIZES, modes=KINDS)
        self.require_at_least(MAX_LENGTH, "tokens")


def group_of(kernel: str) -> str:
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "the rest")


def line_of(title: str, row: dict) -> str:
    """Of the table: milliseconds by group."""
    if "error" in row:
        return f"| {title} | {row['error']} |" + " |" * (len(GROUPS) + 3 + len(HEADS))
    sums = Counter()
    for kernel, (milliseconds, _) in row["kernels"].items():
        sums[group_of(kernel)] += milliseconds
    sums["idle"] = row["step_ms"] - sum(sums.values())
    by_group = " | ".join(f"{sums[group]:.1f}" for group in (*GROUPS, "the rest", "idle"))
    started = sum(times for _, times in row["kernels"].values())
    return f"| {title} | {row['step_ms']:.1f} | {by_group} | {started:.0f} | {cells(row)} |"


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    end_rows_with_me()
    where, command = where_measured("benchmarks.gpu_profile", "torch", "transformers")
    columns = [*GROUPS, "the rest", "idle", "kernels started", *HEADS]
    head = [
        f"{gpu_name(args.device)}; {where}; {args.size}, {args.tokens} tokens a pack; milliseconds a step",
        "",
        command,
        "",
        f"| layers by | a step | {' | '.join(columns)} |",
        "|---|" + "--:|" * (len(columns) + 1),
    ]
    lines, below = [], []
    with tempfile.TemporaryDirectory() as place:
        for mode in args.modes.split(","):
            flags = row_flags(args.size, mode, args.tokens, WARMUP + STEPS, Path(place) / "out", args.device)
            row = row_of(DDP, flags, 1, args.row_seconds, WARMUP, PROFILED)
            lines.append(line_of(KINDS[mode][0], row))
            below += ["", f"{KINDS[mode][0]}: `{row['command']}`", ""]
            below += ["| kernel | group | a step, ms | starts |", "|---|---|--:|--:|"]
            for kernel, (milliseconds, times) in [*row.get("kernels", {}).items()][: args.slowest]:
                short = kernel.replace("|", "/")[:90]
                below.append(f"| `{short}` | {group_of(kernel)} | {milliseconds:.2f} | {times:.0f} |")
            say(lines[-1])
            if args.output:
                Path(args.output).write_text("\n".join([*head, *lines, *below]) + "\n")
    publish("\n".join([*head, *lines, *below]) + "\n", args.output)


if __name__ == "__main__":
    run(main)
