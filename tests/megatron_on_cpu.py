"""What megatron-fsdp needs to run on CPU tensors with gloo: stand-ins for calls of CUDA and NCCL, none for its own.

`install` patches torch for the whole process: call it in ranks that a test has forked. Streams and events are those of
a dry run (extras.speed.megatron) and do their work at once, as a CPU does. What is asynchronous is as late as can
be: weights are gathered when the library waits for them, so that one who does not wait computes with what lay there
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from extras.speed import megatron
from extras.speed.megatron import CALLS


class Late:
    """Collectives that are done when they are waited for."""

    def __init__(self):
        self.calls: list[Callable] = []

    def wait(self) -> None:
        while self.calls:
            self.calls.pop(0)()


_gathered_together: list[Late] = []
_gather = dist.all_gather_into_tensor


def gather(output_tensor, input_tensor, group=None, async_op=False):
    if not async_op:
        return _gather(output_tensor, input_tensor, group)
    _gathered_together[-1].calls.append(lambda: _gather(output_tensor, input_tensor, group))
    return _gathered_together[-1]


@contextlib.contextmanager
def coalescing(group=None, device=None, async_ops=False):
    """torch's own sends what is in it as one; here one after the other."""
    late = Late()
    _gathered_together.append(late)
    try:
        yield late
    finally:
        _gathered_together.pop()
    if not async_ops:
        late.wait()


def scaled_sum(gradients: torch.Tensor, factor: float | None, config) -> dist.ReduceOp:
    """NCCL scales as it adds (PREMUL_SUM), gloo does not: the same product, then the same sum."""
    if factor is not None:
        gradients.mul_(factor)
    return dist.ReduceOp.SUM


def reduce_in_place(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False) -> None:
    """As NCCL, without a copy: gloo has one of what it sums, and lets it go some time later."""
    dist.all_reduce(input, op=op, group=group)
    output.copy_(input.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def install() -> None:
    for name, stand_in in CALLS.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    megatron.DEVICES = ("cpu",)
    exchange_by_gloo()


def exchange_by_gloo() -> None:
    """The part of it that stands for NCCL alone."""
    dist.all_gather_into_tensor = gather
    from megatron_fsdp import param_and_grad_buffer

    param_and_grad_buffer._coalescing_manager = coalescing
    param_and_grad_buffer.gradient_reduce_preprocessing = torch.no_grad()(scaled_sum)
