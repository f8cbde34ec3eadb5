"""CUDA graphs on a CPU: what a capture launches is kept, and a replay launches it again into the same tensors.

Operators are kept as they are dispatched, below autograd and autocast; a kernel of the stand-in as one launch, which
reads its tensors (the boundaries of sequences, say) anew. In-place operators and views do again what they did; other
results are copied to where the first went. What makes the host wait for the device is refused during a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.te_on_cpu import placement

aten = torch.ops.aten
# A GPU's host reads values or a number of elements.
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.repeat_interleave, aten.equal, aten._unique2}
REFUSED = "operation not permitted when stream is capturing"


class Launch(NamedTuple):
    """autocast: whether it was on where a kernel was launched; operators are dispatched below it."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]
    results: list[Tensor]
    autocast: bool


class CUDAGraph:
    """made: all graphs of this process."""

    made: list[CUDAGraph] = []

    def __init__(self):
        self.launches: list[Launch] = []
        self.captures = self.replays = 0
        CUDAGraph.made.append(self)

    def add(self, function: Callable, args: tuple, kwargs: dict[str, Any], result: Any, autocast: bool) -> None:
        """Tensors of its own: Transformer Engine empties those that it needs no more (`clear_tensor_data`)."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            args, kwargs, result = tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))
        self.launches.append(Launch(function, args, kwargs, placement.tensors_of(result), autocast))

    def replay(self) -> None:
        assert self.captures == 1
        self.replays += 1
        for function, args, kwargs, results, autocast in self.launches:
            below = torch._C._AutoDispatchBelowAutograd if isinstance(function, OpOverload) else nullcontext
            with torch._C.DisableTorchFunction(), torch.no_grad():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast), below():
                    again = placement.tensors_of(function(*args, **kwargs))
                for new, old in zip(again, results, strict=True):
                    if new.data_ptr() != old.data_ptr():
                        old.copy_(new)

    def reset(self) -> None:
        self.launches.clear()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = placement.tensors_of(args, kwargs)
        places = {placement.places[tensor] for tensor in tensors} - {None}
        if func.overloadpacket in WAITS or (func.overloadpacket is aten.copy_ and len(places) > 1):
            raise RuntimeError(f"{func}: {REFUSED}")
        with torch._C.DisableTorchFunction():  # what C++ asks for names the CPU
            result = func(*args, **kwargs)
        self.graph.add(func, args, kwargs, result, autocast=False)
        return result


@contextmanager
def capture(graph: CUDAGraph, pool=None) -> Iterator[None]:
    """In the place of `torch.cuda.graph`."""
    graph.captures += 1
    placement.capturing.append(graph)
    try:
        with _Capture(graph):
            yield
    finally:
        placement.capturing.pop()


def install() -> None:
    torch._C._graph_pool_handle = lambda: (0, 1)
    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, capture
    torch.cuda.is_current_stream_capturing = lambda: bool(placement.capturing)
