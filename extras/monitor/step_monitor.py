"""What watches a run around its steps: profiler traces, slow ranks, and replicas that must stay equal."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.training.arguments import RunArguments
from extras.monitor.replicas import Replicas
from extras.monitor.stragglers import Stragglers
from extras.profiling import StepProfiler


class StepMonitor:
    """Called around every step, by all ranks together. weights: those that the optimiser updates."""

    def __init__(self, strategy: Strategy, weights: nn.Module, args: RunArguments, world: World):
        self.every = args.log.straggler_every
        self.stragglers = Stragglers(strategy, world, self.every)
        self.replicas = Replicas(weights, world)
        self.profiler = StepProfiler(args.log.profile_steps, world, Path(args.checkpoint.output_dir))

    def before_step(self, step: int) -> None:
        """step: from 1."""
        self.profiler.before(step)
        self.stragglers.begin()

    def after_step(self, step: int, waited: float) -> dict:
        """The ranks' metrics if they were compared. waited: this rank's seconds for batches.

        MachineFault if replicas of the weights differ.
        """
        self.stragglers.end(waited)
        self.profiler.after(step)
        metrics = self.stragglers.compare(step)
        if self.every and step % self.every == 0:
            self.replicas.check(step)
        return metrics

    def check_replicas(self, step: int) -> None:
        """Before a save: MachineFault if replicas of the weights differ."""
        self.replicas.check(step)

    def close(self, step: int) -> None:
        """After the last step: write a trace that is not complete."""
        self.profiler.after(step, ends=True)
