"""Learning-rate schedules: pure functions of the flags, the run's length and the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common.cli import UserError
from common.flags import Flags, flag

ESM2_WARMUP_STEPS = 2000  # Lin et al. 2023, supplement A.2.4; also: decay to a tenth of the peak at 90 % of the run
ESM2_FINAL_FRACTION, ESM2_DECAY_END = 0.1, 0.9


@dataclass(frozen=True)
class ScheduleFlags(Flags):
    group = "optimiser"

    learning_rate: float = flag(4e-4, "Peak learning rate (ESM-2: 4e-4; 15B: 1.6e-4).")
    lr_scheduler_type: str = flag(
        "esm2",
        "esm2 (linear to a tenth at 90 % of the run), linear, cosine, annealing (the FSDP guide's cosine), constant, "
        "constant_with_warmup, polynomial or inverse_sqrt.",
    )
    warmup_steps: float | None = flag(None, "Steps, or a fraction of the run below 1. Default: 2000, at most 5 %.")

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        """step (0-based, the one about to be taken) -> learning rate."""
        return lr_schedule(self, total_steps)

    def check(self) -> None:
        for name in ("learning_rate", "warmup_steps"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        self.schedule(total_steps=1000)  # an unknown --lr_scheduler_type is a UserError


def warmup_steps(flags: ScheduleFlags, total_steps: int) -> int:
    if flags.warmup_steps is None:
        return min(ESM2_WARMUP_STEPS, total_steps // 20)
    # As in transformers' TrainingArguments.get_warmup_steps.
    return math.ceil(flags.warmup_steps * total_steps) if flags.warmup_steps < 1 else int(flags.warmup_steps)


def lr_schedule(flags: ScheduleFlags, total_steps: int) -> Callable[[int], float]:
    """step (0-based, the one about to be taken) -> learning rate.

    `esm2` reaches the peak with the last step of the warm-up; the others, but for `annealing`, are transformers' own.
    """
    if flags.lr_scheduler_type == "annealing":
        return annealing(flags, total_steps)
    warmup = warmup_steps(flags, total_steps)
    if flags.lr_scheduler_type == "esm2":
        decay_end = max(ESM2_DECAY_END * total_steps, warmup + 1)

        def esm2(step: int) -> float:
            if step < warmup:
                return flags.learning_rate * (step + 1) / warmup
            progress = min(1.0, (step - warmup) / (decay_end - warmup))
            return flags.learning_rate * (1 - (1 - ESM2_FINAL_FRACTION) * progress)

        return esm2
    from transformers import SchedulerType, get_scheduler  # imported here: takes a second

    try:
        kind = SchedulerType(flags.lr_scheduler_type)
        scratch = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=flags.learning_rate)
        scheduler = get_scheduler(kind, scratch, num_warmup_steps=warmup, num_training_steps=total_steps)
        if not isinstance(scheduler, LambdaLR):
            raise ValueError("not a function of the step alone")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--lr_scheduler_type {flags.lr_scheduler_type}: choose esm2, linear, cosine, annealing, constant, "
            "constant_with_warmup, polynomial or inverse_sqrt"
        ) from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: flags.learning_rate * factor(step)


def annealing(
    flags: ScheduleFlags, total_steps: int, min_lr: float = 0.0, decay_steps: int | None = None
) -> Callable[[int], float]:
    """The rates of AnnealingLR with decay_style cosine, in awsome-distributed-training's FSDP example.

    The first step is taken at 0, and the peak comes with the step after the warm-up, whose length is not rounded. The
    cosine falls to 0 over all steps, not over those after the warm-up, and is cut off at min_lr. decay_steps: their
    --lr_decay_iters. A warm-up of the whole run or longer, where their rates are 0 or negative, rises to the end here.
    """
    peak, end, given = flags.learning_rate, decay_steps or total_steps, flags.warmup_steps
    warmup = given * end if given is not None and given < 1 else warmup_steps(flags, total_steps)

    def rate(step: int) -> float:
        taken = min(step, end - warmup) if warmup < end else step
        if warmup > 0 and step <= warmup:
            return peak * taken / warmup
        return max(peak / 2 * (math.cos(math.pi * (taken - warmup) / end) + 1), min_lr)

    return rate
