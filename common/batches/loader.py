"""Deliver packs to the ranks: which are whose, where to resume, and which worker makes them.

Every process (rank or worker) walks through the same order and builds only what is its own, so nothing is handed out,
counted or kept in step between them, and any number of workers delivers the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from itertools import chain, count, islice
from typing import NamedTuple, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from common.batches.collators import Batch
from common.batches.packing import BatchPlan, Position
from common.batches.windows import Pack
from common.batches.workers import bundle, deliver, this_worker, unbundle
from common.cli import UserError
from common.files.token_store import TokenStore
from common.ranks.world import Mesh

Collator = Callable[[Pack, np.ndarray], Batch]
ALONE = Mesh()


class TrainStep(NamedTuple):
    """One data rank's share of a step.

    step: number of the step, from 0; micro_batches: G / dp_size batches, in the last step of the last epoch fewer, as
    many on every rank; position: where the next step begins, plain values (what a checkpoint keeps, after
    `merge_positions`); epoch: epochs done after this step, a fraction; None where only the ranks together know.
    """

    step: int
    micro_batches: list[Batch]
    position: dict
    epoch: float | None


class Order(Protocol):
    """An order of packs, of which each step takes G: a batch plan's (`PlannedOrder`) or streams' (`StreamedOrder`)."""

    packs_per_step: int  # G

    def check_position(self, position: dict) -> None:
        """UserError where there is no such position: one of other data fails here, not in a worker."""

    def most_workers(self, wanted: int) -> int:
        """Of so many workers, those that can share the work."""

    def own(self, position: dict, mesh: Mesh) -> dict:
        """Of a position of all ranks, the part that a data rank's steps move."""

    def steps(
        self, mesh: Mesh, position: dict, first: int, numbers: Iterator[int], mine: Callable[[int], bool]
    ) -> Iterator[tuple[int, list[tuple[Pack, np.ndarray]], dict, float | None]]:
        """For each of `numbers`, counted from the step `first` on, that is `mine`: the step, what a data rank takes of
        it (packs and their tokens), what is new of its position after it, and the epochs done by then."""


class PlannedOrder:
    """The packs of a batch plan over a store; rank r takes packs r, r + dp_size, ... of each step's G.

    end: where the last epoch ends (None: there is no last one). The step before it takes what is left, and ranks for
    which nothing is left an empty pack: all ranks run equally many.
    """

    def __init__(self, store: TokenStore, plan: BatchPlan, packs_per_step: int, end: Position | None = None):
        self.store, self.plan, self.packs_per_step, self.end = store, plan, packs_per_step, end

    def check_position(self, position: dict) -> None:
        self.plan.position_after(Position(**position), 0)

    def most_workers(self, wanted: int) -> int:
        return wanted

    def own(self, position: dict, mesh: Mesh) -> dict:
        return position

    def steps(self, mesh, position, first, numbers, mine):
        places = self.plan.places(Position(**position), self.end)
        for number in numbers:
            of_step = list(islice(places, self.packs_per_step))
            if not of_step:
                return
            if mine(number):
                *last, _ = of_step[-1]
                following = self.plan.position_after(Position(*last), 1)
                packs = [window.pack(pack) for _, _, pack, window in of_step[mesh.dp_rank :: mesh.dp_size]]
                packs += [Pack.empty()] * (-(-len(of_step) // mesh.dp_size) - len(packs))
                taken = [(pack, read(self.store, pack)) for pack in packs]
                yield first + number, taken, asdict(following), self.plan.epochs_before(following)


class TrainLoader:
    """Iterate over the training steps of one data rank.

    mesh: whose share; first_step, position: of the first step, {} at the beginning; num_steps: end after that many
    (None: where the order does); num_workers: processes (0: none); prefetch_factor: steps each of them holds ready.
    Raises UserError when G is no multiple of dp_size, or the position is not one of this order.
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
    ):
        check_divisible(order.packs_per_step, mesh.dp_size)
        position = position or {}
        order.check_position(position)
        self.position = dict(order.own(position, mesh))
        self._steps = _Steps(order, collator, mesh, first_step, self.position, num_steps)
        self._workers = (order.most_workers(num_workers), prefetch_factor, pin_memory)

    def __iter__(self) -> Iterator[TrainStep]:
        for made, (step, moved, epoch) in deliver(self._steps, *self._workers):
            self.position |= moved
            yield TrainStep(step, unbundle(made), dict(self.position), epoch)


def evaluation_batches(
    store: TokenStore,
    plan: BatchPlan,
    collator: Collator,
    mesh: Mesh = ALONE,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    pin_memory: bool = False,
) -> Generator[Batch, None, None]:
    """One data rank's batches of a whole split: epoch 0 of `plan` (shuffle=False), dealt round robin.

    Every record comes exactly once whatever dp_size is, and with the same masks each time; all ranks yield equally
    many batches, those that have nothing left an empty one (all counts zero). Workers as those of `TrainLoader`: they
    end with the last batch, or when this is closed.
    """
    split = _Split(store, plan, collator, mesh)
    for made in deliver(split, num_workers, prefetch_factor, pin_memory):
        yield from unbundle(made)


def check_divisible(packs_per_step: int, dp_size: int) -> None:
    """Raise UserError, with numbers that work, unless `packs_per_step` packs can be dealt evenly to the ranks."""
    if packs_per_step < 1 or packs_per_step % dp_size:
        sizes = ", ".join(str(n) for n in range(1, packs_per_step + 1) if packs_per_step % n == 0)
        lower = packs_per_step // dp_size * dp_size
        batches = " or ".join(str(n) for n in (lower, lower + dp_size) if n > 0)
        raise UserError(
            f"a global batch of {packs_per_step} packs does not divide among {dp_size} data-parallel ranks: "
            f"use {sizes or 'no'} ranks, or {batches} packs a step (ranks x accumulation steps)"
        )


def merge_positions(parts: list[dict]) -> dict:
    """One position for all ranks: each knows how far its own streams are."""
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
            yield bundle([self.collator(*pack) for pack in packs]), (step, moved, epoch)


class _Split(IterableDataset):
    """The batches of one rank over a whole split; worker w of W builds those with number % W == w."""

    def __init__(self, store: TokenStore, plan: BatchPlan, collator: Collator, mesh: Mesh):
        self.store, self.plan, self.collator, self.mesh = store, plan, collator, mesh

    def __iter__(self):
        worker, workers = this_worker()
        rank, ranks = self.mesh.dp_rank, self.mesh.dp_size
        windows = self.plan.windows(epoch=0)
        packs = chain.from_iterable((window.pack(number) for number in range(len(window))) for window in windows)
        for number in count():
            if not (dealt := list(islice(packs, ranks))):  # one pack for each rank
                return
            if number % workers == worker:
                pack = dealt[rank] if rank < len(dealt) else Pack.empty()
                yield bundle([self.collator(pack, read(self.store, pack))])


def read(store: TokenStore, pack: Pack) -> np.ndarray:
    """The pack's tokens uint8 [T]."""
    return store.gather(pack.records, pack.starts, pack.lengths)[0]
