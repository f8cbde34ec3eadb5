"""What is where in a checkpoint: torch.distributed.checkpoint's Metadata as JSON, and as the pickle of older versions.

    {"files": ["__0_0.distcp", ...],
     "tensors": {name: {"dtype": "float32", "shape": [...], "chunks": [[offsets, sizes, file, begin, length], ...]}},
     "values": {name: [file, begin, length]}}

`file` counts in `files`; `begin` and `length` are bytes of what torch.save wrote there. Both forms are checked by the
same `decode` before a number of theirs is used: chunks lie in their tensor and fill it, and bytes in their file, where
no two overlap. So tensors take no more memory than their files take bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from common.files.json_files import LARGEST_INT, is_plain_name, shorten
from extras.inert_pickle import Call, Name, Refused, loads

METADATA = "metadata.json"
OLD_METADATA = ".metadata"  # of torch's own tools, and all that older checkpoints have
# An item takes more bytes in its shard (torch.save: a thousand) than in the metadata, so these are the smaller ones.
LARGEST = 256 << 20
MOST_DIMENSIONS = 8

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPES}

_DCP = "torch.distributed.checkpoint"
_NAMES = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *((f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_DCP}.filesystem", "_StorageInfo")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
    *(("torch", name) for name in DTYPES),
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor's chunk or another value is; dtype and sizes: of a chunk, None of another value."""

    file: str
    begin: int
    length: int
    dtype: torch.dtype | None = None
    sizes: tuple[int, ...] | None = None


def encode(metadata: Metadata) -> dict[str, Any]:
    """As JSON has it. metadata: as torch's FileSystemWriter completes them."""
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
    """The Metadata of a `content` that nobody vouches for; `storage_data` holds a Stored for each chunk and value.

    sizes: {file: bytes} of the checkpoint. Refused where anything is not as the head of this module says.
    """
    _require(isinstance(content, dict) and content.keys() == {"files", "tensors", "values"}, "it is no metadata")
    files, tensors, values = content["files"], content["tensors"], content["values"]
    shapes = isinstance(files, list) and isinstance(tensors, dict) and isinstance(values, dict)
    _require(shapes, "it is no metadata")
    for file in files:
        _require(is_plain_name(file), f"its shard {shorten(file)} is elsewhere")
        _require(file in sizes, f"its shard {file} is not in the manifest")
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, Stored] = {}
    for name, stored in tensors.items():
        state[name] = _tensor(name, stored, files, sizes, storage)
    for name, place in values.items():
        _require(name not in state, f"{shorten(name)} is there twice")
        state[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = Stored(*_place(name, place, files, sizes))
    _check_apart(storage)
    return Metadata(state, storage_data=storage, storage_meta=StorageMeta())


def _tensor(
    name: str, stored: Any, files: list[str], sizes: dict[str, int], storage: dict[MetadataIndex, Stored]
) -> TensorStorageMetadata:
    """One of the content's tensors; its chunks are added to `storage`."""
    what = shorten(name)
    _require(isinstance(stored, dict) and stored.keys() == {"dtype", "shape", "chunks"}, f"{what} is no tensor")
    dtype = DTYPES.get(stored["dtype"]) if isinstance(stored["dtype"], str) else None
    _require(dtype is not None, f"{what} has the dtype {shorten(stored['dtype'])}")
    shape = _sizes(what, stored["shape"])
    chunks, numel = [], 0
    _require(isinstance(stored["chunks"], list), f"{what} is no tensor")
    for chunk in stored["chunks"]:
        _require(isinstance(chunk, list) and len(chunk) == 5, f"{what} has a chunk that is none")
        offsets, extent = _sizes(what, chunk[0]), _sizes(what, chunk[1])
        inside = len(offsets) == len(extent) == len(shape) and all(
            offset + size <= whole for offset, size, whole in zip(offsets, extent, shape, strict=True)
        )
        _require(inside, f"{what} has a chunk outside its shape")
        place = Stored(*_place(name, chunk[2:], files, sizes), dtype, tuple(extent))
        of_chunk = math.prod(extent)
        _require(of_chunk * dtype.itemsize <= place.length, f"{what} has a chunk larger than its bytes in the shard")
        index = MetadataIndex(name, offsets)
        _require(index not in storage, f"{what} has a chunk twice")
        storage[index] = place
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(extent)))
        numel += of_chunk
    _require(numel == math.prod(shape), f"{what} has chunks that do not fill it")
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)


