"""Items of a data set from worker processes, and the end of these processes.

They are forked with the stop signals blocked, and ignore them: their rank needs them to finish a step and save. They
end with their rank. The wait for an item ends when a signal asks the rank to stop. They destroy nothing that they have
inherited, where ~Reducer and ~ProcessGroup wait for a rank's threads: `os._exit` ends them, their garbage is theirs.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from common.cli import UserError, one_line
from common.compat import stop_loader_workers
from common.distributed.stopping import StopRequest, die_with_parent, ignore_signals, signals_blocked

CHECK_S = 0.1  # how often a wait for a worker looks for a stop signal
JOIN_S = 2.0  # that a worker has for the item after the last one that is wanted


def deliver(
    dataset: IterableDataset, num_workers: int, prefetch_factor: int, pin_memory: bool, stop: StopRequest | None = None
) -> Iterator:
    """The dataset's items in order. DataLoader reads its workers in turn, and they build the steps in turn.

    stop: ends a wait for a worker (`next_unless_stopped`). Without workers the items are built here: a stop waits.
    """
    if num_workers == 0:
        yield from DataLoader(dataset, batch_size=None, collate_fn=_identity, pin_memory=pin_memory)
        return
    loader = DataLoader(
        _ErrorsAsItems(dataset),
        batch_size=None,
        collate_fn=_identity,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        worker_init_fn=partial(_start_worker, os.getpid()),
        # A fork is cheap (memory-mapped data, no imports), but unsafe where system libraries start threads (macOS).
        multiprocessing_context="fork" if sys.platform == "linux" else "spawn",
    )
    collects = gc.isenabled()
    gc.disable()  # until a worker has frozen what it inherits (`_start_worker`)
    try:
        with signals_blocked():
            iterator = iter(loader)
    finally:
        if collects:
            gc.enable()
    # Workers ignore SIGTERM, by which Python ends remaining workers at exit: stop them earlier.
    at_exit = atexit.register(partial(stop_loader_workers, iterator))
    try:
        with closing(_fetched(iterator, stop)) as items:
            for item in items:
                if isinstance(item, UserError):
                    raise item
                yield item
    except (OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is None:
            raise  # raised in a worker and passed on by DataLoader
        # A worker died while it sent a tensor, which must not be reported as bad input.
        raise RuntimeError(f"a DataLoader worker is gone ({one_line(error)})") from error
    finally:
        atexit.unregister(at_exit)
        stop_loader_workers(iterator)


def _fetched(iterator: Iterator, stop: StopRequest | None) -> Generator:
    """The items of a DataLoader's iterator, fetched by a thread, one ahead.

    Its `next` asks a worker for the file that holds a tensor, without a timeout. If the worker hangs, the thread is
    left behind; it ends when the worker is killed.
    """
    asked: SimpleQueue[bool] = SimpleQueue()
    fetched: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def fetch() -> None:
        while asked.get():
            try:
                fetched.put((next(iterator), None))
            except BaseException as error:
                fetched.put((None, error))

    thread = threading.Thread(target=fetch, name="batch fetcher", daemon=True)
    thread.start()
    asked.put(True)
    try:
        while True:
            item, error = _when_there(fetched, stop)
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            asked.put(True)
            yield item
    finally:
        asked.put(False)
        thread.join(JOIN_S)


def _when_there(queue: SimpleQueue, stop: StopRequest | None) -> Any:
    while True:
        try:
            return queue.get(timeout=CHECK_S)
        except Empty:
            if stop:
                stop.check()


class _ErrorsAsItems(IterableDataset):
    """The dataset's items; a UserError is one of them, since DataLoader would add a worker's traceback to it."""

    def __init__(self, dataset: IterableDataset):
        self.dataset = dataset

    def __iter__(self):
        try:
            yield from self.dataset
        except UserError as error:
            yield error


def _identity(item):
    return item


def _start_worker(parent: int, worker_id: int) -> None:
    """Schedulers signal the whole process group, but the main process needs its workers to finish a step and save."""
    die_with_parent(parent)
    gc.freeze()
    gc.enable()
    ignore_signals()
    sys.excepthook = _hide_lost_connection


def _hide_lost_connection(kind, error, stack) -> None:
    """No traceback if the main process, stopped by a signal, closes the connection while a batch is being sent."""
    if not issubclass(kind, ConnectionError | EOFError):
        sys.__excepthook__(kind, error, stack)
