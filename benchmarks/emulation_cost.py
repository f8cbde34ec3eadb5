"""What --emulate_precision costs: the training step of each recipe beside the step without, on this machine.

    python -m benchmarks.emulation_cost [--output benchmarks/results/emulation_cost_cpu.md]

One process, one model, the same packed batch of random proteins; rounds are interleaved (all recipes, then all again)
and the median step is reported, with the smallest and the largest. A step is forward, backward, AdamW and, where there
are any, the scales' update.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from common.arguments import PrecisionArguments, flag
from common.cli import parse_arguments, run

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


@dataclass
class Arguments:
    config_name: str = flag("facebook/esm2_t6_8M_UR50D", "The model.")
    tokens: int = flag(4096, "Tokens in a pack.")
    length: int = flag(256, "Tokens in a protein.")
    rounds: int = flag(5, "Steps timed for each recipe, after one that is not.")
    dtypes: str = flag("fp32,bf16", "Which precisions the emulation runs in.")
    output: str | None = flag(None, "Also write the table there.")


def measure(args: Arguments, dtype: str) -> dict[str, list[float]]:
    """Seconds of every timed step of each recipe."""
    import torch

    from common.alphabet import MASK
    from common.distributed import World, keep_freed_memory
    from common.esm2 import build_model
    from common.fake_quant import Emulation
    from common.precision_plan import resolve
    from common.presets import load_config

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
        plan = resolve(PrecisionArguments(**flags), config.num_hidden_layers)
        emulation = Emulation(model, plan, seed=0) if plan else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(model=model, emulation=emulation, optimizer=optimizer) -> float:
            started = time.perf_counter()
            if emulation:
                emulation.begin(0, 0)
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = model(**batch).loss_sum
            loss.div(labels.ne(-100).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if emulation:
                emulation.end_step(world)
            return time.perf_counter() - started

        step()
        steps[name] = step
    seconds: dict[str, list[float]] = {name: [] for name in RECIPES}
    for _ in range(args.rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    return seconds


def table(args: Arguments, dtype: str, seconds: dict[str, list[float]]) -> list[str]:
    base = statistics.median(seconds["none"])
    rows = ["| recipe | step, s | smallest to largest | times the step without |", "|---|--:|--:|--:|"]
    for name, times in seconds.items():
        median = statistics.median(times)
        rows.append(f"| {name} | {median:.3f} | {min(times):.3f} to {max(times):.3f} | {median / base:.2f} |")
    return [f"### {dtype}", "", *rows, ""]


def main() -> None:
    (args,) = parse_arguments(__doc__, Arguments)
    import torch

    lines = [
        "# Cost of emulated precision",
        "",
        f"`python -m benchmarks.emulation_cost --tokens {args.tokens} --rounds {args.rounds}`: {args.config_name}, "
        f"packs of {args.tokens} tokens, proteins of {args.length}; {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
    ]
    for dtype in args.dtypes.split(","):
        lines += table(args, dtype, measure(args, dtype))
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run(main)
