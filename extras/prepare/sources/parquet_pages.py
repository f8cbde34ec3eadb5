"""Check the page headers of a parquet column before Arrow decompresses it: sizes in the file's footer may be wrong.

Each page begins with a header in Thrift's compact protocol
(https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, PageHeader) with its
decompressed size, which Arrow allocates. A value of a dictionary page may stand for any number of rows.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.cli import UserError

PAGE_BYTES = 64 << 20  # limit for a page of any compression ratio
PACKED_BYTES = 512 << 20  # limit for a page compressed as text is, say 1,024 books of half a megabyte
MOST_PACKED = 100  # highest ratio of text, which usually has 2 to 20
ROWS_BYTES = 64 << 20  # of the rows read at once, if each were the longest
HEADER_BYTES = 1 << 16  # of a page's header: most have 30
LONGEST_HEADER = 16 << 20  # with a column's minimum and maximum in it
DATA, DICTIONARY, DATA_V2 = 0, 2, 3  # PageType
DICTIONARY_BYTES = 8 << 20  # of a dictionary whose values are looked at: Arrow writes them up to 1 MiB
UNPACKED, PACKED, VALUES = 2, 3, {DATA: 5, DATA_V2: 8}  # numbers of fields


def read_columns(
    file: BinaryIO,
    where: str,
    metadata: pq.FileMetaData,
    group: int,
    columns: list[str],
    most_rows: int,
    longest: int,
) -> Iterator[pa.RecordBatch]:
    """Columns of texts of a row group, at most so many rows at once. file: to seek in.

    UserError, beginning with `where`, for a page that decompresses to more than records of up to `longest` bytes
    explain; ArrowInvalid for a damaged one.
    """
    chunks = [_column_chunk(metadata.row_group(group), column) for column in columns]
    rows = min([most_rows, *(_check_pages(file, where, chunk, longest) for chunk in chunks)])
    reader = pq.ParquetFile(file, metadata=metadata)
    yield from reader.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def coalesce(arrays: Iterable[pa.Array], rows: int, size: int) -> Iterator[pa.Array]:
    """Concatenate arrays to batches of at least `rows` rows or `size` bytes: neither many tiny nor few huge ones."""
    held: list[pa.Array] = []
    for array in arrays:
        held.append(array)
        if sum(map(len, held)) >= rows or sum(array.nbytes for array in held) >= size:
            yield pa.chunked_array(held).combine_chunks() if len(held) > 1 else held[0]
            held = []
    if held:
        yield pa.chunked_array(held).combine_chunks()


def fetched(file: BinaryIO, group: pq.RowGroupMetaData, column: str, size: int) -> BinaryIO:
    """A file of `size` bytes of which one column of a row group was read ahead, in one request to a server."""
    chunk = _column_chunk(group, column)
    begin = _begin(chunk)
    file.seek(begin)
    return io.BufferedReader(_Fetched(file.read(chunk.total_compressed_size), begin, size))


class _Fetched(io.RawIOBase):
    """Part of a file, from byte `begin` on, at its original offset; the rest is missing."""

    def __init__(self, data: bytes, begin: int, size: int):
        self.data, self.begin, self.size, self.at = memoryview(data), begin, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer) -> int:
        first = self.at - self.begin
        part = self.data[first : first + len(buffer)] if first >= 0 else self.data[:0]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


def _column_chunk(group: pq.RowGroupMetaData, column: str) -> pq.ColumnChunkMetaData:
    chunks = (group.column(number) for number in range(group.num_columns))
    found = next((chunk for chunk in chunks if chunk.path_in_schema == column), None)
    if found is None:
        raise pa.ArrowInvalid(f"the column {column} holds no plain values")
    return found


def _begin(chunk: pq.ColumnChunkMetaData) -> int:
    """Where in the file a column chunk begins, as Arrow has it."""
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        return min(chunk.data_page_offset, chunk.dictionary_page_offset)
    return chunk.data_page_offset


def _check_pages(file: BinaryIO, where: str, chunk: pq.ColumnChunkMetaData, longest: int) -> int:
    """How many rows to read at once, as `read_columns`."""
    position, values, longest_value = _begin(chunk), 0, 1
    end = position + chunk.total_compressed_size
    while position < end and values < chunk.num_values:
        header, size = _read_header(file, position)
        try:
            kind, unpacked, packed = header[1], header[UNPACKED], header[PACKED]
            count = header[VALUES[kind]][1] if kind in VALUES else 0
        except (KeyError, TypeError):
            raise _damaged() from None
        if not (0 <= packed <= end - position and unpacked >= 0 and count >= 0):
            raise _damaged()
        if unpacked > max(longest, PAGE_BYTES if unpacked > MOST_PACKED * packed else PACKED_BYTES):
            raise UserError(
                f"{where}: a page of it decompresses from {packed:,} to {unpacked:,} bytes: write the file with "
                "smaller pages, or leave it out"
            )
        # On average over a page, so that rows at once are at most those of three pages; of a dictionary, at worst.
        value = unpacked // max(count, 1)
        if kind == DICTIONARY and unpacked <= DICTIONARY_BYTES and chunk.physical_type == "BYTE_ARRAY":
            file.seek(position + size)
            value = _longest_value(file.read(packed), unpacked, chunk.compression) or value
        longest_value = max(longest_value, value)
        values += count
        position += size + packed
    return max(1, ROWS_BYTES // longest_value)


def _longest_value(page: bytes, size: int, compression: str) -> int | None:
    """Bytes of the longest value of a dictionary page that decompresses to `size` bytes; None where that is unknown.

    A value is its length, uint32, and its bytes. A length below 65,536 ends in two zero bytes: the places that such
    bytes give are those of the values if each length leads to the next place, from the first byte to the last.
    """
    try:
        data = page if compression == "UNCOMPRESSED" else pa.decompress(page, size, compression.lower(), asbytes=True)
    except (pa.ArrowException, ValueError, OSError):
        return None
    raw = np.frombuffer(data, np.uint8)
    zeros = np.flatnonzero(raw == 0)
    ends = zeros[np.diff(zeros, append=-1) != 1]  # of runs of them
    places = ends[raw[ends - 1] == 0] - 3
    if len(raw) != size or not len(places) or places[0]:
        return None
    lengths = raw[places] + raw[places + 1].astype(np.int64) * 256
    leads_on = np.array_equal(places + 4 + lengths, np.append(places[1:], size))
    return int(lengths.max()) if leads_on else None


def _damaged() -> pa.ArrowInvalid:
    return pa.ArrowInvalid("a damaged page header")


def _read_header(file: BinaryIO, position: int) -> tuple[dict, int]:
    """The fields of a page's header by their numbers, and its bytes."""
    length = HEADER_BYTES
    while True:
        file.seek(position)
        reader = _Thrift(file.read(length))
        try:
            return reader.struct(), reader.at
        except IndexError:
            if len(reader.data) < length or length >= LONGEST_HEADER:
                raise _damaged() from None
            length *= 16
        except RecursionError:
            raise _damaged() from None


class _Thrift:
    """Structures in Thrift's compact protocol. IndexError where the data end before they do.

    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def struct(self) -> dict[int, int | dict | None]:
        """{number: value} of the fields: integers and structures; None for skipped types."""
        fields, number = {}, 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 15)
        return fields

    def _value(self, kind: int) -> int | dict | None:
        if kind in (1, 2):  # true, false
            return None
        if kind in (4, 5, 6):
            return self._integer()
        if kind == 12:
            return self.struct()
        if kind in (3, 7, 8):  # a byte, a double, bytes
            self._skip({3: 1, 7: 8}[kind] if kind != 8 else self._varint())
            return None
        raise _damaged()  # no page header has lists, sets or maps

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise _damaged()

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
