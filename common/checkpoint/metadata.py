"""Check metadata.json, whose form writer.py describes, before anything is read by it.

`decode` checks every number: chunks lie within their tensor and have as many elements, bytes lie within their file and
do not overlap. So tensors take no more memory than their files take bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from common.checkpoint.writer import SAFETENSORS, Stored
from common.files.safe_files import LARGEST_INT, is_plain_name, shorten

MOST_DIMENSIONS = 8

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in SAFETENSORS}


class Refused(ValueError):
    """A checkpoint holds something that no checkpoint of this program holds."""


@dataclass(frozen=True)
class StoredChunk(Stored):
    """Where a tensor's chunk is stored."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


def decode(content: Any, sizes: dict[str, int]) -> Metadata:
    """The Metadata of an untrusted `content`; `storage_data` holds a StoredChunk for each chunk.

    sizes: {file: bytes} of the checkpoint. Refused: a violation of the format.
    """
    require(isinstance(content, dict) and content.keys() == {"files", "tensors"}, "it is no metadata")
    files, tensors = content["files"], content["tensors"]
    require(isinstance(files, list) and isinstance(tensors, dict), "it is no metadata")
    for file in files:
        require(is_plain_name(file), f"its shard {shorten(file)} is elsewhere")
        require(file in sizes, f"its shard {file} is not in the manifest")
    storage: dict[MetadataIndex, StoredChunk] = {}
    state: dict[str, Any] = {name: _tensor(name, stored, files, sizes, storage) for name, stored in tensors.items()}
    _check_disjoint(storage)
    return Metadata(state, storage_data=storage)


def _tensor(
    name: str, stored: Any, files: list[str], sizes: dict[str, int], storage: dict[MetadataIndex, StoredChunk]
) -> TensorStorageMetadata:
    """A tensor of the content. Adds its chunks to `storage`."""
    what = shorten(name)
    require(isinstance(stored, dict) and stored.keys() == {"dtype", "shape", "chunks"}, f"{what} is no tensor")
    dtype = DTYPES.get(stored["dtype"]) if isinstance(stored["dtype"], str) else None
    if dtype is None:
        raise Refused(f"{what} has the dtype {shorten(stored['dtype'])}")
    shape = _sizes(what, stored["shape"])
    require(math.prod(size for size in shape if size) <= LARGEST_INT, f"{what} has too large a shape")
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


def _check_disjoint(storage: dict[MetadataIndex, StoredChunk]) -> None:
    """Refused if two chunks overlap: a small file could become many large tensors."""
    places = sorted((place.file, place.begin, place.length) for place in storage.values())
    for (file, begin, length), (next_file, next_begin, _) in zip(places, places[1:], strict=False):
        require(file != next_file or begin + length <= next_begin, f"two of its tensors share bytes of {file}")


def is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_INT


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)
