"""Read checkpoints without running code from them, and in no more memory than their files take.

torch.distributed.checkpoint unpickles its metadata and the items of its shards. Here the metadata are JSON
(metadata.py), and a shard has the plain bytes of tensors. Only regular files that the manifest lists are
opened.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from common.checkpoint.files import FORMAT_VERSION, Corrupt, read_manifest
from common.checkpoint.metadata import Refused, StoredChunk, decode
from common.checkpoint.writer import METADATA, SHARD_ENDING, bytes_of
from common.cli import UserError, one_line
from common.files.safe_files import file_size, open_regular, read_limited
from common.hooks import extra

LARGEST = 256 << 20  # bytes of metadata; a tensor takes more in its shard


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint directory. UserError for invalid metadata.

    sizes: {file: bytes}, as the manifest has them; index: the file with the metadata.
    """

    def __init__(self, path: Path, sizes: dict[str, int], index: str = METADATA):
        super().__init__(path)
        self.sizes, self.index = sizes, index
        try:
            if index not in sizes:
                raise Refused("not in the manifest")
            shards = sum(size for name, size in sizes.items() if name.endswith(SHARD_ENDING))
            self.metadata = self.decode(read_limited(path / index, min(LARGEST, shards)))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path / index}: refused: {one_line(error)}") from error

    def decode(self, data: bytes) -> Metadata:
        """The metadata in the content of the index."""
        return decode(json.loads(data), self.sizes)

    def read_metadata(self, *args, **kwargs) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].file, []).append(item)
        for name, of_file in items.items():
            with self.open_shard(name) as file:
                for item in of_file:
                    tensor = self.read_chunk(file, item.storage_index.fqn, self.storage_data[item.storage_index])
                    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        tensor = tensor.narrow(dimension, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(tensor)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def open_shard(self, name: str) -> io.BufferedReader:
        """Open a shard that the metadata name."""
        file = open_regular(Path(self.path) / name)
        if (size := file_size(file)) != self.sizes[name]:
            file.close()
            raise Refused(f"{name} has changed: {size:,} bytes, {self.sizes[name]:,} written")
        return file

    def read_chunk(self, file: io.BufferedReader, name: str, stored: StoredChunk) -> Tensor:
        """A chunk of the tensor `name` from its shard. Refused if it disagrees with the metadata."""
        tensor = torch.empty(stored.sizes, dtype=stored.dtype)
        if tensor.nbytes != stored.length:
            raise Refused(f"{stored.file}: {name}: it has {tensor.nbytes:,} bytes, stored are {stored.length:,}")
        file.seek(stored.begin)
        if file.readinto(bytes_of(tensor)) != stored.length:
            raise Refused(f"{stored.file}: {name}: it is cut short")
        return tensor


def open_checkpoint(path: Path) -> Reader:
    """The reader of a checkpoint of any format. UserError if there is none, or it has invalid metadata."""
    try:
        manifest = read_manifest(path)
    except Corrupt as error:
        raise UserError(f"{path}: {error}") from error
    sizes = {name: size for name, (size, _) in manifest.files.items()}
    return Reader(path, sizes) if manifest.version == FORMAT_VERSION else extra().earlier_checkpoint(path, sizes)
