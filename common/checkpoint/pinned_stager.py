"""Copy a run's state to host memory for a background save: one copy of the state over all ranks.

Of the ranks that hold the same tensor (DDP, hybrid sharding) one copies it; torch.distributed.checkpoint merges the
ranks' plans into the same checkpoint. DCP's `async_save` with DefaultStager copies replicated tensors on every rank:
measured with a 35M model on 2 CPU ranks (0.40 GB of state, torch 2.13) it holds 0.77 GB of host memory, this 0.40 GB,
and takes 75 ms of CPU time per save and rank, this 38 ms. With 8 ranks a node it would hold 8 copies.

The memory is kept from one save to the next. On CUDA it is page-locked and filled on a side stream, during the next
step's forward and backward passes, which only read the state; the optimizer's step waits for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.cli import UserError
from common.compat import foreach_copy_

ALIGNED_TO = 64  # bytes: a cache line, and a multiple of every dtype's size


def share_of(state: dict, rank: int, size: int) -> dict:
    """The part of a state (a tree of dicts, the same on all `size` ranks) that this rank copies.

    Each tensor goes to one of its replicas (all ranks for a plain tensor, the mesh's replicated dimensions for a
    DTensor): the one with the fewest bytes so far. Non-tensors and scalars stay on every rank: whether a rank has a
    tensor's step count tells that it holds rows of that tensor.
    """
    loads: dict[int, list[int]] = {}

    def is_owner(tensor: Tensor) -> bool:
        replica, replicas = _replica_of(tensor, rank, size)
        load = loads.setdefault(replicas, [0] * replicas)
        owner = load.index(min(load))
        load[owner] += _local(tensor).nbytes
        return owner == replica

    def visit(tree: dict) -> dict:
        owned = {}
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                if part := visit(value):
                    owned[key] = part
            elif not (isinstance(value, Tensor) and value.dim()) or is_owner(value):
                owned[key] = value
        return owned

    return visit(state)


def _replica_of(tensor: Tensor, rank: int, size: int) -> tuple[int, int]:
    """(index of this rank among the ranks that hold the same values, number of them)."""
    if not isinstance(tensor, DTensor):
        return rank, size
    replica, replicas, mesh = 0, 1, tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            ranks = mesh.size(dimension)
            replica, replicas = replica * ranks + mesh.get_local_rank(dimension), replicas * ranks
    return replica, replicas


def _of_this_process(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class PinnedStager:
    """Holds one copy of a state at a time, in `memory`; the next one reuses it.

    in_passes: whether forward passes change part of the state (delayed-scaling FP8), so that they must wait as well;
    allocate: makes the memory, uint8 [bytes]; repeats: `repeat` will be called, for which the tensors are kept.
    """

    def __init__(
        self,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
        in_passes: bool = False,
        allocate: Callable[[int], Tensor] = _of_this_process,
        repeats: bool = False,
    ):
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._in_passes, self._new_memory, self._repeats = in_passes, allocate, repeats
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._stream = None
        if device.type == "cuda":
            self._stream, self._done = torch.cuda.Stream(device), torch.cuda.Event()
            optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(self._done))

    @torch.no_grad()
    def stage(self, state: dict) -> dict:
        """Copy the state to host memory. Any thread may read the copy after `wait`, until the next call.

        UserError if CUDA cannot page-lock enough memory.
        """
        size = bytes_of_tensors(state)
        if self.memory.nbytes < size:
            self._allocate(size)
        copied, self._sources, self._copies = _placed(state, self.memory)
        self.repeat()
        if not self._repeats:
            self._sources, self._copies = [], []
        return copied

    @torch.no_grad()
    def repeat(self) -> None:
        """Copy the values that the tensors of the last state have now to the same places."""
        if self._stream is None:
            return foreach_copy_(self._copies, self._sources)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            foreach_copy_(self._copies, self._sources, non_blocking=True)
            for source in self._sources:
                if source.device.type == "cuda":
                    source.record_stream(self._stream)  # it may be freed before the copy runs
            self._done.record()
        if self._in_passes:
            torch.cuda.current_stream().wait_event(self._done)
        return None

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        if self._stream is not None:
            self._done.synchronize()

    def _allocate(self, size: int) -> None:
        """Allocate `size` bytes, page-locked on CUDA.

        In one block: torch's allocator of pinned memory rounds each tensor up to a power of two.
        """
        if self._stream is None:
            self.memory = self._new_memory(size)
            return
        cuda: Any = torch.cuda.cudart()
        if self.memory.nbytes:
            cuda.cudaHostUnregister(self.memory.data_ptr())
        self.memory = self._new_memory(size)
        if error := int(cuda.cudaHostRegister(self.memory.data_ptr(), size, 0)):
            raise UserError(
                f"--async_save: CUDA cannot page-lock {size / 1e9:.2f} GB of host memory for a copy of the state "
                f"(cudaHostRegister: error {error}): give the job more memory, or --async_save False"
            )


def addresses(state: dict) -> list[int]:
    """Where this rank's part of each tensor lies."""
    return [_local(tensor).data_ptr() for tensor in _tensors(state)]


def bytes_of_tensors(state: dict) -> int:
    """That `PinnedStager.stage` takes for a copy."""
    return sum(_aligned_bytes(tensor) for tensor in _tensors(state))


def _tensors(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _placed(state: dict, memory: Tensor) -> tuple[dict, list[Tensor], list[Tensor]]:
    """(the tree with tensors that lie in `memory`, one after the other, what is to be copied, and where to)."""
    begin, sources, copies = 0, [], []

    def visit(value):
        nonlocal begin
        if isinstance(value, dict):
            return {key: visit(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(visit(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        source, copy = _local(value), torch.empty_like(value, device="cpu", requires_grad=False)
        if source.numel():
            # A storage of its own: torch.distributed.checkpoint clones a tensor that is part of a larger storage.
            place = memory[begin:].numpy()
            data = torch.frombuffer(place, dtype=source.dtype, count=source.numel()).view(source.shape)
            _local(copy).set_(data.untyped_storage(), 0, data.shape, data.stride())
            sources.append(source.detach())
            copies.append(data)
        begin += _aligned_bytes(value)
        return copy

    return visit(state), sources, copies


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-_local(tensor).nbytes // ALIGNED_TO) * ALIGNED_TO


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
