"""Read the tensors of a checkpoint one at a time, in one process, whatever ranks wrote them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from common.checkpoint.metadata import Refused
from common.checkpoint.reader import Reader
from common.cli import UserError


class StoredTensors:
    """shapes: of each tensor, by its name."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self._tensors = reader.metadata.state_dict_metadata
        self.shapes = {name: stored.size for name, stored in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor `name`, in the dtype it was stored in. UserError if it disagrees with the metadata."""
        stored = self._tensors[name]
        tensor = torch.zeros(stored.size, dtype=stored.properties.dtype)  # zeros: chunks that overlap may leave gaps
        for chunk in stored.chunks:
            place = self._reader.metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            target = tensor
            for dimension, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dimension, offset, length)
            try:
                with self._reader.open_shard(place.file) as file:
                    target.copy_(self._reader.read_chunk(file, name, place))
            except Refused as error:
                raise UserError(f"{self._reader.path}: refused: {error}") from error
        return tensor
