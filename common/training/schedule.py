"""Learning-rate schedules: pure functions of the flags, the run's length and the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from common.cli import UserError
from common.flags import Flags, flag

ESM2_WARMUP_STEPS = 2000  # Lin et al. 2023, supplement A.2.4; also: decay to a tenth of the peak at 90 % of the run
ESM2_FINAL_FRACTION, ESM2_DECAY_END = 0.1, 0.9
LEAST_WARMUP_STEPS = 100  # of the default, in runs that are too short for ESM-2's
WSD_DECAY = 0.2  # of the run
# transformers' names; its cosine_with_restarts has one cycle by default.
TRANSFORMERS_NAMES = {"warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine"}
WITH_FLOOR = ("esm2", "linear", "cosine", "cosine_linear", "wsd")
SCHEDULES = (*WITH_FLOOR, "annealing", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt")


@dataclass(frozen=True)
class ScheduleFlags(Flags):
    group = "optimiser"
    unlisted = ("min_lr_rate", "lr_decay_steps")

    learning_rate: float = flag(4e-4, "Peak learning rate (ESM-2: 4e-4; 15B: 1.6e-4).")
    lr_scheduler_type: str = flag(
        "esm2",
        "esm2: linear to a tenth at 90 % of the run; cosine_linear: AMPLIFY's; wsd: linear in the last fifth; "
        "annealing: the FSDP guide's cosine; the others: transformers'.",
        choices=SCHEDULES,
    )
    warmup_steps: float | None = flag(
        None, "Steps, or a fraction of the run below 1. Default: 2000, at most 5 %; in short runs 100, at most 15 %."
    )
    min_lr_rate: float | None = flag(
        None,
        "What esm2, linear, cosine, cosine_linear and wsd fall to, as a fraction of the peak. Default: 0.1 for esm2, "
        "else 0.",
    )
    lr_decay_steps: float | None = flag(
        None, "With wsd: steps, or a fraction of the run below 1, over which the rate falls at the end. Default: 0.2."
    )

    def resolve(self) -> Self:
        name = TRANSFORMERS_NAMES.get(self.lr_scheduler_type, self.lr_scheduler_type)
        return replace(self, lr_scheduler_type=name)

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        """step (0-based, the one about to be taken) -> learning rate."""
        return lr_schedule(self, total_steps)

    def check(self) -> None:
        for name in ("learning_rate", "warmup_steps"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        if self.min_lr_rate is not None and not 0 <= self.min_lr_rate <= 1:
            raise UserError(f"--min_lr_rate {self.min_lr_rate}: a fraction of the peak, 0 to 1")
        if self.lr_decay_steps is not None:
            if self.lr_scheduler_type != "wsd":
                raise UserError(
                    f"--lr_decay_steps {self.lr_decay_steps}: goes with --lr_scheduler_type wsd, not "
                    f"{self.lr_scheduler_type}: drop one"
                )
            if not 0 < self.lr_decay_steps < math.inf:
                raise UserError(f"--lr_decay_steps {self.lr_decay_steps}: must be above 0")
        self.schedule(total_steps=1000)  # what a schedule refuses is a UserError


def in_steps(given: float, total_steps: int) -> int:
    """A number of steps, or below 1 a fraction of the run, rounded as TrainingArguments.get_warmup_steps does."""
    return math.ceil(given * total_steps) if given < 1 else int(given)


def default_warmup_steps(total_steps: int) -> int:
    """ESM-2's 2,000 steps, at most 5 % of the run; at least 100, or 15 % of a run that is too short for those."""
    return max(min(ESM2_WARMUP_STEPS, total_steps // 20), min(LEAST_WARMUP_STEPS, total_steps * 15 // 100))


def warmup_steps(flags: ScheduleFlags, total_steps: int) -> int:
    if flags.warmup_steps is None:
        return default_warmup_steps(total_steps)
    return in_steps(flags.warmup_steps, total_steps)


def wsd_decay_steps(flags: ScheduleFlags, total_steps: int, warmup: int) -> int:
    """Steps over which wsd falls: at most those that the warm-up leaves."""
    wanted = WSD_DECAY if flags.lr_decay_steps is None else flags.lr_decay_steps
    return max(0, min(in_steps(wanted, total_steps), total_steps - warmup))


def lr_schedule(flags: ScheduleFlags, total_steps: int) -> Callable[[int], float]:
    """step (0-based, the one about to be taken) -> learning rate.

    `esm2` reaches the peak with the last step of the warm-up. The others, but for `annealing`, are transformers': the
    first step is taken at 0, and --min_lr_rate would be reached with the step after the last.
    """
    name = flags.lr_scheduler_type
    if flags.min_lr_rate is not None and name not in WITH_FLOOR:
        raise UserError(
            f"--min_lr_rate {flags.min_lr_rate}: goes with --lr_scheduler_type {', '.join(WITH_FLOOR)}, not {name}: "
            "drop one"
        )
    if name == "annealing":
        return annealing(flags, total_steps)
    peak, floor = flags.learning_rate, flags.min_lr_rate or 0.0
    warmup = warmup_steps(flags, total_steps)
    if name == "esm2":
        floor = ESM2_FINAL_FRACTION if flags.min_lr_rate is None else floor
        decay_end = max(ESM2_DECAY_END * total_steps, warmup + 1)

        def esm2(step: int) -> float:
            if step < warmup:
                return peak * (step + 1) / warmup
            progress = min(1.0, (step - warmup) / (decay_end - warmup))
            return peak * (1 - (1 - floor) * progress)

        return esm2
    if name == "wsd":
        factor = wsd(flags, total_steps, warmup)
    elif name == "cosine_linear":
        factor = cosine_linear(floor, total_steps, warmup)
    else:
        factor = of_transformers(flags, total_steps, warmup)

    def rate(step: int) -> float:
        if floor and step >= warmup:
            return peak * (factor(step) * (1 - floor) + floor)
        return peak * factor(step)

    return rate


def wsd(flags: ScheduleFlags, total_steps: int, warmup: int) -> Callable[[int], float]:
    """step -> fraction of the peak: linear warm-up, constant, linear to 0 at the end of the run."""
    decay = wsd_decay_steps(flags, total_steps, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        return 1.0 if step < total_steps - decay else max(0.0, (total_steps - step) / max(1, decay))

    return factor


def cosine_linear(floor: float, total_steps: int, warmup: int) -> Callable[[int], float]:
    """step -> fraction of what the peak is above the floor: linear warm-up, then a cosine to 0 times a linear fall to
    the floor, as AMPLIFY's authors published it first (chandar-lab/AMPLIFY at fb63336, CosineDecay)."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return (1 + math.cos(math.pi * done)) / 2 * (1 - (1 - floor) * done)

    return factor


def of_transformers(flags: ScheduleFlags, total_steps: int, warmup: int) -> Callable[[int], float]:
    """step -> fraction of the peak, by transformers' get_scheduler."""
    from transformers import get_scheduler  # imported here: takes a second

    scratch = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=flags.learning_rate)
    scheduler = get_scheduler(
        flags.lr_scheduler_type, scratch, num_warmup_steps=warmup, num_training_steps=total_steps
    )
    assert isinstance(scheduler, LambdaLR)  # SCHEDULES are functions of the step alone
    return scheduler.lr_lambdas[0]


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
