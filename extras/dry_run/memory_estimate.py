"""What a rank of a run holds in memory, found by the run's own code on tensors without values.

The script's own strategy deals out the model, over groups that exchange nothing; then forward and backward pass run on
a pack, with AdamW's moments there, and every storage is counted for as long as it lives (`live_bytes`). So
recomputation, gathered layers, buckets and accumulation count as what they are. Rank 0 has at least as many rows as
any other; Megatron-FSDP's buffers are padded to equal parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.strategy import Strategy, local_rows
from common.distributed.world import World
from common.flags import with_flags
from common.models.layers.cpu import as_on_a_gpu
from common.training.arguments import RunArguments
from common.training.optim import build_optimizer
from common.training.pinned_stager import share_of
from common.training.registry import task_of
from common.training.task import BuiltModel
from extras.dry_run.memory_tracker import BACKWARD, ENDS, GATHERED, GRADIENTS, LAYERS, OPTIMIZER, WEIGHTS, LiveBytes

# One process in the place of rank 0 of many: its mesh and groups are those of the run, and nothing is exchanged.
#
# With tensors that have no values (extras.dry_run.memory_tracker) a strategy deals a model out as it would, on a
# laptop.


class RehearsedWorld(World):
    """Rank 0 of `size`, which agrees with itself: the others would say the same.

    lent: what is entered there (stand-ins for a device, say) is left as the rehearsal ends.
    """

    rehearsed = True
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
def rehearsal(size: int, cp_size: int = 1) -> Iterator[RehearsedWorld]:
    """The world of a run on `size` ranks, in this process alone. UserError as `World.share_packs`."""
    # Registers the backend "fake" (torch 2.11 to 2.13), whose collectives return at once.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = RehearsedWorld(0, 0, size, torch.device("cpu"), local_size=size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with ExitStack() as world.lent:
            world.share_packs(cp_size)
            yield world
    finally:
        dist.destroy_process_group()


Build = Callable[[RunArguments, World], tuple[Strategy, BuiltModel]]
STATE = (WEIGHTS, GRADIENTS, OPTIMIZER)


@dataclass(frozen=True)
class Held:
    """What a rank holds in a step on packs of so many tokens; bytes.

    peak: of the device, at most; kinds: those of extras.dry_run.memory_tracker, then. In host memory: state_on_host,
    weights, gradients and moments; activations_on_host, at most; checkpoint_copy, while one is written in the
    background.
    """

    tokens: int
    peak: int
    kinds: dict[str, int]
    state_on_host: int
    activations_on_host: int
    checkpoint_copy: int


class Rehearsed:
    """A run that is built, its tensors without values: what it holds on a pack, as often as asked."""

    def __init__(self, args: RunArguments, world: World, build: Build, counted: LiveBytes):
        self.args, self.world, self.counted = args, world, counted
        with counted.making(GRADIENTS):  # a strategy may have buckets for them
            self.strategy, self.built = build(args, world)
        self.task = task_of(args)(self.built, args, world)
        self.strategy.rehearse()
        self.parameters = [p for p in self.built.weights.parameters() if p.requires_grad]
        self._tell_weights()
        optimizer = build_optimizer(self.built.weights, args.optimizer)
        with torch.no_grad():
            self.strategy.hold_gradients(self.parameters)
        with counted.making(OPTIMIZER):
            optimizer.step()
        self.optimizer = optimizer
        self.strategy.clear_gradients()
        for layer in self.built.model.layers:
            layer.register_forward_pre_hook(self._enters(LAYERS))
            layer.register_forward_hook(self._enters(ENDS))
        for _ in range(self.strategy.warmup_steps_before_timing):
            self.step(args.data.max_seq_length)

    def step(self, tokens: int) -> Held:
        """A step's passes on packs of so many tokens."""
        counted, args, strategy = self.counted, self.args, self.strategy
        batch = self.task.example(tokens)
        if args.data.packs_per_step:
            packs = max(1, args.data.packs_per_step // self.world.mesh.dp_size)
        else:
            packs = args.data.gradient_accumulation_steps
        counted.begin_peak()
        for number in reversed(range(min(packs, 2))):  # what the second adds up to, more do not change
            with strategy.micro_batch(last=number == 0):
                with counted.making(ENDS):
                    loss = self.task.loss_sum(strategy.model, batch)
                with counted.making(BACKWARD):
                    loss.backward()
            del loss
            counted.put_all((LAYERS, ENDS, BACKWARD, GATHERED), GRADIENTS)
            self._tell_weights()
        held = Held(
            tokens,
            counted.peak,
            {kind: 0 if kind in counted.on_host else size for kind, size in counted.at_peak.items()},
            sum(counted.bytes[kind] for kind in STATE if kind in counted.on_host),
            counted.most_on_host,
            self._copied(),
        )
        strategy.clear_gradients()
        return held

    def _copied(self) -> int:
        """Bytes that this rank copies when the run is saved."""
        state = {number: {"": weight} for number, weight in enumerate(self.parameters)}
        state |= {weight: self.optimizer.state[weight] for weight in self.parameters}
        mine = share_of(state, self.world.rank, self.world.size)
        return sum(local_rows(tensor)[0].nbytes for of in mine.values() for tensor in of.values())

    def _tell_weights(self) -> None:
        for tensor in (*self.strategy.computed_with(), *self.built.precision.computed_with()):
            self.counted.put(tensor, GATHERED)
        for parameter in self.parameters:  # which may lie in the same storage
            self.counted.put(parameter, WEIGHTS)

    def _enters(self, kind: str) -> Callable:
        def hook(*_) -> None:
            self.counted.kind = kind

        return hook


@contextmanager
def rehearsed(args: RunArguments, build: Build) -> Iterator[Rehearsed]:
    """The run of these flags. On a GPU's ways, unless --use_cpu."""
    args = with_flags(args, torch_compile=False, quant_stats=False, output_dir=args.checkpoint.output_dir or "dry_run")
    with ExitStack() as stack:
        world = stack.enter_context(rehearsal(args.dry_run.world_size or 1, args.process.cp_size))
        if not args.process.use_cpu:
            stack.enter_context(as_on_a_gpu())
        on_host = STATE if args.strategy.state_on_host and not args.process.use_cpu else ()
        counted = stack.enter_context(LiveBytes(on_host))
        yield Rehearsed(args, world, build, counted)
