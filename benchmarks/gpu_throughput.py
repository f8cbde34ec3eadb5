"""Training speed, MFU and memory on GPUs: the train scripts' own runs, and transformers' EsmForMaskedLM in their loop.

    python -m benchmarks.gpu_throughput --output table.md                     on a GPU, in less than ten minutes
    python -m benchmarks.gpu_throughput --device cpu --sizes tiny --modes torch,peer --tokens 1024 --steps 2
                                                                              tries the script itself

Each row is a command that can be typed (below the table), without its checkpoints and log: benchmarks.gpu_row. Ours
get packs; the peer the same proteins in padded batches of as many positions as packs have tokens. Speeds are real
tokens a second: padding is not counted. MFU is of the dense bf16 peak (for FP8 too), and counts attention by the sum
of squared lengths. A size whose packs do not fit gets FSDP2 where there are several GPUs, else the pack that fits, by
the dry run. Before each row one fixed matmul is timed; beside it stand clocks, power and temperature of its steps.

The table and its JSON are written after every row, the most telling sizes come first, and all ends after --minutes.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.dry_run import DDP, FSDP2
from benchmarks.gpu_clocks import HEADS, cells
from benchmarks.gpu_models import (
    KINDS,
    MAX_LENGTH,
    SIZES,
    check_choices,
    failure,
    gpu_name,
    row_flags,
    that_fits,
)
from benchmarks.gpu_row import end_rows_with_me, row_of
from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments
from extras.plan.dry_run.dry_run import GIB


@dataclass
class Arguments(Flags):
    device: str = flag("cuda", "cuda or cpu.")
    sizes: str = flag("650M,8M,150M,15B/8,3B", f"Which, in this order: {', '.join(SIZES)}.")
    modes: str = flag(",".join(KINDS), "Which rows of each size.")
    tokens: int = flag(16384, "Most tokens in a pack; positions in a padded batch.")
    steps: int = flag(8, "Steps timed, after --warmup that are not.")
    warmup: int = flag(3, "Steps before.")
    gpus: int | None = flag(None, "GPUs of a run that does not fit one. Default: all.")
    fsdp2: bool = flag(False, "All rows by train_fsdp2.py, on one GPU too.")
    device_memory: float | None = flag(None, "GiB of a GPU, for the dry run. Default: what it has.")
    minutes: float = flag(9.0, "End after this.")
    row_seconds: float = flag(180.0, "Give a row up after this.")
    output: str | None = flag(None, "Write the table there, and its rows beside it as .json.")

    def check(self) -> None:
        check_choices(self, self.device, sizes=SIZES, modes=KINDS)
        self.require_at_least(MAX_LENGTH, "tokens")
        self.require_at_least(1, "steps", "warmup")


def rows_of(args: Arguments, place: Path) -> Iterator[dict]:
    """The rows, in order, for as long as there is time."""
    ends = time.monotonic() + args.minutes * 60
    on_gpu = args.device == "cuda"
    gpus = args.gpus or (torch.cuda.device_count() if on_gpu else 1)
    memory = args.device_memory or (torch.cuda.get_device_properties(0).total_memory / GIB if on_gpu else None)
    scripts = (FSDP2,) if args.fsdp2 else (DDP, FSDP2)[: 1 + (gpus > 1)]
    for size in args.sizes.split(","):
        try:
            script, tokens = (
                that_fits(size, args.tokens, scripts, gpus, memory) if memory else (scripts[0], args.tokens)
            )
        except UserError as error:
            yield {"size": size, "mode": "torch", "error": failure(error)}
            continue
        for mode in args.modes.split(","):
            seconds = min(args.row_seconds, ends - time.monotonic())
            if seconds <= 0:
                return
            flags = row_flags(size, mode, tokens, args.warmup + args.steps, place, args.device)
            used = 1 if script == DDP else gpus
            row = row_of(script, flags, used, seconds, args.warmup)
            yield {"size": size, "mode": mode, "gpus": used, "tokens": tokens} | row


def table(args: Arguments, rows: list[dict]) -> str:
    where, command = where_measured("benchmarks.gpu_throughput", "torch", "transformers")
    lines = [
        f"{gpu_name(args.device)}; {where}; BF16 but where FP8 is said",
        "",
        command,
        "",
        "| model | layers by | attention | tokens a pack | tokens/s | against the peer | against TE, BF16 | MFU "
        f"| peak memory, GB | loss | {' | '.join(HEADS)} |",
        "|---|---|---|" + "--:|" * (7 + len(HEADS)),
    ]
    for row in rows:
        name = f"{row['size']} | {KINDS[row['mode']][0]}"
        if "error" in row:
            lines.append(f"| {name} | {row['error']} |" + " |" * (7 + len(HEADS)))
            continue
        ratios = [
            next((f"{row['tokens_per_second'] / r['tokens_per_second']:.2f} x" for r in rows if _is(r, row, base)), "")
            for base in ("peer", "te")
        ]
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        lines.append(
            f"| {name} | {row['attention']} | {row['tokens']:,} | {row['tokens_per_second']:,.0f} "
            f"| {' | '.join(ratios)} | {mfu} | {row['peak_gb']:.1f} | {row['loss']:.3f} | {cells(row)} |"
        )
    lines += ["", "Rows, as commands:", "", "```sh", *(row["command"] for row in rows if "command" in row), "```"]
    return "\n".join(lines) + "\n"


def _is(row: dict, like: dict, mode: str) -> bool:
    return row["size"] == like["size"] and row["mode"] == mode and "error" not in row


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    end_rows_with_me()
    begun, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as place:
        for row in rows_of(args, Path(place) / "out"):
            rows.append(row)
            say(f"{time.monotonic() - begun:5.0f} s  {json.dumps(row)}")
            if args.output:
                Path(args.output).write_text(table(args, rows))
                Path(args.output).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    publish(table(args, rows), args.output)


if __name__ == "__main__":
    run(main)
