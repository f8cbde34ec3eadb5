"""Read checkpoints of format 1, which this program wrote before 0.5 and torch.distributed.checkpoint writes.

Their index is metadata.json or, in older ones, torch's pickled `.metadata`; torch.save made each item of a shard: an
uncompressed zip archive with a pickle and the bytes of a tensor. Both are read without running code from them, by a
parser of what checkpoints use. Values that are no tensors, such as the learning rate, are not read: flags give them.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from common.checkpoint.metadata import (
    DTYPES,
    MOST_DIMENSIONS,
    Refused,
    StoredChunk,
    decode,
    is_size,
)
from common.checkpoint.reader import Reader
from common.checkpoint.writer import METADATA
from common.cli import one_line
from common.files.safe_files import file_size, shorten
from extras.interop.inert_pickle import Call, Name, Persistent, loads
from extras.interop.pickled_metadata import content_of_pickle

PICKLED_METADATA = ".metadata"
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_TENSOR_NAMES = {
    *(("torch._utils", f"_rebuild_tensor_v{version}") for version in (2, 3)),
    *(("torch", name) for name in (*_STORAGES, *DTYPES)),
    *(("torch.storage", "UntypedStorage"), ("collections", "OrderedDict")),
}
_LARGEST_PICKLE = 16 << 20  # bytes of one item's pickle: a value, or the description of a tensor


class EarlierReader(Reader):
    """Reads such a checkpoint. sizes: {file: bytes}; of another program's, which has no manifest, as they are."""

    def __init__(self, path: Path, sizes: dict[str, int]):
        super().__init__(path, sizes, METADATA if METADATA in sizes else PICKLED_METADATA)

    def decode(self, data: bytes) -> Metadata:
        content = json.loads(data) if self.index == METADATA else content_of_pickle(data)
        if not (isinstance(content, dict) and isinstance(content.pop("values", None), dict)):
            raise Refused("it is no metadata")
        return decode(content, self.sizes)

    def read_chunk(self, file: io.BufferedReader, name: str, stored: StoredChunk) -> Tensor:
        try:
            return _Archive(file, stored.begin, stored.length).tensor(stored)
        except Refused as error:
            raise Refused(f"{stored.file}: {name}: {one_line(error)}") from error


class _FileSlice(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int):
        self.file, self.begin, self.length, self.at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        if position < 0:
            raise zipfile.BadZipFile("damaged archive")
        self.at = position
        return position

    def readinto(self, buffer) -> int:
        count = max(0, min(len(buffer), self.length - self.at))
        self.file.seek(self.begin + self.at)
        count = self.file.readinto(memoryview(buffer)[:count])
        self.at += count
        return count


