"""What the tasks have in common: how a rank's share of the steps is loaded.

The trainer knows a task's methods and nothing else of batches and model: `open`, `steps`, `counts`, `loss_sum`,
`flops`, `evaluate`, `summary`, `baseline`, `line`, `exported`, `export` (common.tasks.masked_lm tells them); a dry
run, which opens no data, takes an `example`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from common.batches.loader import Collator, TrainLoader
from common.batches.step_flags import StepFlags
from common.ranks.world import World


class Task(ABC):
    """flags, world: of the run; data: once it is opened. The task sets them."""

    flags: StepFlags
    world: World

    @abstractmethod
    def collator(self) -> Collator:
        """What makes a rank's batches to train on."""

    def steps(self, packs_per_step: int, step: int, position: dict, last_step: int | None) -> TrainLoader:
        """This rank's share of the steps from number `step` on, which begins at `position`, up to `last_step`; where
        that is None, up to the end of the data."""
        return TrainLoader(
            self.data.order(packs_per_step),
            self.collator(),
            self.world.mesh,
            step,
            position,
            num_steps=None if last_step is None else max(0, last_step - step),
            **self.flags.loading(self.world.device),
        )
