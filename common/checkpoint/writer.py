"""Write a rank's share of a checkpoint as one safetensors file, and where everything lies as metadata.json.

    {"files": ["__0_0.distcp", ...],
     "tensors": {name: {"dtype": "float32", "shape": [...], "chunks": [[offsets, sizes, file, begin, length], ...]}}}

`file` is an index into `files`; `begin` and `length` delimit the bytes of a chunk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from common.files.safe_files import sync

METADATA = "metadata.json"
SHARD_ENDING = ".distcp"  # of a rank's file

SAFETENSORS = {  # what a safetensors file calls each dtype
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Stored:
    """Where bytes are stored."""

    file: str
    begin: int
    length: int


class Writer(dcp.FileSystemWriter):
    """Writes a file for each rank.

    torch's own SerializationFormat.SAFETENSORS builds the whole file in memory first, and puts values before its
    header. Here tensors go to the file one at a time, so a save holds no second copy of the state.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert self.rank is not None, "torch has set it up"
        name, results = shard_name(self.rank), []
        items = sorted(plan.items, key=lambda item: -_sizes(item)[1].itemsize)  # each begins at a multiple of that
        header = _header(items)
        with open(Path(self.path) / name, "wb") as file:
            begin = file.write(header)
            for item in items:
                tensor: Any = planner.resolve_data(item)
                length = file.write(bytes_of(tensor.detach().cpu().contiguous()))
                assert length == _length(item), f"{item.index.fqn} has another size than its plan"
                results.append(WriteResult(item.index, length, Stored(name, begin, length)))
                begin += length
            sync(file)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        with open(Path(self.path) / METADATA, "w") as file:
            file.write(json.dumps(encode(metadata, places), separators=(",", ":")))
            sync(file)


def encode(metadata: Metadata, places: dict[MetadataIndex, Stored]) -> dict[str, Any]:
    """The content of metadata.json. places: of each chunk of the metadata."""
    files: dict[str, int] = {}

    def place(name: str, chunk: ChunkStorageMetadata) -> list[int]:
        stored = places[MetadataIndex(name, chunk.offsets)]
        return [files.setdefault(stored.file, len(files)), stored.begin, stored.length]

    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{name}: only tensors are saved"
        chunks = [[list(c.offsets), list(c.sizes), *place(name, c)] for c in stored.chunks]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(stored.size), "chunks": chunks}
    return {"files": list(files), "tensors": tensors}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def shard_name(rank: int) -> str:
    return f"__{rank}_0{SHARD_ENDING}"


def _header(items: list[WriteItem]) -> bytes:
    """The header of a safetensors file with these tensors, in this order.

    `__metadata__` says which part of its tensor each one is, as torch's HuggingFaceStorageWriter does.
    """
    header: dict[str, Any] = {}
    offsets, begin = {}, 0
    for item in items:
        name, (chunk, dtype) = item.index.fqn, _sizes(item)
        assert name not in header, f"{name}: a rank has two parts of it"
        end = begin + _length(item)
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": list(chunk.sizes), "data_offsets": [begin, end]}
        offsets[name] = {"saved_offsets": list(chunk.offsets)}
        begin = end
    header["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the first tensor is aligned, too
    return len(text).to_bytes(8, "little") + text


def _sizes(item: WriteItem) -> tuple[ChunkStorageMetadata, torch.dtype]:
    assert item.tensor_data is not None, f"{item.index.fqn}: only tensors are saved"
    return item.tensor_data.chunk, item.tensor_data.properties.dtype


def _length(item: WriteItem) -> int:
    """Bytes."""
    chunk, dtype = _sizes(item)
    return chunk.sizes.numel() * dtype.itemsize