def _sizes(what: str, value: Any) -> list[int]:
    plain = isinstance(value, list) and len(value) <= MOST_DIMENSIONS and all(map(_is_size, value))
    _require(plain, f"{what} has the sizes {shorten(value)}")
    return value


def _place(name: str, value: Any, files: list[str], sizes: dict[str, int]) -> tuple[str, int, int]:
    """(file, begin, length)."""
    plain = isinstance(value, list) and len(value) == 3 and all(map(_is_size, value)) and value[0] < len(files)
    _require(plain, f"{shorten(name)} is stored at {shorten(value)}")
    file, begin, length = files[value[0]], *value[1:]
    _require(begin + length <= sizes[file], f"{shorten(name)} is stored beyond the end of {file}")
    return file, begin, length


def _check_apart(storage: dict[MetadataIndex, Stored]) -> None:
    """Refused where two share bytes: a small file would become many large tensors."""
    places = sorted((place.file, place.begin, place.length) for place in storage.values())
    for (file, begin, length), (next_file, next_begin, _) in zip(places, places[1:], strict=False):
        _require(file != next_file or begin + length <= next_begin, f"two of its values share bytes of {file}")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_INT


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Refused(otherwise)


# ---- the pickle of older checkpoints ------------------------------------------------------------------------------


def content_of_pickle(data: bytes) -> dict[str, Any]:
    """The same content, not yet checked, of the pickle that torch's FileSystemWriter makes of Metadata."""
    metadata = _state(loads(data, _NAMES), "Metadata")
    try:
        return _content(metadata)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused("it is no metadata") from error


def _content(metadata: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, int] = {}
    places: dict[tuple[str, tuple[int, ...] | None], list[int]] = {}
    for index, info in metadata["storage_data"].items():
        key, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        _require(not where.get("transform_descriptors"), "its shards are transformed")
        path, offset = where["relative_path"], key.get("offset")
        _require(is_plain_name(path), f"its shard {shorten(path)} is elsewhere")
        _require(isinstance(key["fqn"], str), "it has a name that is no text")
        place = [files.setdefault(path, len(files)), where["offset"], where["length"]]
        places[key["fqn"], None if offset is None else tuple(_size(offset))] = place
    tensors, values, taken = {}, {}, 0
    for name, stored in metadata["state_dict_metadata"].items():
        if isinstance(stored, Call) and stored.of.name == "BytesStorageMetadata":
            values[name] = places[name, None]
            continue
        stored = _state(stored, "TensorStorageMetadata")
        chunks = []
        for chunk in stored["chunks"]:
            taken += 1
            _require(taken <= len(places), "it has more chunks than are stored")  # a list may be there many times
            chunk = _state(chunk, "ChunkStorageMetadata")
            offsets, extent = _size(chunk["offsets"]), _size(chunk["sizes"])
            chunks.append([offsets, extent, *places[name, tuple(offsets)]])
        dtype = _state(stored["properties"], "TensorProperties", tuple)[0]
        _require(isinstance(dtype, Name) and dtype.module == "torch", "it has a dtype that is none")
        tensors[name] = {"dtype": dtype.name, "shape": _size(stored["size"]), "chunks": chunks}
    return {"files": list(files), "tensors": tensors, "values": values}


def _state(value: Any, name: str, kind: type = dict) -> Any:
    """What a pickle sets on an instance of that class."""
    _require(isinstance(value, Call) and value.of.name == name and isinstance(value.state, kind), "it is no metadata")
    return value.state


def _size(value: Any) -> list[int]:
    """Of a torch.Size."""
    _require(isinstance(value, Call) and value.of.name == "Size" and len(value.arguments) == 1, "it has no sizes")
    (sizes,) = value.arguments
    plain = isinstance(sizes, tuple) and len(sizes) <= MOST_DIMENSIONS and all(map(_is_size, sizes))
    _require(plain, "it has no sizes")
    return list(sizes)
