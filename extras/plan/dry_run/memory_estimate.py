"""Estimate a rank's memory by running the run's own code on fake tensors, in one process that stands for rank 0.

The script's strategy shards the model over fake process groups; then forward and backward pass run on a pack, with
the optimiser's state there, and every storage is counted while it lives (`memory_tracker`). So recomputation, gathered
layers, buckets and accumulation are counted as they happen. Rank 0 has at least as many rows as any other rank;
Megatron-FSDP's buffers are padded to equal parts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.checkpoint.pinned_stager import share_of
from common.data.training_data import packs_per_step
from common.distributed.shards import local_shard
from common.distributed.world import World
from common.flags import with_flags
from common.hooks import extra
from common.models.layers.cpu import as_on_a_gpu
from common.training.arguments import RunArguments
from common.training.command_line import task_of
from common.training.task import Build
from extras.plan.dry_run.memory_tracker import (
    BACKWARD,
    ENDS,
    GATHERED,
    GRADIENTS,
    LAYERS,
    OPTIMIZER,
    WEIGHTS,
    MemoryTracker,
)

NODE = 8  # GPUs, as most have


class FakeWorld(World):
    """Rank 0 of `size` ranks; collectives return what they would if all ranks had rank 0's values.

    lent: contexts entered there (patches of a device's API, say) are left when the dry run ends.
    """

    is_dry_run = True
    lent: ExitStack

    def sum(self, values: Tensor) -> Tensor:
        return values

    def max(self, values: Tensor) -> Tensor:
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def broadcast_object(self, value):
        return value

    def gather(self, value, group: dist.ProcessGroup | None = None) -> list:
        return [value] * self.size

    def gather_to_main(self, value, group: dist.ProcessGroup | None = None) -> list:
        return [value] * self.size

    def raise_on_all(self, failure: Exception | None, group: dist.ProcessGroup | None = None) -> None:
        if failure is not None:
            raise failure


@contextmanager
def fake_world(size: int, cp_size: int = 1) -> Iterator[FakeWorld]:
    """A world of `size` ranks, in nodes of torchrun's or NODE ranks, in this process alone.

    UserError as `extras.speed.context_parallel.create_cp_groups`.
    """
    # Registers the backend "fake" (torch 2.11 to 2.13), whose collectives return at once.
    from common.compat import FakeStore

    node = int(os.environ.get("LOCAL_WORLD_SIZE", min(size, NODE)))
    world = FakeWorld(0, 0, size, torch.device("cpu"), local_size=node)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with ExitStack() as world.lent:
            if cp_size > 1:
                extra().create_cp_groups(world, cp_size)
            yield world
    finally:
        dist.destroy_process_group()


STATE = (WEIGHTS, GRADIENTS, OPTIMIZER)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a rank holds in a step on packs of `tokens` tokens.

    peak: on the device; kinds: the peak by kind (extras.plan.dry_run.memory_tracker). On the host: state_on_host,
    weights, gradients and moments; activations_on_host, at their peak; checkpoint_copy, while a checkpoint is written
    in the background.
    """

    tokens: int
    peak: int
    kinds: dict[str, int]
    state_on_host: int
    activations_on_host: int
    checkpoint_copy: int


class FakeRun:
    """A run built on fake tensors; `step` estimates its memory for a pack size.

    muon: what --optim muon costs beside; flops: of the last `step`, on this rank.
    """

    def __init__(self, args: RunArguments, world: World, build: Build, tracker: MemoryTracker):
        self.args, self.world, self.tracker = args, world, tracker
        with tracker.making(GRADIENTS):  # a strategy may have buckets for them
            self.strategy, self.built = build(args, world, {})
        self.task = task_of(args)(self.built, args, world)
        self.strategy.prepare_dry_run()
        self.weights = list(self.built.weights.parameters())
        self.parameters = [p for p in self.weights if p.requires_grad]
        self._label_weights()
        optimizer = self.built.optimizer(args.optimizer, self.strategy, world, args.precision.bf16)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # makes the state only, without Muon's communication
        with torch.no_grad():
            self.strategy.attach_gradients(self.parameters)
        with tracker.making(OPTIMIZER):
            optimizer.step()
        self.optimizer = optimizer
        self.muon = optimizer.cost() if args.optimizer.optim == "muon" else None  # extras.speed.muon.StepCost
        self.strategy.clear_gradients()
        for layer in self.built.model.layers:
            layer.register_forward_pre_hook(self._labels(LAYERS))
            layer.register_forward_hook(self._labels(ENDS))
        for _ in range(self.strategy.warmup_steps_before_timing):
            self.step(args.data.max_seq_length)

    def step(self, tokens: int) -> MemoryEstimate:
        """Run forward and backward pass on packs of `tokens` tokens."""
        tracker, args, strategy = self.tracker, self.args, self.strategy
        batch = self.task.example(tokens)
        packs = -(-packs_per_step(args.data, self.world.mesh, args.pack_tokens).most // self.world.mesh.dp_size)
        tracker.begin_peak()
        self.flops = packs * self.task.flops(self.task.counts([batch]))
        for number in reversed(range(min(packs, 2))):  # more than two micro-batches do not change the peak
            with strategy.micro_batch(last=number == 0):
                with tracker.making(ENDS):
                    loss = self.task.loss_sum(strategy.model, batch)
                with tracker.making(BACKWARD):
                    loss.backward()
            del loss
            tracker.put_all((LAYERS, ENDS, BACKWARD, GATHERED), GRADIENTS)
            self._label_weights()
        held = MemoryEstimate(
            tokens,
            max(tracker.peak, self._peak_of_optimizer()),
            {kind: 0 if kind in tracker.on_host else size for kind, size in tracker.at_peak.items()},
            sum(tracker.bytes[kind] for kind in STATE if kind in tracker.on_host),
            tracker.most_on_host,
            self._checkpoint_copy(),
        )
        strategy.clear_gradients()
        return held

    def _peak_of_optimizer(self) -> int:
        """Bytes on the device in Muon's step, when activations are gone."""
        state = sum(self.tracker.bytes[kind] for kind in STATE if kind not in self.tracker.on_host)
        return state + self.muon.temporary if self.muon else 0

    def _checkpoint_copy(self) -> int:
        """Bytes that this rank copies for a checkpoint."""
        state = {number: {"": weight} for number, weight in enumerate(self.weights)}
        state |= {weight: self.optimizer.state[weight] for weight in self.parameters}
        mine = share_of(state, self.world.rank, self.world.size)
        return sum(local_shard(tensor)[0].nbytes for of in mine.values() for tensor in of.values())

    def _label_weights(self) -> None:
        for tensor in (*self.strategy.compute_buffers(), *self.built.precision.computed_with()):
            self.tracker.put(tensor, GATHERED)
        for parameter in self.weights:  # may share the storage
            self.tracker.put(parameter, WEIGHTS)

    def _labels(self, kind: str) -> Callable:
        def hook(*_) -> None:
            self.tracker.kind = kind

        return hook


@contextmanager
def fake_run(args: RunArguments, build: Build) -> Iterator[FakeRun]:
    """The run of these flags on fake tensors, with a GPU's code paths unless --use_cpu."""
    args = with_flags(args, torch_compile=False, quant_stats=False, output_dir=args.checkpoint.output_dir or "dry_run")
    with ExitStack() as stack:
        world = stack.enter_context(fake_world(args.dry_run.world_size or 1, args.process.cp_size))
        if not args.process.use_cpu:
            stack.enter_context(as_on_a_gpu())
        on_host = STATE if args.strategy.state_on_host and not args.process.use_cpu else ()
        tracker = stack.enter_context(MemoryTracker(on_host))
        yield FakeRun(args, world, build, tracker)
