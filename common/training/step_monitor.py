"""What watches a run around its steps: profiler traces, slow ranks, and replicas that must stay equal."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile

from common.cli import MachineFault
from common.distributed.strategy import Strategy
from common.distributed.watchdog import SAVE
from common.distributed.world import World
from common.hooks import extra
from common.training.run_directory import TRACES
from common.training.run_logger import LogFlags, parse_steps

logger = logging.getLogger(__name__)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
_MIX = 0x9E3779B97F4A7C15  # an odd factor, so that positions differ in all bits


class StepMonitor:
    """Called around every step, by all ranks together. weights: those that the optimiser updates; output_dir: of the
    run, for traces."""

    def __init__(self, strategy: Strategy, weights: nn.Module, flags: LogFlags, output_dir: Path, world: World):
        self.every = flags.straggler_every
        self.stragglers = Stragglers(strategy, world) if self.every and world.size > 1 else None
        self.parameters, self.world, self.checked = [*weights.parameters()], world, -1
        self.profiler = StepProfiler(flags.profile_steps, world, output_dir)
        on_gpu = world.is_main and world.device.type == "cuda"
        self.kernels = extra().attention_kernels().KernelWatch() if on_gpu else None

    def before_step(self, step: int) -> None:
        """step: from 1."""
        self.profiler.before(step)
        if self.kernels and not self.profiler.profile:  # torch has one profiler at a time
            self.kernels.begin()
        if self.stragglers:
            self.stragglers.begin()

    def after_step(self, step: int, waited: float) -> dict:
        """The ranks' metrics if they were compared. waited: this rank's seconds for batches.

        MachineFault if replicas of the weights differ.
        """
        if self.stragglers:
            self.stragglers.end(waited)
        if self.kernels:
            self.kernels.end()
        self.profiler.after(step)
        if not self.stragglers or step % self.every:
            return {}
        metrics = self.stragglers.compare()
        self.check_replicas(step)
        return metrics

    def check_replicas(self, step: int) -> None:
        """MachineFault on all ranks if a rank's weights differ from its replicas'; also called before a save.

        Replicas take the same steps from the same all-reduced gradients, so they are bit-identical unless something
        failed silently: faulty memory or a faulty GPU on one rank, or a gradient that was not all-reduced.
        """
        if self.world.size == 1 or step == self.checked:
            return
        self.checked = step
        digests = self.world.gather((digest(self.parameters), socket.gethostname()))
        fault = None
        if suspects := outliers([sums for sums, _ in digests]):
            names = ", ".join(f"rank {rank} (host {digests[rank][1]})" for rank in suspects)
            fault = MachineFault(
                f"after step {step} the weights of {names} differ from those of their replicas: a fault of memory, "
                "GPU or network there; this state is not saved: run the same command again to resume from the last "
                "checkpoint, without that machine if it happens again"
            )
        self.world.raise_on_all(fault)

    def close(self, step: int) -> None:
        """After the last step: write a trace that is not complete."""
        self.profiler.after(step, ends=True)


# ---- replicas -----------------------------------------------------------------------------------------------


def outliers(digests: list[dict]) -> list[int]:
    """Ranks whose digest of a shard differs from the majority's; all of them in a tie."""
    values = defaultdict(dict)
    for rank, sums in enumerate(digests):
        for rows, value in sums.items():
            values[rows][rank] = value
    ranks = set()
    for by_rank in values.values():
        (majority, count), *others = Counter(by_rank.values()).most_common()
        tied = any(number == count for _, number in others)
        ranks |= {rank for rank, value in by_rank.items() if others and (tied or value != majority)}
    return sorted(ranks)


@torch.no_grad()
def digest(parameters: Iterable[Tensor]) -> dict[str, int]:
    """{rows: 64-bit checksum} of this rank's weights, the same on any device.

    rows: the rank's part of the sharded mesh dimensions ("1:3": part 3 of dimension 1), "" if not sharded. One pass
    over the weights, one device synchronisation.
    """
    keys, numbers = [], []
    for parameter in parameters:
        keys.append(_rows(parameter))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        # Sum over columns first: a change is missed only if another in the same column cancels it.
        bits = local.detach().contiguous().view(_INTEGERS[local.element_size()]).flatten(1 if local.dim() > 1 else 0)
        sums = bits.sum(0, dtype=torch.int64) if bits.dim() > 1 else bits.long()
        places = 2 * torch.arange(len(sums), device=sums.device) + 1  # empty if the rank has no rows
        numbers.append((sums * (places * (_MIX - (1 << 64)))).sum())
    checksums: dict[str, int] = defaultdict(int)
    for number, (key, value) in enumerate(zip(keys, torch.stack(numbers).tolist(), strict=True)):
        checksums[key] = (checksums[key] + value * (2 * number + 1)) % (1 << 64)
    return dict(checksums)


