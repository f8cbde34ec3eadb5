"""What a rank copies of a run's state to host memory when it is saved, and where to.

Where ranks hold the same tensors (DistributedDataParallel, hybrid sharding) each copies some of them: together one
copy of the state, not one a rank. torch.distributed.checkpoint joins what the ranks plan to write: the checkpoint is
the same one.

On CUDA the copies' memory is page-locked, kept from one save to the next, and filled on a stream of its own beside the
next step's passes, which only read what is copied; the optimiser's step, which changes it, waits for the copies. On a
CPU it is let go: the memory is the one that the run computes in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from common.cli import UserError

ALIGNED_TO = 64  # bytes: a cache line, and any number's size divides it


def share_of(state: dict, rank: int, size: int) -> dict:
    """Of a tree of dicts, the same on all `size` ranks: what this one copies.

    Of the ranks that hold the same values (of a plain tensor all; of a DTensor those along the mesh's replicated
    dimensions) one copies a tensor: the one with the fewest bytes so far. Left with every rank is what is no tensor,
    and scalars: a rank's count of the steps of a tensor says that it has rows of it.
    """
    loads: dict[int, list[int]] = {}

    def mine(tensor: Tensor) -> bool:
        place, replicas = _among_replicas(tensor, rank, size)
        load = loads.setdefault(replicas, [0] * replicas)
        owner = load.index(min(load))
        load[owner] += _local(tensor).nbytes
        return owner == place

    def visit(tree: dict) -> dict:
        kept = {}
        for key, value in tree.items():
            if isinstance(value, dict) and value:
                if part := visit(value):
                    kept[key] = part
            elif not (isinstance(value, Tensor) and value.dim()) or mine(value):
                kept[key] = value
        return kept

    return visit(state)


def _among_replicas(tensor: Tensor, rank: int, size: int) -> tuple[int, int]:
    """(this rank's place among those that hold the same values, how many they are)."""
    if not isinstance(tensor, DTensor):
        return rank, size
    place, replicas, mesh = 0, 1, tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            ranks = mesh.size(dimension)
            place, replicas = place * ranks + mesh.get_local_rank(dimension), replicas * ranks
    return place, replicas


class PinnedStager:
    """Copies of a state, one at a time: on CUDA the next one takes the memory of the last.

    in_passes: whether forward passes, too, change part of the state (scales by history) and have to wait.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer, in_passes: bool = False):
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._in_passes = in_passes
        self._stream = None
        if device.type == "cuda":
            self._stream, self._done = torch.cuda.Stream(device), torch.cuda.Event()
            optimizer.register_step_pre_hook(lambda *_: torch.cuda.current_stream().wait_event(self._done))

    @torch.no_grad()
    def take(self, state: dict) -> dict:
        """The state as it is now, in host memory: to be read after `wait`, by any thread, until the next one.

        UserError where CUDA cannot page-lock so much.
        """
        size = sum(_room(tensor) for tensor in _tensors(state))
        if self._stream is None:
            return _copied(state, torch.empty(size, dtype=torch.uint8))
        if self._memory.nbytes < size:
            self._lock(size)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copied = _copied(state, self._memory)
            self._done.record()
        if self._in_passes:
            torch.cuda.current_stream().wait_event(self._done)
        return copied

    def wait(self) -> None:
        """Until the last copy is there."""
        if self._stream is not None:
            self._done.synchronize()

    def _lock(self, size: int) -> None:
        """Have `size` bytes of page-locked memory.

        One block of just that size: torch's allocator of such memory gives each tensor the next power of two.
        """
        cuda = torch.cuda.cudart()
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
    """Copies of a tree's tensors, one after the other in `memory`; on CUDA when the current stream comes to it."""
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
        begin += _room(value)
        return copy

    return visit(state)


def _copy(tensor: Tensor, memory: Tensor) -> Tensor:
    source = _local(tensor)
    on_device = source.device.type == "cuda"
    copy = torch.empty_like(tensor, device="cpu", requires_grad=False)
    if source.numel():
        # With a storage of its own: torch.distributed.checkpoint would copy a part of a larger one once more.
        numbers = torch.frombuffer(memory.numpy(), dtype=source.dtype, count=source.numel()).view(source.shape)
        _local(copy).set_(numbers.copy_(source, non_blocking=on_device))
    if on_device:
        source.record_stream(torch.cuda.current_stream())  # it may be let go of before it is copied
    return copy


def _room(tensor: Tensor) -> int:
    return -(-_local(tensor).nbytes // ALIGNED_TO) * ALIGNED_TO


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
