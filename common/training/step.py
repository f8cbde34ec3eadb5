"""One optimiser step, the same for every strategy and task, with prefetch and scheduled garbage collection.

A step whose loss or gradient norm is not finite on any rank is skipped by all ranks: weights and optimiser state stay,
data and schedule move on. The device decides that: the optimiser is launched before the host has read anything.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from common.data.collators import Batch
from common.data.loader import StepCounts, TrainStep
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.precision import Precision
from common.training.log_row import StepResult
from common.training.optim import update_unless
from common.training.task import Task

COLLECT_EVERY = 50  # steps between garbage collections


class StepPrefetcher:
    """Prefetch the next step's batches, and send its counts and stop/fail/save flags with this step's loss all-reduce.

    The loss is a mean over the targets of all ranks, so their number must be known before the first backward pass, and
    all ranks must know if one of them stops, has failed or is to save. An all-reduce of their own would make the host
    wait in every step; only the first step of a run needs it.

    steps: this rank's batches; is_save_due, is_over: whether --save_minutes and --stop_after_minutes have passed;
    rank 0 decides.
    """

    def __init__(
        self,
        steps: Iterator[TrainStep],
        task: Task,
        world: World,
        is_save_due: Callable[[], bool] = lambda: False,
        is_over: Callable[[], bool] = lambda: False,
    ):
        self._steps, self._task, self._world = steps, task, world
        self._is_save_due, self._is_over = is_save_due, is_over
        self._data: TrainStep | None = None
        self._failure: Exception | None = None
        self._sums: list[int] = []  # of the prefetched step: counts, stop, failed
        self._waited = 0.0
        self.save_requested = self.is_over = False  # of the last all-reduce

    def prefetch(self, number: int) -> tuple[Tensor, float]:
        """Take this rank's batches of step `number` (from 1) from the loader.

        Returns the values to sum over the ranks and pass to `receive`, float64 [11] on the CPU (exact for counts), and
        the seconds waited for the batches. A rank whose data fail or never arrive says so in these values instead of
        raising, so that no rank waits for it.
        """
        world = self._world
        world.watch.mark("data", number)
        started = time.perf_counter()
        try:
            self._data = world.stop.next_unless_stopped(self._steps)
        except Exception as error:
            self._failure = error
        gpu_is_busy = world.device.type == "cuda" and not torch.cuda.current_stream(world.device).query()
        # A GPU that still has kernels queued did not wait.
        seconds = 0.0 if gpu_is_busy else time.perf_counter() - started
        self._waited += seconds
        counts = self._task.counts(self._data.micro_batches if self._data else [])
        stop = self._failure is None and (self._data is None or world.stop.requested)
        save, over = (world.is_main and due() for due in (self._is_save_due, self._is_over))  # one clock for all ranks
        values = torch.tensor([*counts, stop, self._failure is not None, save, over], dtype=torch.float64)
        # From memory that is not pinned, a copy may wait for the device.
        return values.pin_memory() if world.device.type == "cuda" else values, seconds

    def receive(self, sums: list[float]) -> None:
        """The sums over all ranks of what `prefetch` returned."""
        *self._sums, save, over = map(int, sums)
        self.save_requested, self.is_over = bool(save), bool(over)

    def pop(self, number: int) -> tuple[TrainStep | None, StepCounts]:
        """This rank's batches of step `number` and the counts of the global batch; (None, _) if a rank is to stop.

        All ranks together. If one has failed, all of them end (`World.raise_on_all`).
        """
        if not self._sums:
            values, _ = self.prefetch(number)
            self.receive(self._world.sum(values).tolist())
        *counts, stop, failed = self._sums
        if failed:
            self._world.raise_on_all(self._failure)
        if stop:
            self._world.stop.agreed()
        data, self._data, self._sums = self._data, None, []
        return (None if stop else data), StepCounts(*counts)

    def pop_wait(self) -> float:
        """Seconds waited for batches since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited


