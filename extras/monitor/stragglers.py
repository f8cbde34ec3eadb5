"""Which rank is slow: what each one's own work takes in a step, without waiting for the others.

All ranks finish a step together, so step times tell nothing. What is the rank's own: the wait for its batch, and from
having the batch until the gradient of the first parameter, the last to come, is there. DistributedDataParallel
exchanges gradients meanwhile, and waits for the other ranks after that. Where layers are sharded, ranks wait for each
other in every layer, when its weights are gathered and its gradients dealt out: this is taken off (`_bracket`, and
where a strategy says in which methods it waits, `_timed`).
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
    """Adds up this rank's own seconds (of the device on a GPU: events, read after the step's own synchronisation)."""

    def __init__(self, strategy: Strategy, world: World, every: int):
        """Compare the ranks every so many steps; 0, or a single rank: never."""
        self.world, self.every = world, every if world.size > 1 else 0
        self.seconds, self.steps = 0.0, 0
        self._begin = self._end = self._waits_since = None
        self._waits: list[tuple] = []  # (from, to), in this step
        self._waits_before_end = None  # how many of them
        if self.every:
            strategy.last_gradient.register_post_accumulate_grad_hook(self._gradients_are_there)
            for module in strategy.model.modules():
                if isinstance(module, FSDPModule):
                    self._bracket(module)
            for owner, name in strategy.exchanges():
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
        """After a step: {}, or when it is time (all ranks call together) what the metrics say of the ranks."""
        if not self.every or step % self.every:
            return {}
        mine = (self.seconds / max(self.steps, 1), socket.gethostname())
        steps, self.seconds, self.steps = self.steps, 0.0, 0
        everyone: list[tuple[float, str]] = self.world.gather(mine)
        seconds = [s for s, _ in everyone]
        slowest = max(range(len(seconds)), key=seconds.__getitem__)
        found = {
            "rank_seconds_min": min(seconds),
            "rank_seconds_median": statistics.median(seconds),
            "rank_seconds_max": seconds[slowest],
            "slowest_rank": slowest,
            "slowest_host": everyone[slowest][1],
        }
        logger.info(
            "Own work of a rank, %d steps: min %.4f, median %.4f, max %.4f s a step; slowest: rank %d (%s)",
            steps,
            *found.values(),
        )
        return found

    def _gradients_are_there(self, parameter) -> None:
        self._end, self._waits_before_end = self._now(), len(self._waits)  # once a micro-batch: the last one stays

    def _bracket(self, module: FSDPModule) -> None:
        """Note when this module waits: hooks of ours around the hooks by which `fully_shard` exchanges.

        Hooks run in the order in which they are registered, or in the opposite one with `prepend`, so ours, which come
        after, can be the first and the last. Forward: around the gathering before the module. Backward: around the
        gathering when the gradient of its output is there, and the dealing out when that of its input is.
        """
        begins, ends = torch.compiler.disable(self._wait_begins), torch.compiler.disable(self._wait_ends)
        on_gradient = torch.compiler.disable(_on_gradient)

        def before_gathering(module, inputs) -> None:
            begins()
            on_gradient(inputs, ends)

        def after_gathering(module, inputs) -> None:
            on_gradient(inputs, begins)
            ends()

        module.register_forward_pre_hook(before_gathering, prepend=True)
        module.register_forward_pre_hook(after_gathering)
        module.register_forward_hook(lambda module, inputs, output: on_gradient(output, begins), prepend=True)
        module.register_forward_hook(lambda module, inputs, output: on_gradient(output, ends))

    def _timed(self, method: Callable) -> Callable:
        """The method, with a note of when it begins and ends."""

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
        end.synchronize()  # has happened: the step's loss has been read
        return begin.elapsed_time(end) / 1000


def _on_gradient(values, call: Callable) -> None:
    """Call when the gradients of these are computed: a tensor, or those in a sequence, of sequences too."""
    if isinstance(values, torch.Tensor) and values.requires_grad:
        values.register_hook(call)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _on_gradient(value, call)