def _rows(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return ""
    coordinate = parameter.device_mesh.get_coordinate() or ()  # a rank outside the mesh has no shard
    pairs = zip(parameter.placements, coordinate, strict=True)
    return ",".join(f"{n}:{part}" for n, (placement, part) in enumerate(pairs) if isinstance(placement, Shard))


# ---- slow ranks ---------------------------------------------------------------------------------------------


class Stragglers:
    """Time each rank's own work in a step, without its waits for other ranks.

    All ranks finish a step together, so step times do not show who is slow. A rank's own time is its wait for batches
    and the time from there to the last gradient of the backward pass (the first parameter's).
    DistributedDataParallel all-reduces gradients meanwhile and waits for other ranks only after that. With sharded
    layers ranks wait in every all-gather and reduce-scatter: those waits are subtracted (`_time_waits`; for other
    strategies `_timed`). Times are the host's on a CPU, CUDA events on a GPU, read after the step has synchronised.
    """

    def __init__(self, strategy: Strategy, world: World):
        self.world = world
        self.seconds, self.steps = 0.0, 0  # since the last comparison
        # Times in this step: floats, or CUDA events.
        self._begin: Any = None
        self._end: Any = None
        self._wait_since: Any = None
        self._waits: list[tuple] = []  # (from, to)
        self._waits_before_end: int | None = None  # number of waits before the last gradient
        strategy.last_gradient.register_post_accumulate_grad_hook(self._on_last_gradient)
        for module in strategy.model.modules():
            if isinstance(module, FSDPModule):
                self._time_waits(module)
        for owner, name in strategy.blocking_collectives():
            setattr(owner, name, self._timed(getattr(owner, name)))

    def begin(self) -> None:
        self._begin, self._end, self._wait_since, self._waits = self._now(), None, None, []
        self._waits_before_end = None

    def end(self, waited: float) -> None:
        """After a step. waited: seconds that this rank waited for batches."""
        self.seconds += waited
        self.seconds += self._between(self._begin, self._end or self._now())
        self.seconds -= sum(self._between(*wait) for wait in self._waits[: self._waits_before_end])
        self.steps += 1
        self._begin = None

    def compare(self) -> dict:
        """Metrics about the ranks' seconds a step since the last comparison. All ranks together."""
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

    def _on_last_gradient(self, parameter: Tensor) -> None:
        self._end, self._waits_before_end = self._now(), len(self._waits)  # once per micro-batch: the last one counts

    def _time_waits(self, module: nn.Module) -> None:
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
        if self._begin is not None and self._wait_since is None:
            self._wait_since = self._now()

    def _wait_ends(self, _=None) -> None:
        if self._wait_since is not None:
            self._waits.append((self._wait_since, self._now()))
            self._wait_since = None

    def _now(self) -> Any:
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        if self.world.device.type != "cuda":
            return end - begin
        end.synchronize()  # returns at once: the step's loss has been read
        return begin.elapsed_time(end) / 1000


def _on_gradient(values, call: Callable) -> None:
    """Call when the gradient of a tensor is computed, or of each tensor in nested sequences."""
    if isinstance(values, Tensor) and values.requires_grad:
        values.register_hook(call)
    elif isinstance(values, (tuple, list)):
        for value in values:
            _on_gradient(value, call)


# ---- traces -------------------------------------------------------------------------------------------------


class StepProfiler:
    """--profile_steps A-B: a torch profiler trace of these steps, for chrome://tracing or ui.perfetto.dev."""

    def __init__(self, steps: str | None, world: World, output_dir: Path):
        self.steps = parse_steps(steps) if steps else range(0)
        self.world, self.directory = world, (output_dir / TRACES).parent
        self.profile: profile | None = None
        self.first = 0

    def before(self, step: int) -> None:
        if step in self.steps and self.profile is None:
            self.first = step  # not the range's first if the run resumed inside it
            activities = [ProfilerActivity.CPU]
            if self.world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=activities)
            self.profile.start()

    def after(self, step: int, ends: bool = False) -> None:
        """After the last of these steps, or when the run `ends` before it, write the trace. Collective."""
        if self.profile is None or not (ends or step >= self.steps[-1]):
            return
        trace, self.profile = self.profile, None
        self.world.watch.mark(SAVE, step)
        trace.stop()
        path = self.directory / f"rank{self.world.rank}-steps-{self.first}-{step}.json.gz"
        with self.world.raise_together():
            self.directory.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(path))
        logger.info("Trace of steps %d-%d: %s (one per rank)", self.first, step, path)
