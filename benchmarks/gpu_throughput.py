"""Training speed, MFU and memory on one GPU: both backends beside transformers' EsmForMaskedLM, in one run.

    python -m benchmarks.gpu_throughput --output table.md                     on a GPU, in less than ten minutes
    python -m benchmarks.gpu_throughput --device cpu --sizes tiny --tokens 512 --steps 2      tries the script itself

All do the same training steps (forward, backward, clipping, fused AdamW on fp32 weights, bf16 autocast) on the same
generated proteins, whose lengths are distributed as UniRef50's: median about 270, cropped at 1,024. Ours get packs;
the peer gets the same sequences as padded batches (to the longest), of as many positions as packs have tokens, with
scaled-dot-product attention. Speeds are real tokens a second: padding is not counted. MFU is of the dense bf16 peak
(for FP8 too), and counts attention by the sum of squared lengths.

The table and its JSON are written after every row, the most telling sizes come first, and all ends after --minutes.
Rows are made in a process of their own, which is replaced when a row takes too long or leaves its GPU unusable: a row
that fails costs itself only.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_models import (
    KINDS,
    MAX_LENGTH,
    SIZES,
    batches_for,
    check_choices,
    config_of,
    failure,
    gpu_name,
    steps_of,
)
from benchmarks.measuring import publish, say, where_measured
from common.cli import UserError, run
from common.flags import Flags, flag, parse_arguments
from common.models.esm2.family import FAMILY
from common.precision.plan import FP8_RECIPES
from common.training.run_logger import peak_flops, peak_memory_gb

MODES = [kind for kind in KINDS if kind != "emulated"]


@dataclass
class Arguments(Flags):
    device: str = flag("cuda", "cuda or cpu.")
    sizes: str = flag("650M,8M,150M,15B/8,3B", f"Which, in this order: {', '.join(SIZES)}.")
    modes: str = flag(",".join(MODES), "Which rows of each size.")
    tokens: int = flag(16384, "Tokens in a pack; positions in a padded batch.")
    steps: int = flag(8, "Steps timed, after --warmup that are not.")
    warmup: int = flag(3, "Steps before.")
    fp8_recipe: str = flag("delayed", f"Of the FP8 rows: {', '.join(FP8_RECIPES)}.")
    minutes: float = flag(9.0, "End after this.")
    row_seconds: float = flag(120.0, "Give a row up after this.")
    output: str | None = flag(None, "Write the table there, and its rows beside it as .json.")

    def check(self) -> None:
        check_choices(self, self.device, sizes=SIZES, modes=MODES, fp8_recipe=FP8_RECIPES)
        if self.tokens < MAX_LENGTH and self.device == "cuda":
            raise UserError(f"--tokens {self.tokens}: at least one sequence of {MAX_LENGTH}")


def measure(mode: str, size: str, args: Arguments) -> dict:
    """One row: real tokens a second, MFU, peak memory, the last loss, seconds until the first timed step."""
    begun = time.perf_counter()
    device = torch.device(args.device)
    finish: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    config = config_of(mode, size)
    batches = batches_for(mode, args.tokens, args.warmup + args.steps)
    step = steps_of(mode, config, args.device, args.fp8_recipe)
    tokens, flops = 0, 0.0
    for number, batch in enumerate(batches):
        if number == args.warmup:
            finish()
            started = time.perf_counter()
        loss = step(batch)
        if number >= args.warmup:
            tokens += batch["num_tokens"]
            flops += FAMILY.flops(config, *(batch[k] for k in ("num_tokens", "sum_squared_lengths", "num_targets")))
    finish()
    seconds = time.perf_counter() - started
    row = {"tokens_per_second": tokens / seconds, "peak_gb": peak_memory_gb(device), "loss": loss.item()}
    if peak := peak_flops(device, bf16=True):
        row["mfu"] = flops / seconds / peak
    return row | {"preparation_s": started - begun}


def table(args: Arguments, rows: list[dict]) -> str:
    where, command = where_measured("benchmarks.gpu_throughput", "torch", "transformers")
    lines = [
        f"{gpu_name(args.device)}; {where}; {args.tokens} tokens a step, FP8 recipe {args.fp8_recipe}, else BF16",
        "",
        command,
        "",
        "| model | layers by | tokens/s | against the peer | against TE, BF16 | MFU | peak memory, GB | loss |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['size']} | {KINDS[row['mode']]} | {row['error']} | | | | | |")
            continue
        ratios = [
            next((f"{row['tokens_per_second'] / r['tokens_per_second']:.2f} x" for r in rows if _is(r, row, base)), "")
            for base in ("peer", "te")
        ]
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        lines.append(
            f"| {row['size']} | {KINDS[row['mode']]} | {row['tokens_per_second']:,.0f} | {' | '.join(ratios)} | {mfu} "
            f"| {row['peak_gb']:.1f} | {row['loss']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _is(row: dict, like: dict, mode: str) -> bool:
    return row["size"] == like["size"] and row["mode"] == mode and "error" not in row


def make_rows(cases: list[tuple[str, str]], args: Arguments, results) -> None:
    """In the process of the rows: send one row after the other; end after one that may have broken the GPU's state."""
    for size, mode in cases:
        row = {"size": size, "mode": mode}
        try:
            row |= measure(mode, size, args)
        except Exception as error:  # out of memory, a library that does not fit: the other rows count
            row["error"] = failure(error)
        results.send(row)
        if "error" in row and "CUDA" in row["error"]:
            return
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def rows_of(cases: list[tuple[str, str]], args: Arguments, function: Callable = make_rows) -> Iterator[dict]:
    """The rows of the cases, in order, for as long as there is time."""
    context, ends = multiprocessing.get_context("spawn"), time.monotonic() + args.minutes * 60
    while cases and time.monotonic() < ends:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=function, args=(cases, args, sender))
        process.start()
        sender.close()  # so that the end of the process is the end of the pipe
        try:
            while cases:
                limit = min(args.row_seconds, ends - time.monotonic())
                size, mode = cases[0]
                failed = {"size": size, "mode": mode, "error": f"given up after {limit:.0f} s"}
                row = receiver.recv() if receiver.poll(max(limit, 0)) else failed
                cases = cases[1:]
                yield row
                if row is failed:
                    break
        except EOFError:  # the process ended: after a row that said why, or in the midst of one
            process.join()
            if process.exitcode != 0:
                yield {"size": size, "mode": mode, "error": f"its process died ({process.exitcode})"}
                cases = cases[1:]
        finally:
            process.kill()
            process.join()


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    begun, rows = time.monotonic(), []
    cases = [(size, mode) for size in args.sizes.split(",") for mode in args.modes.split(",")]
    for row in rows_of(cases, args):
        rows.append(row)
        say(f"{time.monotonic() - begun:5.0f} s  {json.dumps(row)}")
        if args.output:
            Path(args.output).write_text(table(args, rows))
            Path(args.output).with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    publish(table(args, rows), args.output)


if __name__ == "__main__":
    run(main)
