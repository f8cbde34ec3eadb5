"""Loader workers: stop signals, of the worker itself and of its rank while it waits; what a worker inherits."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from common.data.workers import deliver
from common.distributed.stopping import SIGNALS, StopRequest
from tests.training_fixtures import on_ranks


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
    assert gc.isenabled()
    request = threading.Timer(0.3, setattr, (stop, "requested", True))
    request.start()
    assert stop.next_unless_stopped(items) is None
    assert set(multiprocessing.active_children()) <= set(before)


class _Collected(IterableDataset):
    """Whether each object is gone once its worker has collected garbage, its own included."""

    def __init__(self, *objects: weakref.ref):
        self.objects = objects

    def __iter__(self):
        cycle = _Cycle()
        objects = (*self.objects, weakref.ref(cycle))
        del cycle
        gc.collect()
        yield torch.tensor([reference() is None for reference in objects])


class _Cycle:
    """Garbage that only the collector frees."""

    def __init__(self, *held: object):
        self.held = (self, *held)


def _trained(sharded: bool, x: torch.Tensor) -> torch.nn.Module:
    """A model after three steps of DDP or FSDP2."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)).to(x.device)
    if sharded:
        fully_shard(model, mesh=init_device_mesh(x.device.type, (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model, process_group=dist.new_group())
    _steps(model, x)
    return model


def _steps(model: torch.nn.Module, x: torch.Tensor) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fork_beside_models(sharded: bool, device: str, starts: int) -> None:
    """On a rank: workers beside a model that trains on, and one that is garbage, whose reducer alone holds its group.

    The steps after the workers have the losses of a model that had none. tests/gpu/test_workers.py: over NCCL.
    """
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    expected = _steps(_trained(sharded, x), x)
    gc.disable()  # the rank keeps its garbage, the workers have it
    lost = _trained(sharded, x)
    if not sharded:
        dist.destroy_process_group(lost.process_group)
    gone = weakref.ref(lost)
    _Cycle(lost)
    del lost
    model = _trained(sharded, x)
    for _ in range(starts):
        assert [item.tolist() for item in deliver(_Collected(gone), 2, 2, False)] == [[False, True]] * 2
    assert _steps(model, x) == expected
    dist.barrier()
    os._exit(0)  # as a worker does: a rank's own destructors are not what is tested


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_worker_destroys_nothing_that_it_inherits(sharded):
    """torch 2.13: ~ProcessGroupGloo, from ~Reducer, waits in a worker for threads of its rank, for ever."""
    codes, said = on_ranks(2, fork_beside_models, sharded, "cpu", 1)
    assert codes == [0, 0], "\n".join(said)
