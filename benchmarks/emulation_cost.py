"""What --emulate_precision costs: the training step of each recipe beside the step without, on this machine.

    python -m benchmarks.emulation_cost [--output benchmarks/results/emulation_cost_cpu.md]

One process, one model, the same packed batch of random proteins; rounds are interleaved (all recipes, then all again)
and the median step is reported, with the smallest and the largest. A step is forward, backward, AdamW and, where there
are any, the scales' update. With statistics (--quant_stats) it is the same step, watched: every time, or once in ten.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import statistics
import time
from dataclasses import dataclass
from functools import partial

from benchmarks.measuring import publish, where_measured
from common.cli import UserError, run
from common.flags import flag, parse_arguments
from common.precision import PrecisionFlags

RECIPES = {
    "none": {},
    "FP8 delayed": {"fp8": True},
    "FP8 current": {"fp8": True, "fp8_recipe": "current"},
    "FP8 block": {"fp8": True, "fp8_recipe": "block"},
    "FP8 block, fp32 scales": {
        "fp8": True,
        "fp8_recipe": "block",
        "fp8_recipe_kwargs": '{"use_f32_scales": true}',
    },
    "MXFP8": {"fp8": True, "fp8_recipe": "mxfp8"},
    "NVFP4": {"fp4": True},
}
TEN = range(1, 11)


@dataclass
class Arguments:
    config_name: str = flag("facebook/esm2_t6_8M_UR50D", "The model.")
    tokens: int = flag(4096, "Tokens in a pack.")
    length: int = flag(256, "Tokens in a protein.")
    rounds: int = flag(5, "Steps timed for each recipe, after one that is not.")
    dtypes: str = flag("fp32,bf16", "Which precisions the emulation runs in.")
    watched: str = flag("FP8 delayed;MXFP8;NVFP4", "Recipes whose statistics are timed too, separated by semicolons.")
    output: str | None = flag(None, "Also write the table there.")


EVERY, TENTH = ", every step", ", every 10 steps"


def measure(args: Arguments, dtype: str) -> dict[str, list[float]]:
    """Seconds a step, of every round, of each recipe; for watched ones with statistics too: name + EVERY, + TENTH."""
    import torch

    from common.distributed.process_group import keep_freed_memory
    from common.distributed.world import World
    from common.models.esm2.alphabet import MASK
    from common.models.esm2.config import load_config
    from common.models.esm2.model import build_model
    from extras.formats.emulation import Emulation
    from extras.formats.plan import resolve
    from extras.formats.stats import QuantStats
    from extras.formats.stats_plan import select

    keep_freed_memory()
    config = load_config(args.config_name)
    world = World(0, 0, 1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(4, 24, (args.tokens,), generator=generator)
    labels = torch.where(torch.rand(args.tokens, generator=generator) < 0.15, input_ids, -100)
    batch = {
        "input_ids": input_ids.masked_fill(labels != -100, MASK),
        "labels": labels,
        "cu_seqlens": torch.arange(0, args.tokens + 1, args.length, dtype=torch.int32),
        "max_seqlen": args.length,
    }
    steps = {}
    for name, flags in RECIPES.items():
        model = build_model(config, seed=0)
        flags = PrecisionFlags(**flags)
        plan = resolve(flags, config.num_hidden_layers)
        emulation = Emulation(model, plan, seed=0) if plan else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(model=model, emulation=emulation, optimizer=optimizer, stats=None, number=1) -> float:
            started = time.perf_counter()
            if stats:
                stats.begin_step(number)
            if emulation:
                emulation.begin_pack(0, 0)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = model(**batch).loss_sum
            loss.div(labels.ne(-100).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if emulation:
                emulation.end_step(world, skipped=False)
            if stats:
                stats.end_step()
            return time.perf_counter() - started

        step()
        steps[name] = step
        if name in args.watched.split(";"):
            stats = QuantStats(emulation, select(flags, plan), world)  # its default: every 10 steps
            steps[name + EVERY] = partial(step, stats=stats, number=10)
            steps[name + TENTH] = lambda step=step, stats=stats: sum(step(stats=stats, number=n) for n in TEN) / 10
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    return seconds


def table(args: Arguments, dtype: str, seconds: dict[str, list[float]]) -> list[str]:
    base = statistics.median(seconds["none"])
    rows = ["| recipe | step, s | smallest to largest | times the step without |", "|---|--:|--:|--:|"]
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name in RECIPES:
        low, high = min(seconds[name]), max(seconds[name])
        rows.append(f"| {name} | {medians[name]:.3f} | {low:.3f} to {high:.3f} | {medians[name] / base:.2f} |")
    if watched := [name for name in RECIPES if name + EVERY in seconds]:
        rows += ["", "| statistics, added to the step | every step | every 10 steps |", "|---|--:|--:|"]
        for name in watched:
            added = (f"{medians[name + how] / medians[name] - 1:+.1%}" for how in (EVERY, TENTH))
            rows.append(f"| {name} | {' | '.join(added)} |")
    return [f"### {dtype}", "", *rows, ""]


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    import torch

    for name in filter(None, args.watched.split(";")):
        if name not in RECIPES or not RECIPES[name]:
            raise UserError(f"--watched {name}: no such recipe: choose of {'; '.join(list(RECIPES)[1:])}")
    hardware, command = where_measured("benchmarks.emulation_cost", "torch")
    lines = [
        "# Cost of emulated precision",
        "",
        f"{args.config_name}, packs of {args.tokens} tokens, proteins of {args.length}, median of {args.rounds} "
        f"rounds; {hardware}, {torch.get_num_threads()} threads",
        "",
        command,
        "",
    ]
    for dtype in args.dtypes.split(","):
        lines += table(args, dtype, measure(args, dtype))
    publish("\n".join(lines), args.output)


if __name__ == "__main__":
    run(main)
