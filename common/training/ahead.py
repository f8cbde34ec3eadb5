"""The step to come: this rank's share of it, taken while a step is under way, and what all ranks say of it.

A step's loss is a mean over what all ranks predict, so their number has to be known before the first gradient; and
all must know whether one of them is to stop, has failed or is to save. Summed over the ranks in an exchange of its
own, all this would be a wait of the host in every step. It rides in the reduction of the loss instead, one step
ahead: only the first step of a run asks for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.batches.loader import TrainStep
from common.ranks.stragglers import Stragglers
from common.ranks.world import World
from common.tasks.base import Task
from common.tasks.counts import StepCounts


class StepAhead:
    """steps: of this rank, as the loader gives them; is_save_due: by the clock, which rank 0 alone is asked about."""

    def __init__(
        self,
        steps: Iterator[TrainStep],
        task: Task,
        stragglers: Stragglers,
        world: World,
        is_save_due: Callable[[], bool],
    ):
        self._steps, self._task, self._stragglers, self._world = steps, task, stragglers, world
        self._is_save_due = is_save_due
        self._share: TrainStep | None = None
        self._failure: Exception | None = None
        self._agreed: list[int] | None = None
        self.waited = 0.0  # seconds for batches, since it was last set to 0
        self.save_asked = False

    def fetch(self, number: int) -> tuple[Tensor, float]:
        """Take this rank's share of step `number`, from 1, from the loader: (what is to be summed over the ranks and
        given to `agree`, float64 [9] on the CPU, in which each of these counts is exact; seconds waited for it).

        A rank that waits for data in vain, or whose data are damaged, tells the others so: no rank waits for it.
        """
        world = self._world
        world.watch.mark("data", number)
        started = time.perf_counter()
        try:
            self._share = world.stop.wait_for(self._steps)
        except Exception as error:
            self._failure = error
        seconds = 0.0 if _is_busy(world.device) else time.perf_counter() - started
        self.waited += seconds
        self._stragglers.waited(seconds)
        counts = self._task.counts(self._share.micro_batches if self._share else [])
        stop = self._failure is None and (self._share is None or world.stop_requested)
        save = world.is_main and self._is_save_due()  # one clock decides for all
        return torch.tensor([*counts, stop, self._failure is not None, save], dtype=torch.float64), seconds

    def agree(self, sums: list[float]) -> None:
        """What all ranks have fetched, summed."""
        *self._agreed, save = map(int, sums)
        self.save_asked = bool(save)

    def take(self, number: int) -> tuple[TrainStep | None, StepCounts]:
        """This rank's share of step `number` and the counts of the whole of it; (None, _) if a rank is to stop.

        All ranks together. Where one has failed all of them end, as `World.end_together` says.
        """
        if self._agreed is None:
            values, _ = self.fetch(number)
            self.agree(self._world.sum(values).tolist())
        *counts, stop, failed = self._agreed
        if failed:
            self._world.end_together(self._failure)
        share, self._share, self._agreed = self._share, None, None
        return (None if stop else share), StepCounts(*counts)


def _is_busy(device: torch.device) -> bool:
    """Whether a GPU still has work that it was given: it would not have gone on any earlier."""
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()
