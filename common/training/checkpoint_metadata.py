"""metadata.json: torch.distributed.checkpoint's Metadata as JSON, so that no pickle is needed to read it.

    {"files": ["__0_0.distcp", ...],
     "tensors": {name: {"dtype": "float32", "shape": [...], "chunks": [[offsets, sizes, file, begin, length], ...]}},
     "values": {name: [file, begin, length]}}

`file` is an index into `files`; `begin` and `length` delimit the bytes torch.save wrote. `decode` checks every number
before use: chunks lie within their tensor and fill it, bytes lie within their file and do not overlap. So tensors take
no more memory than their files take bytes. Older checkpoints have only torch's pickled `.metadata`
(extras/interop/pickled_metadata.py), which passes the same checks.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from common.files.safe_files import LARGEST_INT, is_plain_name, shorten, sync

METADATA = "metadata.json"
OLD_METADATA = ".metadata"  # for torch's own tools; older checkpoints have no other
LARGEST = 256 << 20  # bytes; an item takes a thousand in its shard and far fewer here
MOST_DIMENSIONS = 8

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}


class Refused(ValueError):
    """A checkpoint holds something that no checkpoint of this program holds."""


@dataclass(frozen=True)
class Stored:
    """Where a value is stored."""

    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredChunk(Stored):
    """Where a tensor's chunk is stored."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


class Writer(dcp.FileSystemWriter):
    """Writes metadata.json beside torch's `.metadata`."""

    def finish(self, metadata: Metadata, results: list) -> None:
        super().finish(metadata, results)
        with open(Path(self.path) / METADATA, "w") as file:
            file.write(json.dumps(encode(metadata), separators=(",", ":")))
            sync(file)


def encode(metadata: Metadata) -> dict[str, Any]:
    """The content of metadata.json. metadata: as completed by torch's FileSystemWriter."""
    files: dict[str, int] = {}

    def place(index: MetadataIndex) -> list[int]:
        info = metadata.storage_data[index]
        return [files.setdefault(info.relative_path, len(files)), info.offset, info.length]

    tensors, values = {}, {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            values[name] = place(MetadataIndex(name))
            continue
        chunks = [[list(c.offsets), list(c.sizes), *place(MetadataIndex(name, c.offsets))] for c in stored.chunks]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
    return {"files": list(files), "tensors": tensors, "values": values}


def decode(content: Any, sizes: dict[str, int]) -> Metadata:
    """The Metadata of an untrusted `content`; `storage_data` holds a Stored for each chunk and value.

    sizes: {file: bytes} of the checkpoint. Refused: a violation of the format in this module's docstring.
    """
    require(isinstance(content, dict) and content.keys() == {"files", "tensors", "values"}, "it is no metadata")
    files, tensors, values = content["files"], content["tensors"], content["values"]
    shapes = isinstance(files, list) and isinstance(tensors, dict) and isinstance(values, dict)
    require(shapes, "it is no metadata")
    for file in files:
        require(is_plain_name(file), f"its shard {shorten(file)} is elsewhere")
        require(file in sizes, f"its shard {file} is not in the manifest")
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, Stored] = {}
    for name, stored in tensors.items():
        state[name] = _tensor(name, stored, files, sizes, storage)
    for name, place in values.items():
        require(name not in state, f"{shorten(name)} is there twice")
        state[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = Stored(*_place(name, place, files, sizes))
    _check_disjoint(storage)
    return Metadata(state, storage_data=storage)


def _tensor(
    name: str, stored: Any, files: list[str], sizes: dict[str, int], storage: dict[MetadataIndex, Stored]
) -> TensorStorageMetadata:
    """A tensor of the content. Adds its chunks to `storage`."""
    what = shorten(name)
    require(isinstance(stored, dict) and stored.keys() == {"dtype", "shape", "chunks"}, f"{what} is no tensor")
    dtype = DTYPES.get(stored["dtype"]) if isinstance(stored["dtype"], str) else None
    if dtype is None:
        raise Refused(f"{what} has the dtype {shorten(stored['dtype'])}")
    shape = _sizes(what, stored["shape"])
    chunks, numel = [], 0
    require(isinstance(stored["chunks"], list), f"{what} is no tensor")
    for chunk in stored["chunks"]:
        require(isinstance(chunk, list) and len(chunk) == 5, f"{what} has a chunk that is none")
        offsets, extent = _sizes(what, chunk[0]), _sizes(what, chunk[1])
        inside = len(offsets) == len(extent) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, extent, shape, strict=True)
        )
        require(inside, f"{what} has a chunk outside its shape")
        place = StoredChunk(*_place(name, chunk[2:], files, sizes), dtype, tuple(extent))
        of_chunk = math.prod(extent)
        require(of_chunk * dtype.itemsize <= place.length, f"{what} has a chunk larger than its bytes in the shard")
        index = MetadataIndex(name, offsets)
        require(index not in storage, f"{what} has a chunk twice")
        storage[index] = place
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(extent)))
        numel += of_chunk
    require(numel == math.prod(shape), f"{what} has chunks that do not fill it")
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)


def _sizes(what: str, value: Any) -> list[int]:
    plain = isinstance(value, list) and len(value) <= MOST_DIMENSIONS and all(map(is_size, value))
    require(plain, f"{what} has the sizes {shorten(value)}")
    return value


def _place(name: str, value: Any, files: list[str], sizes: dict[str, int]) -> tuple[str, int, int]:
    """(file, begin, length)."""
    plain = isinstance(value, list) and len(value) == 3 and all(map(is_size, value)) and value[0] < len(files)
    require(plain, f"{shorten(name)} is stored at {shorten(value)}")
    file, begin, length = files[value[0]], *value[1:]
    require(begin + length <= sizes[file], f"{shorten(name)} is stored beyond the end of {file}")
    return file, begin, length


def _check_disjoint(storage: dict[MetadataIndex, Stored]) -> None:
    """Refused if two items overlap: a small file could become many large tensors."""
    places = sorted((place.file, place.begin, place.length) for place in storage.values())
    for (file, begin, length), (next_file, next_begin, _) in zip(places, places[1:], strict=False):
        require(file != next_file or begin + length <= next_begin, f"two of its values share bytes of {file}")


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_INT


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)
