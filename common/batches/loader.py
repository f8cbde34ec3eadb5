"""Deliver the batch plan to the ranks: which packs are whose, and where to resume.

Every process (rank or worker) walks through the same plan and builds only the packs that are its own, so nothing is
handed out, counted or kept in step between them, and any number of workers delivers the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from typing import NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from common.batches.collators import Batch
from common.batches.packing import BatchPlan, Pack, Position
from common.batches.workers import bundle, deliver, this_worker, unbundle
from common.cli import UserError
from common.files.token_store import TokenStore

Collator = Callable[[Pack, np.ndarray], Batch]


class TrainStep(NamedTuple):
    """One rank's share of a step.

    step: number of the step, from 0; micro_batches: G / dp_size batches; position: of the next step's first pack (what
    a checkpoint keeps); epoch: epochs done after this step, a fraction.
    """

    step: int
    micro_batches: list[Batch]
    position: Position
    epoch: float


class TrainLoader:
    """Iterate over the training steps of one data-parallel rank; every iteration starts at `start`.

    packs_per_step: G, packs in the global batch; rank r takes packs r, r + dp_size, … of each step's G; start: number
    of the first step and the position of its first pack; num_steps: end after that many (None: never);
    num_workers: processes (0: none); prefetch_factor: steps each of them holds ready.
    Raises UserError when G is no multiple of dp_size.
    """

    def __init__(
        self,
        store: TokenStore,
        plan: BatchPlan,
        collator: Collator,
        packs_per_step: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        start: tuple[int, Position] = (0, Position()),
        num_steps: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ):
        check_divisible(packs_per_step, dp_size)
        assert 0 <= dp_rank < dp_size
        plan.position_after(start[1], 0)  # a position of other data fails here, not in a worker
        self._steps = _TrainSteps(store, plan, collator, packs_per_step, dp_rank, dp_size, start, num_steps)
        self._workers = (num_workers, prefetch_factor, pin_memory)

    def __iter__(self) -> Iterator[TrainStep]:
        for item, (step, position, epoch) in deliver(self._steps, *self._workers):
            yield TrainStep(step, unbundle(item), Position(*position), epoch)


class EvalLoader:
    """Iterate over one rank's batches of a whole split: epoch 0 of `plan` (shuffle=False), dealt round robin.

    Every record comes exactly once whatever dp_size is, and with the same masks each time; all ranks yield equally
    many batches, those that have nothing left an empty one (all counts zero).
    """

    def __init__(
        self,
        store: TokenStore,
        plan: BatchPlan,
        collator: Collator,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
    ):
        assert 0 <= dp_rank < dp_size
        self._batches = _EvalBatches(store, plan, collator, dp_rank, dp_size)
        self._workers = (num_workers, prefetch_factor, pin_memory)

    def __iter__(self) -> Iterator[Batch]:
        for item, _ in deliver(self._batches, *self._workers):
            yield from unbundle(item)


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


class _TrainSteps(IterableDataset):
    """The steps of one rank; worker w of W builds those with (step - first step) % W == w."""

    def __init__(self, store, plan, collator, packs_per_step, dp_rank, dp_size, start, num_steps):
        self.store, self.plan, self.collator = store, plan, collator
        self.packs_per_step, self.dp_rank, self.dp_size = packs_per_step, dp_rank, dp_size
        self.start, self.num_steps = start, num_steps

    def __iter__(self):
        worker, workers = this_worker()
        first_step, position = self.start
        packs = self.plan.packs(position)
        for index in count() if self.num_steps is None else range(self.num_steps):
            of_step = list(islice(packs, self.packs_per_step))
            if index % workers == worker:
                mine = of_step[self.dp_rank :: self.dp_size]
                batches = [_build(self.store, self.collator, pack) for _, pack in mine]
                following = self.plan.position_after(of_step[-1][0], 1)
                # Plain values: pinned memory knows numbers and lists, not our classes.
                where = (following.epoch, following.window, following.pack_in_window)
                yield bundle(batches), (first_step + index, where, self.plan.epochs_before(following))


class _EvalBatches(IterableDataset):
    """The batches of one rank; worker w of W builds those with number % W == w."""

    def __init__(self, store, plan, collator, dp_rank, dp_size):
        self.store, self.plan, self.collator = store, plan, collator
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def __iter__(self):
        worker, workers = this_worker()
        packs = chain.from_iterable(
            (window.pack(number) for number in range(len(window))) for window in self.plan.windows(epoch=0)
        )
        for index in count():
            dealt = list(islice(packs, self.dp_size))  # one pack for each rank
            if not dealt:
                return
            if index % workers == worker:
                pack = dealt[self.dp_rank] if self.dp_rank < len(dealt) else Pack.empty()
                yield bundle([_build(self.store, self.collator, pack)]), ()


def _build(store: TokenStore, collator: Collator, pack: Pack) -> Batch:
    ids, _ = store.gather(pack.records, pack.starts, pack.lengths)
    return collator(pack, ids)