@dataclass(frozen=True)
class Stepper:
    """Takes optimiser steps; holds no progress of the run. sources: of a mixture, whose losses are summed, too."""

    task: Task
    strategy: Strategy
    precision: Precision
    optimizer: torch.optim.Optimizer
    world: World
    max_grad_norm: float
    sources: int = 0

    def step(
        self,
        step: int,
        lr: float,
        micro_batches: list[Batch],
        counts: StepCounts,
        prefetcher: StepPrefetcher | None = None,
    ) -> StepResult:
        """Take step `step` (from 0), or skip it. micro_batches: this rank's; counts: of the global batch; prefetcher:
        fetches the next step meanwhile, None after the last step."""
        world, strategy = self.world, self.strategy
        world.watch.mark("forward/backward", step + 1)
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = torch.zeros((), device=world.device)
        of_sources = torch.zeros(self.sources, 2, dtype=torch.float64, device=world.device)  # loss, targets
        self.precision.begin_step(step)
        scale = strategy.grad_scale(world.size)
        for number, batch in enumerate(micro_batches):
            self.precision.begin_pack(step, number * world.mesh.dp_size + world.mesh.dp_rank, not batch["num_tokens"])
            with strategy.micro_batch(last=number == len(micro_batches) - 1):
                loss_sum = self.task.loss_sum(strategy.model, batch)
                (loss_sum * (scale / max(counts.num_targets, 1))).backward()
            loss += loss_sum.detach()
            if self.sources:
                of_sources[batch["source"], 0] += loss_sum.detach()
                of_sources[batch["source"], 1] += batch["num_targets"]
        world.watch.mark("gradient norm", step + 1)
        clips = getattr(self.optimizer, "clips_and_rounds", False)  # extras.speed.triton_adamw
        norm = strategy.clip(0.0 if clips else self.max_grad_norm).to(world.device)
        # Prefetch here, while a GPU still works on the backward pass.
        coming, waited = prefetcher.prefetch(step + 2) if prefetcher else (torch.zeros(0, dtype=torch.float64), 0.0)
        world.watch.mark("loss", step + 1)
        # `norm - norm` is 0, or NaN if the norm is not finite. Adding it to the loss all-reduce spreads one rank's NaN
        # to all ranks without another collective.
        nan = self.precision.fold_hidden_nan(norm - norm, self.optimizer)
        coming = coming.to(world.device, non_blocking=True)
        sums = world.sum(torch.cat([torch.stack([loss, nan]).double(), of_sources.flatten(), coming]))
        loss = sums[0].float() / max(counts.num_targets, 1)
        found_inf = (~torch.isfinite(loss + sums[1])).float()  # 1: skip the step
        read = _start_reading(torch.cat([torch.stack([loss, norm, found_inf]).double(), sums[1:]]))

        world.watch.mark("optimiser", step + 1)
        launched = time.perf_counter()
        scaled = clips and self.max_grad_norm
        grad_scale = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0) if scaled else None
        update_unless(self.optimizer, found_inf, grad_scale)
        strategy.sync_model_weights()
        strategy.clear_gradients()
        optimizer = time.perf_counter() - launched
        world.watch.mark("loss", step + 1)
        # The only synchronisation with the device in a step: with the all-reduce, while the optimiser runs.
        loss, norm, skipped, nan, *values = read()
        by_source, coming = values[: 2 * self.sources], values[2 * self.sources :]
        norm = norm + nan if math.isfinite(norm) else norm
        if prefetcher:
            prefetcher.receive(coming)
        rows = self.precision.end_step(world, bool(skipped))
        forward_backward = time.perf_counter() - started - waited - optimizer
        return StepResult(loss, norm, bool(skipped), forward_backward, optimizer, rows, by_source)


def _start_reading(values: Tensor) -> Callable[[], list[float]]:
    """Copy values to the host. The returned function waits for them, and for nothing that is launched meanwhile."""
    if values.device.type != "cuda":
        return values.tolist
    copied = torch.empty_like(values, device="cpu").pin_memory().copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> list[float]:
        done.synchronize()
        return copied.tolist()

    return read


@contextmanager
def scheduled_gc(every: int = COLLECT_EVERY) -> Iterator[Callable[[int], None]]:
    """Run Python's garbage collector only in what this yields, to be called with each step, and there every N steps.

    By itself it would run at another step on each rank, and all ranks would wait for the one that collects.
    """

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # modules and model are not looked at again
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
