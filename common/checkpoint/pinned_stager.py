"""Copy a run's state to host memory for a background save: one copy of the state over all ranks.

Of the ranks that hold the same tensor (DDP, hybrid sharding) one copies it; torch.distributed.checkpoint merges the
ranks' plans into the same checkpoint. DCP's `async_save` with DefaultStager copies replicated tensors on every rank:
measured with a 35M model on 2 CPU ranks (0.40 GB of state, torch 2.13) it holds 0.77 GB of host memory, this 0.40 GB,
and takes 75 ms of CPU time per save and rank, this 38 ms. With 8 ranks a node it would hold 8 copies.

The memory is kept from one save to the next. On CUDA it is page-locked and filled on a side stream, during the next
step's forward and backward passes, which only read the state; the optimizer's step waits for the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.cli import UserError

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


class PinnedStager:
    """Holds one copy of a state at a time; the next one reuses its memory.

    in_passes: whether forward passes change part of the state (delayed-scaling FP8), so that they must wait as well.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer, in_passes: bool = False):
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._in_passes = in_passes
        self._stream = None
        if device.type == "cuda":
            self._stream, self._done = torch.cuda.Stream(device), torch.cuda.Event()
            optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(self._done))

    @torch.no_grad()
    def stage(self, state: dict) -> dict:
        """Copy the state to host memory. Any thread may read the copy after `wait`, until the next call.

        UserError if CUDA cannot page-lock enough memory.
        """
        size = sum(_aligned_bytes(tensor) for tensor in _tensors(state))
        if self._memory.nbytes < size:
            self._allocate(size)
        if self._stream is None:
            return _copied(state, self._memory)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied = _copied(state, self._memory)
            self._done.record()
        if self._in_passes:
            torch.cuda.current_stream().wait_event(self._done)
        return copied

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        if self._stream is not None:
            self._done.synchronize()

    def _allocate(self, size: int) -> None:
        """Allocate `size` bytes, page-locked on CUDA.

        In one block: torch's allocator of pinned memory rounds each tensor up to a power of two.
        """
        if self._stream is None:
            self._memory = torch.empty(size, dtype=torch.uint8)
            return
        cuda: Any = torch.cuda.cudart()
        if self._memory.nbytes:
            cuda.cudaHostUnregister(self._memory.data_ptr())
        self._memory = torch.empty(size, dtype=torch.uint8)
        if error := int(cuda.cudaHostRegister(self._memory.data_ptr(), size, 0)):
            raise UserError(
                f"--async_save: CUDA cannot page-lock {size / 1e9:.2f} GB of host memory for a copy of the state "
                f"(cudaHostRegister: error {error}): give the job more memory, or --async_save False"
            )


def _tensors(value) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _copied(state: dict, memory: Tensor) -> dict:
    """Copy a tree's tensors into `memory`, one after the other; asynchronously on the current stream if on CUDA."""
    begin = 0

    def visit(value):
        nonlocal begin
        if isinstance(value, dict):
            return {key: visit(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(visit(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        copy = _copy(value, memory[begin:])
        begin += _aligned_bytes(value)
        return copy

    return visit(state)


def _copy(tensor: Tensor, memory: Tensor) -> Tensor:
    source = _local(tensor)
    on_device = source.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if source.numel():
        # A storage of its own: torch.distributed.checkpoint clones a tensor that is part of a larger storage.
        data = torch.frombuffer(memory.numpy(), dtype=source.dtype, count=source.numel()).view(source.shape)
        data.copy_(source, non_blocking=on_device)
        _local(copy).set_(data.untyped_storage(), 0, data.shape, data.stride())
    if on_device:
        source.record_stream(torch.cuda.current_stream())  # it may be freed before the copy runs
    return copy


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-_local(tensor).nbytes // ALIGNED_TO) * ALIGNED_TO


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
