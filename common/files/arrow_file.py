"""The token lists of one memory-mapped Arrow stream, as NumPy views; opening it reads a page a record batch."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.cli import UserError

COLUMN = "input_ids"


class ArrowFile:
    """The `input_ids` column of one memory-mapped Arrow stream, as NumPy views of the file and numbers into them.

    tokens: the whole file as the values' type; offsets: the whole file as the offsets' type; width: of fixed-size
    lists, else 0; chunk_rows, offset_slot, token_slot: int64 [chunks], rows of a record batch, and where its first
    offset and the token its offsets count from lie in the views.
    """

    def __init__(self, path: Path):
        try:
            mapped = _map(path)
            raw = pa.py_buffer(mapped)  # the views below keep it alive
            _advise(mapped, "MADV_RANDOM")  # a page a record batch is read, not what lies around it
            schema = pa.ipc.open_stream(raw).schema
            self._check_type(path, schema)
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(COLUMN)])
            batches = pa.ipc.open_stream(raw, options=options)
            chunks = [self._describe(path, raw, batch.column(0)) for batch in batches if len(batch)]
        except pa.ArrowInvalid as error:
            raise UserError(f"{path}: no complete Arrow stream: tokenise again ({one_line(error)})") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise UserError(f"{path}: cut short: tokenise again ({one_line(error)})") from error
        _advise(mapped, "MADV_NORMAL")
        self.chunk_rows, self.offset_slot, self.token_slot = np.array(chunks, dtype=np.int64).reshape(-1, 3).T
        self.tokens, self.offsets = (
            np.frombuffer(raw, dtype, count=raw.size // np.dtype(dtype).itemsize)
            for dtype in (self._token_type, self._offset_type)
        )

    def _check_type(self, path: Path, schema: pa.Schema) -> None:
        if COLUMN not in schema.names:
            raise UserError(f"{path}: no column {COLUMN}, only {', '.join(schema.names)}: not a tokenised dataset")
        kind = schema.field(COLUMN).type
        is_fixed, is_large = pa.types.is_fixed_size_list(kind), pa.types.is_large_list(kind)
        if not (is_fixed or is_large or pa.types.is_list(kind)) or not pa.types.is_integer(kind.value_type):
            raise UserError(f"{path}: {COLUMN} is {kind}, not a list of integers")
        self.kind, self.width = kind, kind.list_size if is_fixed else 0
        self._token_type = np.dtype(kind.value_type.to_pandas_dtype())
        self._offset_type = np.dtype(np.int64 if is_large else np.int32)
        self.is_foreign = is_fixed or self._token_type != np.uint8 or "attention_mask" in schema.names

    def _describe(self, path: Path, raw: pa.Buffer, lists: pa.Array) -> tuple[int, int, int]:
        values = lists.values
        if lists.null_count or values.null_count:
            raise UserError(f"{path}: {COLUMN} holds nulls: tokenise again")
        if len(values) == 0:  # only empty lists: no buffer to point to
            return len(lists), self._slot(path, raw, lists, self._offset_type), 0
        token_slot = self._slot(path, raw, values, self._token_type)
        if self.width:
            return len(lists), 0, token_slot + lists.offset * self.width
        return len(lists), self._slot(path, raw, lists, self._offset_type), token_slot

    @staticmethod
    def _slot(path: Path, raw: pa.Buffer, array: pa.Array, dtype: np.dtype) -> int:
        """Where the array's offsets (of a list) or values begin in the file, counted in elements."""
        position = array.buffers()[1].address - raw.address
        if not 0 <= position < raw.size or position % dtype.itemsize:
            raise UserError(f"{path}: compressed Arrow: save it with datasets' save_to_disk")
        return position // dtype.itemsize + array.offset


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _map(path: Path) -> mmap.mmap | bytes:
    """The file, memory-mapped. (Not by pyarrow: reading from its mappings has the system fetch the whole file.)"""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:  # cannot be mapped
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _advise(mapped: mmap.mmap | bytes, advice: str) -> None:
    if mapped and hasattr(mmap, advice):
        mapped.madvise(getattr(mmap, advice))
