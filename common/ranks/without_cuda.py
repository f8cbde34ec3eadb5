"""What megatron-fsdp 0.6.1 calls of CUDA, where nothing is computed: no-op stand-ins, lent while a rehearsal lasts.

None of what they stand for holds memory or computes: streams and events order work, the device's number names it, a
product that NCCL takes as it adds (PREMUL_SUM) and a group of exchanges that it sends as one are in its kernels. So a
rank holds the same without them, but for what CUDA's allocator keeps until another stream is done with it. They are
lent on a machine that has a GPU too, which is then not touched.

On ranks of a CPU that do compute, tests build on the same streams and events (tests/megatron_on_cpu.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist


class Event:
    """Of CUDA, or work of a group: it is done."""

    def wait(self, stream=None) -> None:
        pass


class Stream:
    """Work is done as it is given."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other) -> None:
        pass

    def record_event(self, event=None) -> Event:
        return Event()


# Of torch.cuda.
CALLS = {
    "Stream": Stream,
    "stream": lambda stream: nullcontext(),
    "current_stream": lambda device=None: Stream(),
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
}


@contextmanager
def without_cuda() -> Iterator[None]:
    """Everything as it was afterwards."""
    from megatron_fsdp import param_and_grad_buffer as library

    of_library = {
        "_coalescing_manager": lambda group=None, device=None, async_ops=False: nullcontext(Event()),
        "gradient_reduce_preprocessing": lambda gradients, factor, config: dist.ReduceOp.SUM,
        "check_gpu_memory": lambda threshold=0.9: False,  # whether to empty the allocator's cache
    }
    logger = logging.getLogger("megatron_fsdp")
    level = logger.level
    with ExitStack() as way_out:
        way_out.callback(logger.setLevel, level)
        logger.setLevel(logging.ERROR)  # it warns that the device is not CUDA's
        for owner, stand_ins in ((torch.cuda, CALLS), (library, of_library)):
            for name, stand_in in stand_ins.items():
                way_out.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, stand_in)
        yield
