"""One optimiser step, the same on every rank, for every strategy and every task.

A step whose loss or gradient norm is infinite or no number, if only on one rank, is skipped by all of them: no
optimiser step, weights and optimiser state as they were; the data and the schedule move on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.collators import Batch
from common.data.loader import TrainStep
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.precision.build import Precision
from common.training.task import StepCounts, Task
from extras.monitor.stragglers import Stragglers

# The step to come: this rank's share of it, taken while a step is under way, and what all ranks say of it.
#
# A step's loss is a mean over what all ranks predict, so their number has to be known before the first gradient; and
# all must know whether one of them is to stop, has failed or is to save. Summed over the ranks in an exchange of its
# own, all this would be a wait of the host in every step. It rides in the reduction of the loss instead, one step
# ahead: only the first step of a run asks for itself.


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
            self._share = world.stop.next_unless_stopped(self._steps)
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

        All ranks together. Where one has failed all of them end, as `World.raise_on_all` says.
        """
        if self._agreed is None:
            values, _ = self.fetch(number)
            self.agree(self._world.sum(values).tolist())
        *counts, stop, failed = self._agreed
        if failed:
            self._world.raise_on_all(self._failure)
        share, self._share, self._agreed = self._share, None, None
        return (None if stop else share), StepCounts(*counts)


def _is_busy(device: torch.device) -> bool:
    """Whether a GPU still has work that it was given: it would not have gone on any earlier."""
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


@dataclass(frozen=True)
class StepResult:
    """Of one step: the global batch's loss in nats a masked residue, the gradient norm before clipping, seconds.

    The seconds are the host's, and exact on a CPU. On a GPU the loss is read before the optimiser is started, so the
    first are those of forward, backward and exchange; the optimiser's are what starting it took, and its kernels
    count with the next step's forward pass. A wait for the next step's batch is in neither. quant_stats: rows of
    quant_stats.jsonl.
    """

    loss: float
    grad_norm: float
    skipped: bool
    forward_backward: float
    optimizer: float
    quant_stats: list[dict]


@dataclass(frozen=True)
class Stepper:
    """What every step needs; it keeps nothing of the run's progress."""

    task: Task
    strategy: Strategy
    precision: Precision
    optimizer: torch.optim.Optimizer
    stragglers: Stragglers
    world: World
    max_grad_norm: float

    def take(
        self,
        step: int,
        lr: float,
        micro_batches: list[Batch],
        counts: StepCounts,
        ahead: StepAhead | None = None,
    ) -> StepResult:
        """Take step number `step`, from 0, or skip it. counts: of the global batch; micro_batches: this rank's; ahead:
        where the next step is fetched and agreed on meanwhile, None where there is none."""
        world, strategy = self.world, self.strategy
        world.watch.mark("forward/backward", step + 1)
        started = time.perf_counter()
        self.stragglers.begin()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=world.device)
        self.precision.begin_step(step)
        scale = strategy.grad_scale(world.size)
        for number, batch in enumerate(micro_batches):
            self.precision.begin_pack(step, number * world.mesh.dp_size + world.mesh.dp_rank, batch["num_tokens"] == 0)
            with strategy.micro_batch(last=number == len(micro_batches) - 1):
                loss_sum = self.task.loss_sum(strategy.model, batch)
                (loss_sum * (scale / max(counts.num_targets, 1))).backward()
            loss += loss_sum.detach()
        world.watch.mark("gradient norm", step + 1)
        norm = strategy.clip(self.max_grad_norm).to(world.device)
        # The next batch is fetched here, where a GPU still has the passes to do.
        coming, waited = ahead.fetch(step + 2) if ahead else (torch.zeros(0, dtype=torch.float64), 0.0)
        world.watch.mark("loss", step + 1)
        # The norm minus itself is 0, or no number where the norm is none: that of one rank (a replica that went wrong
        # by itself) reaches all with the loss, in no exchange of its own. Nor is there a wait for the device of its
        # own: loss and norm are read once a step, to be logged; here, and not after the optimiser has been started.
        stray = self.precision.add_unseen(norm - norm, self.optimizer)
        # The next step's counts come along, which fp64 numbers hold.
        coming = coming.to(world.device, non_blocking=True)
        sums = world.sum(torch.cat([torch.stack([loss, stray]).double(), coming]))
        loss = sums[0].float() / max(counts.num_targets, 1)
        loss, norm, stray, *coming = torch.cat([torch.stack([loss, norm]).double(), sums[1:]]).tolist()
        norm = norm + stray if math.isfinite(norm) else norm
        if ahead:
            ahead.agree(coming)
        computed = time.perf_counter()
        self.stragglers.end()

        world.watch.mark("optimiser", step + 1)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self.optimizer.step()
            strategy.sync_model_weights()
        strategy.clear_gradients()
        rows = self.precision.end_step(world, skipped)
        return StepResult(loss, norm, skipped, computed - started - waited, time.perf_counter() - computed, rows)
