"""How long a run takes: its estimate after the first steps, and its end after --stop_after_minutes."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.cli import UserError
from common.console import duration, is_terminal
from common.distributed.world import World
from common.training.trainer_state import RunPlan

logger = logging.getLogger(__name__)

WARM, TIMED = 1, 4  # steps of a start; the first one builds kernels and allocates memory
WORTH_SAYING_S = 60.0
LONG_S = 86400.0  # a run that takes longer is asked for --yes


class TimeBudget:
    """The time that this start of a run may take, by rank 0's clock from here on.

    minutes: --stop_after_minutes; confirmed: --yes; results: the Evaluator's; step, last_step: those done, and the
    run's. A run that resumes was begun on purpose: it needs no --yes.
    """

    def __init__(
        self,
        minutes: float | None,
        confirmed: bool,
        world: World,
        results: Mapping[str, Any],
        step: int,
        last_step: int,
    ):
        self.minutes, self.confirmed, self.world = minutes, confirmed or step > 0, world
        self.results = results
        self.began, self.first, self.last = time.monotonic(), step, last_step
        self.steps: list[float] = []  # seconds

    def is_over(self) -> bool:
        """Whether training has to end for --stop_after_minutes, with time for the evaluation of two splits; on rank 0,
        which decides for all."""
        if not self.minutes:
            return False
        needed = 2 * sum(value for key, value in self.results.items() if key.endswith("_runtime"))
        return time.monotonic() - self.began + needed >= 60 * self.minutes

    def ended(self, plan: RunPlan, step: int) -> RunPlan:
        """The plan of a run that ends with this step, after --stop_after_minutes."""
        logger.info(
            *("Ending at step %d of %d, for --stop_after_minutes %g: run the same command to resume", step, self.last),
            self.minutes,
        )
        return replace(plan, last_step=step)

    def after_step(self, step: int, seconds: float) -> None:
        """Log the estimate, once; all ranks together. UserError if it is of more than a day, on a terminal, without
        --yes."""
        if len(self.steps) >= TIMED or step <= self.first + WARM:
            return
        self.steps.append(seconds)
        if len(self.steps) < TIMED:
            return
        with self.world.on_main_rank() as is_main:
            if is_main:
                self._estimate(step)

    def _estimate(self, step: int) -> None:
        each = statistics.median(self.steps)
        seconds = (self.last - step) * each
        if self.minutes:
            seconds = min(seconds, self.began + 60 * self.minutes - time.monotonic())
        if seconds < WORTH_SAYING_S:
            return
        estimate = f"about {duration(seconds)}: {self.last - step:,} steps of {each:.3g} s"
        logger.info("Estimated time, without evaluations: %s", estimate)
        if seconds < LONG_S or self.confirmed:
            return
        if is_terminal():
            raise UserError(
                f"this run would take {estimate} on this device: give --yes to train for so long, or fewer "
                "--max_steps, a smaller model, or more devices"
            )
        logger.warning("This run takes %s on this device", estimate)
