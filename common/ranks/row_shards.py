"""Tensors that are cut between rows, anywhere: gathered from the ranks, and told to torch.distributed.checkpoint.

DTensor knows where rows begin by torch.chunk's rule alone. What is cut otherwise says it itself: rows `first` and on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor


def gather_rows(rows: Tensor, first: int, shape: torch.Size, group: dist.ProcessGroup) -> Tensor:
    """All rows of a tensor of this shape, each rank having some, or none; the ranks of the group call together."""
    # Shares of one length: gloo gathers no others.
    mine = torch.tensor([first, len(rows)], device=rows.device)
    shares = mine.new_empty(group.size() * 2)
    dist.all_gather_into_tensor(shares, mine, group=group)
    shares = shares.view(-1, 2).tolist()
    most = max(count for _, count in shares)
    padded = rows.new_zeros(most, *shape[1:])
    padded[: len(rows)] = rows
    gathered = padded.new_empty(len(shares) * most, *shape[1:])
    dist.all_gather_into_tensor(gathered, padded, group=group)
    found = rows.new_empty(shape)
    for part, (begin, count) in zip(gathered.view(len(shares), most, *shape[1:]), shares, strict=True):
        found[begin : begin + count] = part[:count]
    return found


@torch.no_grad()
def describe(shard: DTensor, first: int) -> None:
    """Tell torch.distributed.checkpoint which rows these are, by the names that it looks for; a copy forgets it."""
    local = shard.to_local()
    offsets = torch.Size((first, *(0 for _ in local.shape[1:])))
    chunk = ChunkStorageMetadata(offsets, local.shape)

    def items(name: str, tensor: DTensor) -> list[WriteItem]:
        if not local.numel():
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), tensor.size())
        return [WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)]

    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = items