class _Archive:
    """An archive of torch.save: `<name>/data.pkl`, and `<name>/data/<key>` with the bytes of a storage."""

    def __init__(self, file: io.BufferedReader, begin: int, length: int):
        self.file = _FileSlice(file, begin, length)
        self.storages: dict[str, Tensor] = {}  # read so far, as bytes: tied weights share one
        try:
            with zipfile.ZipFile(self.file) as archive:
                self.entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        except Exception as error:  # a damaged archive raises many kinds
            raise Refused(f"damaged archive ({type(error).__name__})") from error

    def tensor(self, stored: StoredChunk) -> Tensor:
        """A tensor. Refused unless it has the dtype and sizes of the metadata."""
        call = loads(self._small("data.pkl"), _TENSOR_NAMES)
        described = _described(call)
        if (described.dtype, described.sizes) != (stored.dtype, stored.sizes):
            raise Refused("it is another tensor than the metadata say")
        return self._read(described)

    def tensors(self, key: str, without: Callable[[str], bool]) -> dict[str, Tensor]:
        """See `read_saved`."""
        content = loads(self._small("data.pkl"), _TENSOR_NAMES)
        of_key = content.get(key) if isinstance(content, dict) else None
        of_key = of_key.items if isinstance(of_key, Call) else of_key
        if not isinstance(of_key, dict):
            raise Refused(f"it holds no {key}")
        wanted = {name: value for name, value in of_key.items() if isinstance(name, str) and not without(name)}
        return {name: self._read(_described(value)) for name, value in wanted.items()}

    def _read(self, described: _Described) -> Tensor:
        begin, size = self._place(f"data/{described.key}")
        if size % described.dtype.itemsize:
            raise Refused("it has half a number")
        of_dimensions = zip(described.sizes, described.strides, strict=True)
        reach = sum((n - 1) * stride for n, stride in of_dimensions) + described.offset + 1
        if 0 not in described.sizes and max(reach, math.prod(described.sizes)) * described.dtype.itemsize > size:
            raise Refused("it is larger than its bytes")
        data = self.storages.get(described.key)
        if data is None:
            if (taken := sum(map(len, self.storages.values())) + size) > self.file.length:
                raise Refused(f"its tensors have {taken:,} bytes, its file {self.file.length:,}")
            data = self.storages[described.key] = torch.empty(size, dtype=torch.uint8)
            self.file.seek(begin)
            if size and self.file.readinto(data.numpy()) != size:
                raise Refused("it is cut short")
        return data.view(described.dtype).as_strided(described.sizes, described.strides, described.offset)

    def _small(self, name: str) -> bytes:
        begin, size = self._place(name)
        if size > _LARGEST_PICKLE:
            raise Refused(f"its {name} is larger than {_LARGEST_PICKLE:,} bytes")
        self.file.seek(begin)
        return self.file.read(size)

    def _place(self, name: str) -> tuple[int, int]:
        """(begin, size) of an entry's bytes. Refused if it is missing or compressed."""
        entry = self.entries.get(name)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise Refused(f"it has no {name} that is stored as it is")
        self.file.seek(entry.header_offset)
        header = self.file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise Refused("damaged archive")
        begin = entry.header_offset + 30 + int.from_bytes(header[26:28], "little")
        begin += int.from_bytes(header[28:30], "little")
        if begin + entry.file_size > self.file.length:
            raise Refused("damaged archive")
        return begin, entry.file_size


@dataclass(frozen=True)
class _Described:
    """A tensor as its pickle describes it."""

    dtype: torch.dtype
    key: str  # of its storage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def _described(call: Any) -> _Described:
    """What a call of _rebuild_tensor would make. Refused for anything else."""
    if not (isinstance(call, Call) and call.of.name.startswith("_rebuild_tensor") and len(call.arguments) >= 6):
        raise Refused("it is no tensor")
    storage, offset, sizes, strides = call.arguments[:4]
    dtype, key = _storage(storage, call.arguments)
    if dtype not in DTYPES:
        raise Refused(f"it has the dtype {shorten(dtype)}")
    if not (isinstance(sizes, tuple) and len(sizes) <= MOST_DIMENSIONS and all(map(is_size, sizes))):
        raise Refused("it has sizes that are none")
    valid = isinstance(strides, tuple) and all(type(n) is int and 0 <= n < 1 << 53 for n in (*strides, offset))
    if not valid or len(strides) != len(sizes):
        raise Refused("it has strides that are none")
    return _Described(DTYPES[dtype], key, offset, sizes, strides)


def _storage(storage: Any, arguments: tuple) -> tuple[str, str]:
    """(dtype, key) of a tensor's storage; the dtype is empty if it is unknown."""
    reference = storage.reference if isinstance(storage, Persistent) else ()
    if len(reference) != 5 or not isinstance(reference[1], Name) or not isinstance(reference[2], str):
        raise Refused("it has a storage that is none")
    dtype = _STORAGES.get(reference[1].name, "")
    if not dtype and len(arguments) > 6 and isinstance(arguments[6], Name):
        dtype = arguments[6].name  # a dtype without a storage class of its own
    return dtype, reference[2]


def read_saved(file: io.BufferedReader, key: str, without: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of `{key: {name: tensor}}` in a file of torch.save, but those `without` names.

    Refused if the file holds anything else under a name, or what no checkpoint holds. They take no more memory than
    the file has bytes.
    """
    return _Archive(file, 0, file_size(file)).tensors(key, without)
