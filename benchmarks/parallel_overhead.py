"""What sharding and checkpoints cost: DDP, FSDP2 and, on two GPUs, Megatron-FSDP beside a single process that does the
same tokens.

    python -m benchmarks.parallel_overhead --dataset_dir processed/arrow [--output table.md]

Every run is a train script as a user starts it, with the same global batch (two packs a step) on the same cores: one
process with all of them, or two ranks with half each. Its own metrics.jsonl is read. A checkpoint's stall is the time
that training stood still for it, the last one's left out: that one is waited for anyway. Rounds are interleaved and
medians reported.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import PreparedFlags, completed, publish, say, spread, torchrun, where_measured, words
from common.cli import run
from common.flags import flag, parse_arguments

LAYOUTS = {  # script, ranks, flags
    "single process": ("train_ddp.py", 1, ()),
    "DDP x 2": ("train_ddp.py", 2, ()),
    "FSDP2 x 2, grad_op": ("train_fsdp2.py", 2, ("--sharding_strategy", "grad_op")),
    "FSDP2 x 2, full": ("train_fsdp2.py", 2, ()),
}
ON_GPUS = {  # alone
    "Megatron-FSDP x 2, no_shard": ("train_mfsdp.py", 2, ("--zero_dp_strategy", "no_shard")),
    "Megatron-FSDP x 2, optim": ("train_mfsdp.py", 2, ("--zero_dp_strategy", "optim")),
    "Megatron-FSDP x 2, optim_grads": ("train_mfsdp.py", 2, ("--zero_dp_strategy", "optim_grads")),
    "Megatron-FSDP x 2, optim_grads_params": ("train_mfsdp.py", 2, ()),
}
CHECKPOINTED = ("single process", "FSDP2 x 2, full", "Megatron-FSDP x 2, optim_grads_params")
UNTIMED = 2  # steps in which memory is touched for the first time and kernels are chosen


@dataclass
class Arguments(PreparedFlags):
    config_name: str = flag("facebook/esm2_t6_8M_UR50D", "The model whose steps are timed.")
    tokens: int = flag(8192, "Tokens in a pack; a step takes two.")
    steps: int = flag(8, "Steps timed.")
    rounds: int = flag(3, "Times that every measurement is repeated.")
    checkpoint_models: str = flag(
        "facebook/esm2_t6_8M_UR50D,facebook/esm2_t12_35M_UR50D,facebook/esm2_t30_150M_UR50D",
        "The models whose checkpoints are timed.",
    )
    checkpoint_tokens: int = flag(1024, "Tokens in a pack there: what is timed does not depend on them.")
    work_dir: str | None = flag(None, "A directory on the disk that checkpoints are to be timed on.")
    output: str | None = flag(None, "Also write the tables there.")


def train(args: Arguments, layout: str, **flags) -> list[dict]:
    """The rows of metrics.jsonl of one run."""
    script, ranks, extra = (LAYOUTS | ON_GPUS)[layout]
    with tempfile.TemporaryDirectory(dir=args.work_dir) as out:
        flags = {
            "dataset_dir": args.dataset_dir,
            "output_dir": out,
            "packs_per_step": 2,
            "logging_steps": 1,
            "max_seq_length": 512,
            "warmup_steps": 2,
            "disable_tqdm": True,
            "save_total_limit": 1,
        } | flags
        command = [*torchrun(ranks), script, *extra, *words(flags)]
        completed(command, layout, os.environ | {"OMP_NUM_THREADS": str(os.cpu_count() // ranks)})
        return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def layouts() -> list[str]:
    """Those that this machine can run."""
    import torch

    if torch.cuda.device_count() >= 2:
        return [*LAYOUTS, *ON_GPUS]
    say("Megatron-FSDP is left out: it needs two GPUs")
    return [*LAYOUTS]


def steps_table(args: Arguments, layouts: list[str]) -> list[str]:
    last = args.steps + UNTIMED
    flags = {"config_name": args.config_name, "tokens_per_pack": args.tokens, "max_steps": last, "save_steps": last}
    seconds: dict[str, list[float]] = {layout: [] for layout in layouts}
    memory = dict.fromkeys(layouts, 0.0)
    for number in range(args.rounds):
        for layout in layouts:
            rows = train(args, layout, **flags)
            seconds[layout].append(statistics.median(row["step_seconds"] for row in rows[UNTIMED:]))
            memory[layout] = max(memory[layout], rows[-1]["peak_memory_gb"])
            say(f"round {number + 1}/{args.rounds}  {layout:<37} {seconds[layout][-1]:.3f} s a step")
    lines = [
        f"{args.config_name}, {2 * args.tokens} tokens a step, fp32:",
        "",
        "| layout | a step, s | spread | of a single process | peak memory of rank 0, GB |",
        "|---|--:|--:|--:|--:|",
    ]
    single = statistics.median(seconds["single process"])
    for layout, runs in seconds.items():
        middle = statistics.median(runs)
        lines.append(
            f"| {layout} | {middle:.3f} | {spread(runs):.0%} | {middle / single:.2f} x | {memory[layout]:.2f} |"
        )
    return lines


def checkpoints_table(args: Arguments, layouts: list[str]) -> list[str]:
    lines = [
        "A checkpoint every 4 steps (weights and both moments of AdamW, flushed to disk):",
        "",
        "| model | layout | written at once, s | in the background, s | ratio |",
        "|---|---|--:|--:|--:|",
    ]
    for model in args.checkpoint_models.split(","):
        for layout in (layout for layout in CHECKPOINTED if layout in layouts):
            stalls: dict[bool, list[float]] = {False: [], True: []}
            for number in range(args.rounds):
                for background in stalls:
                    stalls[background] += _stalls(args, model, layout, background)
                    say(f"round {number + 1}/{args.rounds}  {model} {layout} {background} {stalls[background]}")
            at_once, background = (statistics.median(found) for found in stalls.values())
            name = model.split("_")[2]
            lines.append(f"| {name} | {layout} | {at_once:.3f} | {background:.3f} | {background / at_once:.1%} |")
    return lines


def _stalls(args: Arguments, model: str, layout: str, background: bool) -> list[float]:
    """Seconds that training stood still for each checkpoint but the first, which finds its memory, and the last."""
    flags = {"config_name": model, "tokens_per_pack": args.checkpoint_tokens, "async_save": background}
    rows = train(args, layout, max_steps=17, save_steps=4, **flags)
    found = [row["checkpoint_seconds"] for row in rows if row["checkpoint_seconds"] > 1e-4]
    return found[1:]


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    import torch  # noqa: F401  (its version)

    hardware, command = where_measured("benchmarks.parallel_overhead", "torch")
    table = [hardware, "", f"{command}, median of {args.rounds}", ""]
    found = layouts()
    text = "\n".join([*table, *steps_table(args, found), "", *checkpoints_table(args, found)]) + "\n"
    publish(text, args.output)


if __name__ == "__main__":
    run(main)
