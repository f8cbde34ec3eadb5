"""A loader's worker processes: how they get what they make to their rank, outlive its signals and end with it."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from common.batches.collators import Batch
from common.cli import UserError, one_line
from common.ranks.stopping import end_with

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
