"""Packs in a global step: one number, or stages of them (a batch ramp). A pure function of the step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from common.files.safe_files import LARGEST_INT, shorten

SCHEDULE = re.compile(r"[0-9]{1,16}:[0-9]{1,16}(,[0-9]{1,16}:[0-9]{1,16}){0,99}")
MOST_RANKS = 4096  # that an error proposes


@dataclass(frozen=True)
class PacksPerStep:
    """stages: (first step, packs) of each; the first begins at step 0, each later one at a later step."""

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, value: int | str | PacksPerStep) -> PacksPerStep:
        """From a number for all steps, or from a schedule "0:8,1000:16". ValueError for any other text."""
        if isinstance(value, PacksPerStep):
            return value
        if isinstance(value, int):
            return cls(((0, value),))
        stages = []
        if SCHEDULE.fullmatch(value):
            pairs = (pair.split(":") for pair in value.split(","))
            stages = [(int(step), int(packs)) for step, packs in pairs]
        steps = [step for step, _ in stages]
        rising = steps[:1] == [0] and all(a < b for a, b in zip(steps, steps[1:], strict=False))
        if not rising or not all(1 <= packs <= LARGEST_INT for _, packs in stages):
            wanted = "at most 100 step:packs pairs, the steps rising from 0, such as 0:8,1000:16"
            raise ValueError(f"{shorten(value)}: expected {wanted}")
        return cls(tuple(stages))

    @property
    def plain(self) -> int | str:
        """What `of` reads: the number if there is one for all steps, else the schedule."""
        if len(self.stages) == 1:
            return self.stages[0][1]
        return ",".join(f"{step}:{packs}" for step, packs in self.stages)

    @property
    def most(self) -> int:
        """Packs of the largest step."""
        return max(packs for _, packs in self.stages)

    def stage(self, step: int) -> tuple[int, int]:
        """The stage of a step: its first step, and its packs."""
        return max(stage for stage in self.stages if stage[0] <= step)

    def at(self, step: int) -> int:
        """Packs of a step, counted from 0."""
        return self.stage(step)[1]

    def steps_for(self, packs: int, first: int) -> int:
        """Steps from step `first` on that take `packs` packs; the last one may take fewer than its stage says."""
        step = first
        while packs > 0:
            size = self.at(step)
            to_next_stage = (begin - step for begin, _ in self.stages if begin > step)
            steps = min([-(-packs // size), *to_next_stage])
            step, packs = step + steps, packs - steps * size
        return step - first

    def map(self, function: Callable[[int], int]) -> PacksPerStep:
        """The same stages, with `function` of each one's packs: those of a rank, for instance."""
        return PacksPerStep(tuple((step, function(packs)) for step, packs in self.stages))

    def __str__(self) -> str:
        (_, first), *later = self.stages
        return "; ".join([f"{first:,}", *(f"from step {step:,}: {packs:,}" for step, packs in later)])


def uneven(packs_per_step: PacksPerStep, dp_size: int) -> str:
    """If the ranks cannot share the packs of each step evenly: a line with the first such number and those that work;
    else nothing."""
    for step, packs in packs_per_step.stages:
        if packs % dp_size == 0:
            continue
        sizes = ", ".join(str(n) for n in range(1, min(packs, MOST_RANKS) + 1) if packs % n == 0)
        lower, upper = packs // dp_size * dp_size, -(-packs // dp_size) * dp_size
        batches = " or ".join(str(n) for n in (lower, upper) if n > 0)
        stage = f", from step {step} of --packs_per_step_schedule" if len(packs_per_step.stages) > 1 else ""
        return (
            f"a global batch of {packs} packs does not divide among {dp_size} data-parallel ranks (idle: "
            f"{upper - packs} of {upper} turns a step): use {sizes} ranks, or {batches} packs a step "
            f"(ranks x accumulation steps){stage}"
        )
    return ""
