"""Choose precision and number of steps for a run of a few minutes on this machine.

    python -m extras.plan.quickstart_tuning --flags_file run.json --seconds 90 --max_seq_length 512 ...

takes the flags of train_ddp.py, times a few steps in fp32 and in bf16, and writes the flags of the run to a file for
`train_ddp.py run.json`. A run that is started again reads that file and times nothing. The seconds are those of a
machine that stays as fast as it is now; --stop_after_minutes, which the file keeps, bounds the run on any other.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common.cli import run
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import open_data
from common.distributed.process_group import distributed_run
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.files.safe_files import write_json
from common.flags import flag, flat, parse_arguments, with_flags
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.layers.backend import has_bf16
from common.models.layers.cpu import BF16_MATMULS
from common.training.load_model import load_model
from common.training.masked_lm import MaskedLM, TrainArguments
from common.training.step import Stepper

logger = logging.getLogger(__name__)

WARM, TIMED = 1, 2  # steps; the first one builds kernels and allocates memory
ENOUGH_S = 5.0  # of steps in a precision: a slow machine is not made to wait for more
GAIN = 1.1  # bf16 must be faster by this factor to be worth its rounding
EVALUATED = 1 / 3  # of the run's time, at most


@dataclass(frozen=True)
class TuningArguments(TrainArguments):
    flags_file: str = flag("run.json", "File to write the run's flags to.")
    seconds: float = flag(90.0, "Time limit of the run, evaluations included.")
    least_steps: int = flag(8, "Minimum number of steps, even if they take longer.")
    most_steps: int = flag(240, "Maximum number of steps.")

    def check(self) -> None:
        self.require_above(0, "seconds")
        self.require_at_least(1, "least_steps")
        self.require_at_least(self.least_steps, "most_steps")


def likely_precisions(device: torch.device) -> tuple[str, ...]:
    """The one first that should be faster."""
    if device.type == "cuda":
        return ("bf16", "fp32") if has_bf16(device) else ("fp32",)
    return ("bf16", "fp32") if BF16_MATMULS else ("fp32", "bf16")


def step_seconds(args: TrainArguments, world: World) -> float:
    """Seconds of a step on this machine."""
    built = load_model(args, world)
    task = MaskedLM(built, args, world)
    task.open(evaluates=False)
    strategy = Strategy(built.model)
    optimizer = built.optimizer(args.optimizer, strategy, world, args.precision.bf16)
    stepper = Stepper(task, strategy, built.precision, optimizer, world, args.optimizer.max_grad_norm)
    built.model.train()
    durations, packs = [], PacksPerStep.of(args.data.gradient_accumulation_steps)
    for share in task.steps(packs, 0, {}, WARM + TIMED, WARM + TIMED):
        started = time.perf_counter()
        stepper.step(share.step, 0.0, share.micro_batches, task.counts(share.micro_batches))
        durations.append(time.perf_counter() - started)
        # The first step alone says little: it may compile, and a busy moment may make it twenty times as long.
        if len(durations) > WARM and sum(durations) > ENOUGH_S:
            break
    return min(durations[WARM:])


def evaluated_tokens(args: TrainArguments, world: World) -> tuple[int, int]:
    """(tokens of all evaluations: before and during the run, and on both splits after it; proteins of the larger)."""
    if not args.do_eval:
        return 0, 0
    data = open_data(args.data, ESM2_TOKENS, world, evaluate=True)
    rounds = {"validation": args.eval_on_start + round(1 / args.eval_steps if args.eval_steps else 0) + 1, "test": 1}
    held_out = {split: data.held_out(split) for split in rounds}
    tokens = sum(
        rounds[split] * int(np.minimum(store.lengths(np.arange(len(store))), args.data.max_seq_length).sum())
        for split, store in held_out.items()
        if store is not None
    )
    return tokens, max((len(store) for store in held_out.values() if store is not None), default=0)


def choose(args: TuningArguments, seconds: dict[str, float], evaluated: int) -> tuple[str, int, float, float]:
    """(fp32 or bf16, steps, fraction of the proteins to evaluate on, total seconds).

    seconds: per step in each precision that was timed; evaluated: tokens.
    """
    faster = seconds.get("fp32", math.inf) > GAIN * seconds.get("bf16", math.inf)
    precision = "bf16" if faster else "fp32"
    step = seconds[precision]
    forward_alone = evaluated * step / (3 * args.data.tokens_per_pack * args.data.gradient_accumulation_steps)
    fraction = min(1.0, EVALUATED * args.seconds / max(forward_alone, 1e-9))
    forward_alone *= fraction
    steps = min(max(int((args.seconds - forward_alone) / step), args.least_steps), args.most_steps)
    return precision, steps, fraction, steps * step + forward_alone


def flags_of_run(args: TuningArguments) -> dict:
    """The run's flags that differ from their defaults, without the flags of this module."""
    flags = flat(args)
    return {name: flags[name] for name, default in flat(TrainArguments()).items() if flags[name] != default}


def main() -> None:
    args = parse_arguments(__doc__, TuningArguments)
    with distributed_run(args.process) as world:
        logger.info("Timing steps of %s tokens on this machine", f"{args.data.tokens_per_pack:,}")
        seconds = {}
        for name in likely_precisions(world.device):
            seconds[name] = step_seconds(with_flags(args, bf16=name == "bf16"), world)
            if seconds[name] > ENOUGH_S:
                break
        evaluated, proteins = evaluated_tokens(args, world)
        precision, steps, fraction, in_all = choose(args, seconds, evaluated)
        chosen = {"bf16": precision == "bf16", "max_steps": steps}
        if fraction < 1:
            chosen["max_eval_samples"] = max(1, int(fraction * proteins))
        write_json(Path(args.flags_file), flags_of_run(args) | chosen)
    timed = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
    limit = args.stop_after_minutes or math.inf
    minutes = f"about {min(in_all / 60, limit):.1f} minutes"
    if args.stop_after_minutes:
        minutes += f", at most {limit:g} even if the machine becomes slower"
    logger.info(
        "A step of %s tokens: %s. So: %s, %d steps, %s",
        *(f"{args.data.tokens_per_pack:,}", timed, precision, steps, minutes),
    )


if __name__ == "__main__":
    run(main)
