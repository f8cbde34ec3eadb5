"""Learning-rate schedules: one table for encoders (`mlm`) and decoders (`clm`), and the flags of encoders.

A schedule is a function `(step, run) -> rate` with one decorator, `@schedule`: flags, help and their page follow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, NamedTuple, Self

from common.cli import UserError
from common.flags import Flags, flag

ESM2_WARMUP_STEPS = 2000  # Lin et al. 2023, supplement A.2.4; also: decay to a tenth of the peak at 90 % of the run
ESM2_FINAL_FRACTION, ESM2_DECAY_END = 0.1, 0.9
LEAST_WARMUP_STEPS = 100  # of the default, in runs that are too short for ESM-2's
WSD_DECAY = 0.2  # of the run
POLYNOMIAL_END = 1e-7  # the rate at the end of transformers' polynomial, its lr_end
# transformers' names; its cosine_with_restarts has one cycle by default.
TRANSFORMERS_NAMES = {"warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine", "cosine_with_restarts": "cosine"}

# Which step of a warm-up is taken at which rate: the first at 0, as transformers' (the peak comes with the step after
# the warm-up); or the last at the peak. OWN: the curve has a warm-up of its own, or none.
FROM_ZERO, TO_PEAK, OWN = "from zero", "to the peak", "own"
WARM_UPS = {"mlm": FROM_ZERO, "clm": TO_PEAK}  # of a schedule that does not say


class Run(NamedTuple):
    """What a curve knows of a run. Steps are 0-based: the one about to be taken."""

    peak: float  # --learning_rate
    low: float  # the rate to fall to
    floor: float  # that as a fraction of the peak
    warmup: int  # steps
    unrounded_warmup: float
    total: int  # steps of the run
    end: int  # the step at which `low` is reached: `total`, or --lr_decay_iters
    decay: int  # steps over which wsd falls
    plateau: int  # steps at the peak after the warm-up, of `plateau`
    ahead: int  # 1 with TO_PEAK: then `low` comes with step `end` counted from 1

    def progress(self, step: int, begin: int | None = None) -> float:
        """How much of the fall from step `begin` (default: the end of the warm-up) to `end` is done: 0 to 1."""
        begin = self.warmup if begin is None else begin
        return min(1.0, max(0.0, (step + self.ahead - begin) / max(1, self.end - begin)))

    def fallen(self, fraction: float) -> float:
        """The rate after this fraction of the way from the peak to `low`."""
        return self.peak - (self.peak - self.low) * fraction

    def left(self, factor: float) -> float:
        """The rate with this fraction of what the peak is above the floor left, rounded as transformers does."""
        return self.peak * (factor * (1 - self.floor) + self.floor)


class Schedule(NamedTuple):
    curve: Callable[[int, Run], float]
    phrase: str  # for --help, after the name; "" where the name says it
    takes: tuple[str, ...]  # flags that go with some schedules only
    floor: float  # default of --min_lr_rate
    warm_up: str


SCHEDULES: dict[str, dict[str, Schedule]] = {"mlm": {}, "clm": {}}  # by task and name, in the order of --help


def schedule(
    name: str,
    phrase: str = "",
    *tasks: str,
    takes: tuple[str, ...] = (),
    floor: float = 0.0,
    warm_up: str | None = None,
) -> Callable[[Callable[[int, Run], float]], Callable[[int, Run], float]]:
    """Register `curve(step, run) -> rate` as a value of --lr_scheduler_type, of these tasks or both.

    The curve is asked from the end of the warm-up on, unless that is `OWN`. It raises UserError for a rate or a floor
    that it cannot have.
    """

    def register(curve: Callable[[int, Run], float]) -> Callable[[int, Run], float]:
        for task in tasks or SCHEDULES:
            SCHEDULES[task][name] = Schedule(curve, phrase, takes, floor, warm_up or WARM_UPS[task])
        return curve

    return register


FLOOR = ("min_lr_rate",)

# ---- encoders: ESM-2's, AMPLIFY's, and transformers' formulas to the last bit ------------------------------------


@schedule(
    "esm2", "linear to a tenth at 90 % of the run", "mlm", takes=FLOOR, floor=ESM2_FINAL_FRACTION, warm_up=TO_PEAK
)
def esm2(step: int, run: Run) -> float:
    decay_end = max(ESM2_DECAY_END * run.total, run.warmup + 1)
    progress = min(1.0, (step - run.warmup) / (decay_end - run.warmup))
    return run.peak * (1 - (1 - run.floor) * progress)


@schedule("linear", "", "mlm", takes=FLOOR)
def linear(step: int, run: Run) -> float:
    return run.left(max(0.0, (run.end - step) / max(1, run.end - run.warmup)))


@schedule("cosine", "", "mlm", takes=FLOOR)
def cosine(step: int, run: Run) -> float:
    return run.left(0.5 * (1 + math.cos(math.pi * run.progress(step))))


@schedule("cosine_linear", "AMPLIFY's", "mlm", takes=FLOOR)
def cosine_linear(step: int, run: Run) -> float:
    """A cosine to 0 times a linear fall to the floor, as AMPLIFY's authors published it first (chandar-lab/AMPLIFY at
    fb63336, CosineDecay)."""
    done = run.progress(step)
    return run.left((1 + math.cos(math.pi * done)) / 2 * (1 - (1 - run.floor) * done))


@schedule("wsd", "linear in the last fifth", "mlm", takes=("min_lr_rate", "lr_decay_steps"))
def wsd(step: int, run: Run) -> float:
    return run.left(min(1.0, max(0.0, (run.end - step) / max(1, run.decay))))


# ---- decoders: from the peak to --min_lr, which comes with step --lr_decay_iters, and stays ----------------------


@schedule("constant", "", "clm")
def constant_after_warmup(step: int, run: Run) -> float:
    return run.peak


@schedule("linear", "", "clm", takes=FLOOR)
def linear_to_low(step: int, run: Run) -> float:
    return run.fallen(run.progress(step))


@schedule("cosine", "", "clm", takes=FLOOR)
def cosine_to_low(step: int, run: Run) -> float:
    return run.fallen((1 - math.cos(math.pi * run.progress(step))) / 2)


@schedule("wsd", "in the last fifth", "clm", takes=("min_lr_rate", "lr_decay_steps"))
def wsd_to_low(step: int, run: Run) -> float:
    return run.fallen(run.progress(step, begin=run.end - run.decay))


@schedule("annealing", "the FSDP guide's cosine", "mlm", warm_up=OWN)
@schedule("annealing", "the guides'", "clm", takes=FLOOR, warm_up=OWN)
def annealing(step: int, run: Run) -> float:
    """AnnealingLR with decay_style cosine, in awsome-distributed-training's FSDP example.

    The first step is taken at 0, and the peak comes with the step after the warm-up, whose length is not rounded. The
    cosine falls to 0 over all steps, not over those after the warm-up, and is cut off at `low`. A warm-up of the whole
    run or longer, where their rates are 0 or negative, rises to the end here.
    """
    warmup, end = run.unrounded_warmup, run.end
    taken = min(step, end - warmup) if warmup < end else step
    if warmup > 0 and step <= warmup:
        return run.peak * taken / warmup
    return max(run.peak / 2 * (math.cos(math.pi * (taken - warmup) / end) + 1), run.low)


@schedule("exponential", "", "clm", takes=FLOOR)
def exponential(step: int, run: Run) -> float:
    if run.low == 0:
        raise UserError("--min_lr 0: --lr_decay_style exponential falls by factors, and never to 0: give another")
    return run.peak * (run.low / run.peak) ** run.progress(step)


@schedule("plateau", "--plateau of the run at the peak, then linear", "clm", takes=("min_lr_rate", "plateau"))
def plateau(step: int, run: Run) -> float:
    return run.fallen(run.progress(step, begin=run.warmup + run.plateau))


# ---- encoders: the rest of transformers' -------------------------------------------------------------------------


@schedule("constant_with_warmup", "", "mlm")
@schedule("constant", "", "mlm", warm_up=OWN)  # the lower decorator registers first
def constant(step: int, run: Run) -> float:
    return run.peak


@schedule("polynomial", "", "mlm")
def polynomial(step: int, run: Run) -> float:
    """Linear (power 1) from the peak to `POLYNOMIAL_END`."""
    peak, end = run.peak, POLYNOMIAL_END
    if peak <= end:
        raise UserError(f"--learning_rate {peak}: --lr_scheduler_type polynomial falls to {end:g}: give a higher one")
    done = min(1.0, (step - run.warmup) / max(1, run.end - run.warmup))
    return peak * (((peak - end) * (1 - done) + end) / peak)


@schedule("inverse_sqrt", "", "mlm")
def inverse_sqrt(step: int, run: Run) -> float:
    timescale = run.warmup or 10_000  # steps
    return run.peak * (1.0 / math.sqrt((step + timescale - run.warmup) / timescale))


# ---- flags and lengths -------------------------------------------------------------------------------------------


def choices_of(task: str) -> tuple[str, ...]:
    return tuple(SCHEDULES[task])


def taking(flag_name: str, task: str) -> str:
    """The schedules that a flag goes with: "esm2, linear, wsd"."""
    return ", ".join(name for name, entry in SCHEDULES[task].items() if flag_name in entry.takes)


def phrases(task: str) -> str:
    """For --help: "esm2: ...; wsd: ..."."""
    return "; ".join(f"{name}: {entry.phrase}" for name, entry in SCHEDULES[task].items() if entry.phrase)


def other_floors() -> str:
    """For --help: "0.1 for esm2"."""
    return ", ".join(f"{entry.floor:g} for {name}" for name, entry in SCHEDULES["mlm"].items() if entry.floor)


@dataclass(frozen=True)
class ScheduleFlags(Flags):
    group = "optimiser"
    unlisted = ("min_lr_rate", "lr_decay_steps")
    schedules: ClassVar[str] = "mlm"  # the task whose schedules these flags choose from

    learning_rate: float = flag(
        4e-4, "Peak learning rate (ESM-2: 4e-4; 15B: 1.6e-4). Lower it if the loss diverges; see --find_learning_rate."
    )
    lr_scheduler_type: str = flag(
        "esm2",
        f"How the rate falls; change it to repeat another recipe. {phrases('mlm')}; the others: transformers'.",
        choices=choices_of("mlm"),
    )
    warmup_steps: float | None = flag(
        None,
        "Raise it if the loss jumps at the beginning: steps, or a fraction of the run below 1. Default: 2000, at "
        "most 5 %; in short runs 100, at most 15 %.",
    )
    min_lr_rate: float | None = flag(
        None,
        f"What {taking('min_lr_rate', 'mlm')} fall to, as a fraction of the peak. Default: {other_floors()}, else 0.",
    )
    lr_decay_steps: float | None = flag(
        None,
        f"With {taking('lr_decay_steps', 'mlm')}: steps, or a fraction of the run below 1, over which the rate falls "
        "at the end. Default: 0.2.",
    )

    def resolve(self) -> Self:
        name = TRANSFORMERS_NAMES.get(self.lr_scheduler_type, self.lr_scheduler_type)
        return replace(self, lr_scheduler_type=name)

    @property
    def chosen(self) -> Schedule:
        return SCHEDULES[self.schedules][self.lr_scheduler_type]

    def run(self, total_steps: int) -> Run:
        """What the curve is drawn from: --min_lr_rate would be reached with the step after the last."""
        return self.run_to(total_steps, total_steps)

    def run_to(self, end: int, total_steps: int, low: float | None = None, plateau_steps: int = 0) -> Run:
        """See `Run`. low: default: --min_lr_rate of the peak."""
        peak, warmup_given, warmup = self.learning_rate, self.warmup_steps, warmup_steps(self, total_steps)
        floor = self.chosen.floor if self.min_lr_rate is None else self.min_lr_rate
        if low is not None:
            floor = low / peak if peak else 0.0
        return Run(
            peak=peak,
            low=floor * peak if low is None else low,
            floor=floor,
            warmup=warmup,
            unrounded_warmup=warmup_given * end if warmup_given is not None and warmup_given < 1 else warmup,
            total=total_steps,
            end=end,
            decay=wsd_decay_steps(self, end, warmup),
            plateau=plateau_steps,
            ahead=int(self.chosen.warm_up == TO_PEAK),
        )

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        """step (0-based, the one about to be taken) -> learning rate."""
        run, curve, warm_up = self.run(total_steps), self.chosen.curve, self.chosen.warm_up

        def rate(step: int) -> float:
            if warm_up == OWN or step >= run.warmup:
                return curve(step, run)
            if warm_up == TO_PEAK:
                return run.peak * (step + 1) / run.warmup
            return run.peak * (step / run.warmup)

        return rate

    def check(self) -> None:
        for name in ("learning_rate", "warmup_steps"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        if self.min_lr_rate is not None and not 0 <= self.min_lr_rate <= 1:
            raise UserError(f"--min_lr_rate {self.min_lr_rate}: a fraction of the peak, 0 to 1")
        of_some = {name for entry in SCHEDULES[self.schedules].values() for name in entry.takes}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in of_some - {*self.chosen.takes} and value != each.default:
                raise UserError(
                    f"--{each.name} {value}: goes with --lr_scheduler_type {taking(each.name, self.schedules)}, not "
                    f"{self.lr_scheduler_type}: drop one"
                )
        if self.lr_decay_steps is not None and not 0 < self.lr_decay_steps < math.inf:
            raise UserError(f"--lr_decay_steps {self.lr_decay_steps}: must be above 0")
        self.schedule(total_steps=1000)(sys.maxsize)  # what a curve refuses is a UserError


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
