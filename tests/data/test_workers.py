"""Loader workers and stop signals: those of the worker itself, and those that end its rank's wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import torch
from torch.utils.data import IterableDataset

from common.data.workers import deliver
from common.distributed.stopping import SIGNALS, StopRequest


class _Signals(IterableDataset):
    """The stop signals that its worker ignores, then those that it blocks, then nothing for a while."""

    def __iter__(self):
        yield torch.tensor([number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN])
        yield torch.tensor(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        time.sleep(3)


def _signal_worker_when_forked(told) -> None:
    stop = StopRequest()
    stop.save_first()
    stop.install_handlers()
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    items = deliver(_Signals(), 1, 2, False, stop)
    told.send((next(items).tolist(), next(items).tolist(), stop.requested))


def test_signal_to_a_new_worker_is_not_read_as_one_for_its_rank():
    listener, told = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_signal_worker_when_forked, args=(told,))
    process.start()
    assert listener.recv() == ([*SIGNALS], [], False)
    process.join()
    assert process.exitcode == 0


def test_stop_ends_the_wait_for_an_item():
    stop, before = StopRequest(), multiprocessing.active_children()
    items = deliver(_Signals(), 1, 2, False, stop)
    assert stop.next_unless_stopped(items).tolist() == [*SIGNALS]
    assert stop.next_unless_stopped(items) is not None
    request = threading.Timer(0.3, setattr, (stop, "requested", True))
    request.start()
    assert stop.next_unless_stopped(items) is None
    assert set(multiprocessing.active_children()) <= set(before)
