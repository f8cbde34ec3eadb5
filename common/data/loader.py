"""Load batches: which rank and which worker builds which pack, and from where a run resumes.

Every process (rank or worker) walks through the same order and builds only its own packs. No communication is needed,
and any number of workers gives the same batches. A step's batches travel from a worker to its rank in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict
from itertools import chain, count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from common.data.collators import Batch, Collator
from common.data.crops import Pack
from common.data.packing import BatchPlan, Position
from common.data.packs_per_step import PacksPerStep
from common.data.workers import deliver
from common.distributed.stopping import StopRequest
from common.distributed.world import Mesh

ALIGNMENT = 64  # bytes, of the tensors in a bundle


def this_worker() -> tuple[int, int]:
    """Number of this worker process, and how many there are."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def bundle(batches: list[Batch]) -> tuple[torch.Tensor, list[dict]]:
    """All tensors of a step in one tensor of bytes, and the layout of each batch in it.

    Each tensor that a worker sends takes shared memory with an open file: a step of many micro-batches would exceed
    the limit of open files.
    """
    contents, parts, end = [], [], 0
    for batch in batches:
        layout: dict[str, Any] = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                data = value.contiguous().numpy().reshape(-1).view(np.uint8)
                layout[name] = [value.dtype, list(value.shape), end, data.size]
                parts.append((end, data))
                end += -(-data.size // ALIGNMENT) * ALIGNMENT
            else:
                layout[name] = value
        contents.append(layout)
    flat = np.empty(end, dtype=np.uint8)  # copied by NumPy: torch would start its thread pool
    for begin, data in parts:
        flat[begin : begin + data.size] = data
    return torch.from_numpy(flat), contents


def unbundle(bundle: tuple[torch.Tensor, list[dict]]) -> list[Batch]:
    """The batches of a bundle; their tensors are views of its one tensor."""
    flat, contents = bundle
    batches = []
    for layout in contents:
        batch: Any = {}  # a Batch
        for name, value in layout.items():
            if isinstance(value, list):
                dtype, shape, begin, size = value
                value = flat[begin : begin + size].view(dtype).view(shape)
            batch[name] = value
        batches.append(batch)
    return batches


ALONE = Mesh()


class Store(Protocol):
    """Random access to token ids: common.data.token_store.TokenStore and those of the extras."""

    def __len__(self) -> int: ...

    def gather(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n records, end to end, and their offsets int64 [n + 1]."""


class ProteinStore(Store, Protocol):
    def lengths(self, records: np.ndarray) -> np.ndarray:
        """Tokens of the records int64 [n], `<cls>` and `<eos>` included."""


class TrainStep(NamedTuple):
    """One data rank's share of a step.

    step: from 0; micro_batches: G(step) / dp_size batches, rounded up, fewer in the last step of the last epoch,
    equally many on every rank; position: where the next step begins, plain values (a checkpoint keeps them after
    `merge_positions`); epoch: epochs done after this step, a fraction; None if it depends on the other ranks.
    """

    step: int
    micro_batches: list[Batch]
    position: dict
    epoch: float | None


class StepCounts(NamedTuple):
    """Counts of micro-batches (`Counts`); num_computed: tokens that the layers run on, padding included."""

    num_targets: int
    num_tokens: int
    sum_squared_lengths: int
    num_sequences: int
    num_unknown: int
    set_pairs: int
    num_computed: int


class Order(Protocol):
    """An order of packs, of which step k takes G(k): of a batch plan (`PlannedOrder`) or streams (`StreamedOrder`)."""

    packs_per_step: PacksPerStep  # G

    def check_position(self, position: dict) -> None:
        """UserError for a position of other data: it fails here, not in a worker."""

    def most_workers(self, wanted: int) -> int:
        """At most `wanted` workers, so many as can share the work."""

    def own(self, position: dict, mesh: Mesh) -> dict:
        """The part of a global position that a data rank's steps change.

        UserError if the ranks cannot share the packs of a step.
        """

    def steps(
        self, mesh: Mesh, position: dict, first: int, numbers: Iterable[int], is_mine: Callable[[int], bool]
    ) -> Iterator[tuple[int, list[tuple[Pack, np.ndarray]], dict, float | None]]:
        """For each of `numbers`, counted from step `first`, that `is_mine`: the step, a data rank's packs and their
        tokens, what changes in its position, and the epochs done after it."""


class PlannedOrder:
    """The packs of a batch plan over a store; rank r takes packs r, r + dp_size, ... of each step's.

    end: where the last epoch ends (None: no end). The last step takes the remaining packs. Where the ranks cannot
    share a step's packs evenly, those without one get an empty pack, so that all ranks run equally many.
    """

    def __init__(self, store: Store, plan: BatchPlan, packs_per_step: int | PacksPerStep, end: Position | None = None):
        self.store, self.plan, self.end = store, plan, end
        self.packs_per_step = PacksPerStep.of(packs_per_step)

    def check_position(self, position: dict) -> None:
        self.plan.position_after(Position(**position), 0)

    def most_workers(self, wanted: int) -> int:
        return wanted

    def own(self, position: dict, mesh: Mesh) -> dict:
        return position

    def steps(self, mesh, position, first, numbers, is_mine):
        places = self.plan.places(Position(**position), self.end)
        for number in numbers:
            of_step = list(islice(places, self.packs_per_step.at(first + number)))
            if not of_step:
                return
            if is_mine(number):
                *last, _ = of_step[-1]
                following = self.plan.position_after(Position(*last), 1)
                packs = [window.pack(pack) for _, _, pack, window in of_step[mesh.dp_rank :: mesh.dp_size]]
                packs += [Pack.empty()] * (-(-len(of_step) // mesh.dp_size) - len(packs))
                taken = [(pack, read_tokens(self.store, pack)) for pack in packs]
                yield first + number, taken, asdict(following), self.plan.epochs_before(following)


class TrainLoader:
    """Iterate over the training steps of one data rank.

    first_step, position: where to begin, {} at the start of the data; num_steps: end after that many (None: at the end
    of the order); num_workers: processes (0: none); prefetch_factor: steps that each worker prepares ahead.
    UserError if the position does not belong to this order, or its ranks cannot share a step.
    """

    def __init__(
        self,
        order: Order,
        collator: Collator,
        mesh: Mesh = ALONE,
        first_step: int = 0,
        position: dict | None = None,
        num_steps: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        stop: StopRequest | None = None,
    ):
        position = position or {}
        order.check_position(position)
        self.position = dict(order.own(position, mesh))
        self._steps = _Steps(order, collator, mesh, first_step, self.position, num_steps)
        self._workers = (order.most_workers(num_workers), prefetch_factor, pin_memory, stop)

    def __iter__(self) -> Generator[TrainStep, None, None]:
        for bundled, (step, moved, epoch) in deliver(self._steps, *self._workers):
            self.position |= moved
            yield TrainStep(step, unbundle(bundled), dict(self.position), epoch)


def evaluation_batches(
    store: Store,
    plan: BatchPlan,
    collator: Collator,
    mesh: Mesh = ALONE,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
    stop: StopRequest | None = None,
) -> Generator[Batch, None, None]:
    """One data rank's batches of a whole split: epoch 0 of `plan` (shuffle=False), round-robin over the ranks.

    Every record comes exactly once for any dp_size, with the same masks each time. All ranks yield equally many
    batches; ranks without a pack yield an empty one (all counts zero). Workers end with the last batch, or when this
    generator is closed.
    """
    split = _Split(store, plan, collator, mesh)
    for bundled in deliver(split, num_workers, prefetch_factor, pin_memory, stop):
        yield from unbundle(bundled)


def merge_positions(parts: list[dict]) -> dict:
    """The global position from those of all ranks, each of which is current for its own streams only."""
    keys = {key: None for part in parts for key in part}
    return {key: max(part[key] for part in parts if key in part) for key in keys}


class _Steps(IterableDataset):
    """The steps of one rank; worker w of W builds those with (step - first step) % W == w."""

    def __init__(self, order: Order, collator: Collator, mesh: Mesh, first: int, position: dict, num: int | None):
        self.order, self.collator, self.mesh = order, collator, mesh
        self.first, self.position, self.num = first, dict(position), num

    def __iter__(self):
        worker, workers = this_worker()
        numbers = count() if self.num is None else range(self.num)
        steps = self.order.steps(self.mesh, self.position, self.first, numbers, lambda n: n % workers == worker)
        for step, packs, moved, epoch in steps:
            yield bundle([self.collator(pack, ids, step) for pack, ids in packs]), (step, moved, epoch)


class _Split(IterableDataset):
    """The batches of one rank over a whole split; worker w of W builds those with number % W == w."""

    def __init__(self, store: Store, plan: BatchPlan, collator: Collator, mesh: Mesh):
        self.store, self.plan, self.collator, self.mesh = store, plan, collator, mesh

    def __iter__(self):
        worker, workers = this_worker()
        rank, ranks = self.mesh.dp_rank, self.mesh.dp_size
        windows = self.plan.windows(epoch=0)
        packs = chain.from_iterable((window.pack(number) for number in range(len(window))) for window in windows)
        for number in count():
            if not (round_robin := list(islice(packs, ranks))):  # one pack for each rank
                return
            if number % workers == worker:
                pack = round_robin[rank] if rank < len(round_robin) else Pack.empty()
                yield bundle([self.collator(pack, read_tokens(self.store, pack))])


def read_tokens(store: Store, pack: Pack) -> np.ndarray:
    """The pack's tokens uint8 [T]."""
    return store.gather(pack.records, pack.starts, pack.lengths)[0]
