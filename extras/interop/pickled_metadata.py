"""`.metadata`, the pickle by torch.distributed.checkpoint that older checkpoints have in place of metadata.json."""

from __future__ import annotations

from typing import Any

from common.checkpoint.metadata import DTYPES, MOST_DIMENSIONS, Refused, is_size, require
from common.files.safe_files import is_plain_name, shorten
from extras.interop.inert_pickle import Call, Name, loads

_DCP = "torch.distributed.checkpoint"
_NAMES = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    *((f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"), (f"{_DCP}.filesystem", "_StorageInfo")),
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),
    *(("torch", name) for name in DTYPES),
}


def content_of_pickle(data: bytes) -> dict[str, Any]:
    """Convert a `.metadata` file to the content of metadata.json, not yet checked (`decode` does that)."""
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
        require(not where.get("transform_descriptors"), "its shards are transformed")
        path, offset = where["relative_path"], key.get("offset")
        require(is_plain_name(path), f"its shard {shorten(path)} is elsewhere")
        require(isinstance(key["fqn"], str), "it has a name that is no text")
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
            # A pickle may refer to one list many times.
            require(taken <= len(places), "it has more chunks than are stored")
            chunk = _state(chunk, "ChunkStorageMetadata")
            offsets, extent = _size(chunk["offsets"]), _size(chunk["sizes"])
            chunks.append([offsets, extent, *places[name, tuple(offsets)]])
        dtype = _state(stored["properties"], "TensorProperties", tuple)[0]
        require(isinstance(dtype, Name) and dtype.module == "torch", "it has a dtype that is none")
        tensors[name] = {"dtype": dtype.name, "shape": _size(stored["size"]), "chunks": chunks}
    return {"files": list(files), "tensors": tensors, "values": values}


def _state(value: Any, name: str, kind: type = dict) -> Any:
    """The attributes that the pickle sets on an instance of class `name`."""
    require(isinstance(value, Call) and value.of.name == name and isinstance(value.state, kind), "it is no metadata")
    return value.state


def _size(value: Any) -> list[int]:
    """The sizes in a torch.Size."""
    require(isinstance(value, Call) and value.of.name == "Size" and len(value.arguments) == 1, "it has no sizes")
    (sizes,) = value.arguments
    plain = isinstance(sizes, tuple) and len(sizes) <= MOST_DIMENSIONS and all(map(is_size, sizes))
    require(plain, "it has no sizes")
    return list(sizes)
