"""Checkpoints are data: reading one runs no code that somebody put into it.

torch.distributed.checkpoint reads its `.metadata`, and each value that is no tensor, with `pickle`, which does what a
file tells it to. Here the first goes through an unpickler that knows the classes of a checkpoint and no other, the
second through torch's own for weights only.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from common.cli import UserError, one_line

_OF_METADATA = "torch.distributed.checkpoint.metadata"
KNOWN = {
    *((_OF_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_OF_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    *((_OF_METADATA, "_MEM_FORMAT_ENCODING"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("collections", "OrderedDict")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) in KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint and may run code")


class Reader(dcp.FileSystemReader):
    """Of a checkpoint directory. UserError for metadata that are no checkpoint's."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        path = f"{self.path}/.metadata"
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise pickle.UnpicklingError("it is no metadata")
            for stored in metadata.storage_data.values():
                if PurePath(stored.relative_path).name != stored.relative_path:
                    raise pickle.UnpicklingError(f"its shard {stored.relative_path!r} is elsewhere")
        except OSError:
            raise
        except Exception as error:  # a pickle that is damaged fails in many ways
            raise UserError(f"{path}: refused: {error}") from error
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def reason_of(error: BaseException) -> str:
    """The innermost cause in one line: DCP wraps it in an exception that lists every rank's stack."""
    causes = getattr(error, "failures", None)
    if causes:
        first = next(iter(causes.values()))
        error = first[0] if isinstance(first, tuple) else first
    return one_line(error)[:200]


class Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises for what is more than numbers, texts and tensors
        value.seek(0)
        super().load_bytes(read_item, value)


class StoredTensors:
    """The tensors of a checkpoint, read one at a time in one process, whatever ranks wrote them."""

    def __init__(self, path: Path):
        self._reader = Reader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.shapes = {
            name: stored.size
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read(self, name: str) -> Tensor:
        """One of `shapes`, in the precision in which it was stored."""
        stored = self._metadata.state_dict_metadata[name]
        tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = Planner()
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor
