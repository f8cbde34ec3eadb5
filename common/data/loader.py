"""Deliver packs to the ranks: which are whose, where to resume, and which worker makes them.

Every process (rank or worker) walks through the same order and builds only what is its own, so nothing is handed out,
counted or kept in step between them, and any number of workers delivers the same batches.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain, count, islice
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.cli import UserError, one_line
from common.data.collators import Batch, Collator
from common.data.crops import Pack
from common.data.packing import BatchPlan, Position
from common.distributed.stopping import end_with
from common.distributed.world import Mesh

# A loader's worker processes: how they get what they make to their rank, outlive its signals and end with it.

ALIGNMENT = 64  # bytes, of the tensors in a bundle


def this_worker() -> tuple[int, int]:
    info = get_worker_info()
    return (info.id, info.num_workers) if info else (0, 1)


def deliver(dataset: IterableDataset, num_workers: int, prefetch_factor: int, pin_memory: bool) -> Iterator:
    """The dataset's items in order: DataLoader takes from its workers in turn, as they take the steps."""
    if num_workers == 0:
        yield from DataLoader(dataset, batch_size=None, collate_fn=_as_it_is, pin_memory=pin_memory)
        return
    loader = DataLoader(
        _WithErrors(dataset),
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        worker_init_fn=partial(_outlive_signals, os.getpid()),
        # A fork costs nothing here (the data are memory-mapped); it isn't safe where system libraries start threads.
        multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
    )
    iterator = iter(loader)
    # Workers ignore SIGTERM, which is also how Python ends the ones that are left at exit: tell them before that.
    alive = weakref.ref(iterator)
    stop = atexit.register(lambda: _stop_workers(alive()))
    try:
        for item in iterator:
            if isinstance(item, UserError):
                raise item
            yield item
    except (OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # a worker's own, as DataLoader passes it on
        # It was gone while it handed a tensor over, which must not pass for bad input.
        raise RuntimeError(f"a DataLoader worker is gone ({one_line(error)})") from error
    finally:
        atexit.unregister(stop)
        _stop_workers(iterator)


class _WithErrors(IterableDataset):
    """The dataset's items; a UserError comes as one, for DataLoader would fold a worker's traceback into it."""

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset

    def __iter__(self):
        try:
            yield from self.dataset
        except UserError as error:
            yield error


def _as_it_is(item):
    return item


def _outlive_signals(parent: int, worker_id: int) -> None:
    """Schedulers signal the whole process group: the main process finishes its step and saves, with its workers."""
    end_with(parent)
    gc.enable()  # the main process may do without
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _but_a_lost_connection


def _but_a_lost_connection(kind, error, stack) -> None:
    """A main process that is told to stop while it takes a batch hangs up on the thread that hands it over."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, stack)


def _stop_workers(iterator) -> None:
    if iterator is None:
        return
    iterator._shutdown_workers()  # waits for each of them a few seconds
    for worker in iterator._workers:
        if worker.is_alive():  # hangs in a read, say; the process could not end before it does
            worker.kill()
            worker.join()


def bundle(batches: list[Batch]) -> tuple[torch.Tensor, list[dict]]:
    """One tensor of bytes for all tensors of a step, and what is where in it.

    A worker sends each tensor through shared memory of its own, with an open file each: a step of many micro-batches
    would run into the limit of open files.
    """
    contents, parts, end = [], [], 0
    for batch in batches:
        layout = {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor):
                data = value.contiguous().view(-1).view(torch.uint8).numpy()
                layout[name] = [value.dtype, list(value.shape), end, data.size]
                parts.append((end, data))
                end += -(-data.size // ALIGNMENT) * ALIGNMENT
            else:
                layout[name] = value
        contents.append(layout)
    flat = np.empty(end, dtype=np.uint8)  # copied by NumPy: torch would wake its thread pool
    for begin, data in parts:
        flat[begin : begin + data.size] = data
    return torch.from_numpy(flat), contents


def unbundle(bundle: tuple[torch.Tensor, list[dict]]) -> list[Batch]:
    """The batches of a bundle; their tensors are views of its one tensor."""
    flat, contents = bundle
    batches = []
    for layout in contents:
        batch = {}
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

    def __init__(self, store: Store, plan: BatchPlan, packs_per_step: int, end: Position | None = None):
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
    store: Store,
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
            if not (dealt := list(islice(packs, ranks))):  # one pack for each rank
                return
            if number % workers == worker:
                pack = dealt[rank] if rank < len(dealt) else Pack.empty()
                yield bundle([self.collator(pack, read(self.store, pack))])


def read(store: Store, pack: Pack) -> np.ndarray:
    """The pack's tokens uint8 [T]."""
    return store.gather(pack.records, pack.starts, pack.lengths)[0]
