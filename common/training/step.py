"""One optimiser step, the same on every rank, for every strategy and every task.

A step whose loss or gradient norm is infinite or no number, if only on one rank, is skipped by all of them: no
optimiser step, weights and optimiser state as they were; the data and the schedule move on.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from common.batches.collators import Batch
from common.precision.build import Precision
from common.ranks.stragglers import Stragglers
from common.ranks.strategy import Strategy
from common.ranks.world import World
from common.tasks.base import Task
from common.tasks.counts import StepCounts
from common.training.ahead import StepAhead


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
        scale = strategy.gradient_factor(world.size)
        for number, batch in enumerate(micro_batches):
            self.precision.begin_pack(step, number * world.mesh.dp_size + world.mesh.dp_rank, batch["num_tokens"] == 0)
            with strategy.micro_batch(last=number == len(micro_batches) - 1):
                loss_sum = self.task.loss_sum(strategy.model, batch)
                (loss_sum * (scale / max(counts.num_masked, 1))).backward()
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
        loss = sums[0].float() / max(counts.num_masked, 1)
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
            strategy.install_weights()
        strategy.clear_gradients()
        rows = self.precision.end_step(world, skipped)
        return StepResult(loss, norm, skipped, computed - started - waited, time.perf_counter() - computed, rows)
