"""Values that ranks send each other, as JSON in tensors: torch's collectives of objects unpickle what they receive.

A value is what JSON holds: dicts with strings as keys, lists, strings, numbers, booleans, None. A tuple arrives as a
list. Everything else is a TypeError, on one rank as on many.
"""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor


def copy(value):
    """The value as another rank would receive it."""
    return json.loads(_encoded(value))


def share(value):
    """Rank 0's value on every rank."""
    sends = dist.get_rank() == 0
    data = _to_tensor(value) if sends else torch.empty(0)
    length = torch.tensor([len(data)])
    dist.broadcast(length, src=0)
    if not sends:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return _from_tensor(data)


def gather(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, in order, on every rank of the group."""
    lengths, padded = _padded(value, group)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [_from_tensor(data[:length]) for data, length in zip(everyone, lengths, strict=True)]


def gather_to_main(value, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, in order, on rank 0; [] on the others, who are sent lengths only."""
    lengths, padded = _padded(value, group)
    everyone = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, everyone, dst=0, group=group)
    if everyone is None:
        return []
    return [_from_tensor(data[:length]) for data, length in zip(everyone, lengths, strict=True)]


def _padded(value, group: dist.ProcessGroup | None) -> tuple[list[int], Tensor]:
    """The lengths of every rank's data, and this rank's data, as long as the longest."""
    data = _to_tensor(value)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    lengths = [int(length) for length in lengths]
    return lengths, torch.nn.functional.pad(data, (0, max(lengths) - len(data)))


def _to_tensor(value) -> Tensor:
    """uint8 [bytes] on the CPU."""
    return torch.frombuffer(bytearray(_encoded(value)), dtype=torch.uint8)


def _from_tensor(data: Tensor):
    return json.loads(data.numpy().tobytes())


def _encoded(value) -> bytes:
    _check_keys(value)
    return json.dumps(value).encode()


def _check_keys(value) -> None:
    """json.dumps turns other keys into strings without a word."""
    if isinstance(value, dict):
        if others := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"the key {others[0]!r} is no string")
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for each in value:
        _check_keys(each)
