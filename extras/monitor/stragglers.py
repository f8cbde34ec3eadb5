"""Find slow ranks: time each rank's own work in a step, without its waits for other ranks.

All ranks finish a step together, so step times do not show who is slow. A rank's own time is its wait for batches and
the time from there to the last gradient of the backward pass (the first parameter's). DistributedDataParallel
all-reduces gradients meanwhile and waits for other ranks only after that. With sharded layers ranks wait in every
all-gather and reduce-scatter: those waits are subtracted (`_time_waits`; for other strategies `_timed`).
"""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Callable

import torch
from torch.distributed.fsdp import FSDPModule

from common.distributed.strategy import Strategy
from common.distributed.world import World

logger = logging.getLogger(__name__)


class Stragglers:
    """Sums this rank's own seconds: host time on a CPU, CUDA events on a GPU, read after the step has synchronised."""

    def __init__(self, strategy: Strategy, world: World, every: int):
        """every: steps between comparisons of the ranks, 0 for never."""
        self.world, self.every = world, every if world.size > 1 else 0
        self.seconds, self.steps = 0.0, 0
        self._begin = self._end = self._waits_since = None
        self._waits: list[tuple] = []  # (from, to), in this step
        self._waits_before_end = None  # number of waits before the last gradient
        if self.every:
            strategy.last_gradient.register_post_accumulate_grad_hook(self._on_last_gradient)
            for module in strategy.model.modules():
                if isinstance(module, FSDPModule):
                    self._time_waits(module)
            for owner, name in strategy.blocking_collectives():
                setattr(owner, name, self._timed(getattr(owner, name)))

    def begin(self) -> None:
        if self.every:
            self._begin, self._end, self._waits_since, self._waits = self._now(), None, None, []
            self._waits_before_end = None

    def end(self, waited: float) -> None:
        """After a step. waited: seconds that this rank waited for batches."""
        if self.every:
            self.seconds += waited
            self.seconds += self._between(self._begin, self._end or self._now())
            self.seconds -= sum(self._between(*wait) for wait in self._waits[: self._waits_before_end])
            self.steps += 1
            self._begin = None

    def compare(self, step: int) -> dict:
        """After a step: metrics about the ranks every `every` steps, else {}. All ranks together."""
        if not self.every or step % self.every:
            return {}
        own = (self.seconds / max(self.steps, 1), socket.gethostname())
        steps, self.seconds, self.steps = self.steps, 0.0, 0
        everyone: list[tuple[float, str]] = self.world.gather(own)
        seconds = [s for s, _ in everyone]
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        metrics = {
            "rank_seconds_min": min(seconds),
            "rank_seconds_median": statistics.median(seconds),
            "rank_seconds_max": seconds[slowest],
            "slowest_rank": slowest,
            "slowest_host": everyone[slowest][1],
        }
        logger.info(
            "Own work per rank, %d steps: min %.4f, median %.4f, max %.4f s a step; slowest: rank %d (%s)",
            steps,
            *metrics.values(),
        )
        return metrics

    def _on_last_gradient(self, parameter) -> None:
        self._end, self._waits_before_end = self._now(), len(self._waits)  # once per micro-batch: the last one counts

    def _time_waits(self, module: FSDPModule) -> None:
        """Time this module's all-gathers and reduce-scatters by hooks around those of `fully_shard`.

        Hooks run in the order of registration, with `prepend` in reverse, so hooks registered later can be the first
        and the last. Forward: around the all-gather before the module. Backward: around the all-gather when the
        gradient of the output arrives, and the reduce-scatter when that of the input does.
        """
        begins, ends = torch.compiler.disable(self._wait_begins), torch.compiler.disable(self._wait_ends)
        on_gradient = torch.compiler.disable(_on_gradient)

        def before_all_gather(module, inputs) -> None:
            begins()
            on_gradient(inputs, ends)

        def after_all_gather(module, inputs) -> None:
            on_gradient(inputs, begins)
            ends()

        module.register_forward_pre_hook(before_all_gather, prepend=True)
        module.register_forward_pre_hook(after_all_gather)
        module.register_forward_hook(lambda module, inputs, output: on_gradient(output, begins), prepend=True)
        module.register_forward_hook(lambda module, inputs, output: on_gradient(output, ends))

    def _timed(self, method: Callable) -> Callable:
        """The method, timed as a wait."""

        def call(*args, **kwargs):
            self._wait_begins()
            try:
                return method(*args, **kwargs)
            finally:
                self._wait_ends()

        return call

    def _wait_begins(self, _=None) -> None:
        if self._begin is not None and self._waits_since is None:
            self._waits_since = self._now()

    def _wait_ends(self, _=None) -> None:
        if self._waits_since is not None:
            self._waits.append((self._waits_since, self._now()))
            self._waits_since = None

    def _now(self):
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin, end) -> float:
        if self.world.device.type != "cuda":
            return end - begin
        end.synchronize()  # returns at once: the step's loss has been read
        return begin.elapsed_time(end) / 1000


def _on_gradient(values, call: Callable) -> None:
    """Call when the gradient of a tensor is computed, or of each tensor in nested sequences."""
    if isinstance(values, torch.Tensor) and values.requires_grad:
        values.register_hook(call)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _on_gradient(value, call)
