"""FASTA records to exactly numbered partitions, in one random order over the whole input, with bounded memory.

A record travels as one line of bytes, `id TAB sequence` (neither holds white space), in batches: lists of lines.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from common.output_directory import sync
from common.token_writer import TEXT_FEATURES, DatasetWriter, arrow_schema

logger = logging.getLogger(__name__)
BATCH_RECORDS = 20_000
MEMORY_BYTES = 512 << 20  # text of the records held at once while shuffling
FAN_OUT_BITS = 8  # 256 temporary files a level: one level is enough up to 128 GB of text
Batch = list[bytes]
Keyed = tuple[Batch, np.ndarray]  # lines and their random keys, uint64


def batches_of_lines(records: Iterable[tuple[bytes, bytes]], size: int = BATCH_RECORDS) -> Iterator[Batch]:
    """Group (id, sequence) records into lists of at most `size` lines."""
    batch = []
    for name, sequence in records:
        batch.append(name + b"\t" + sequence)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def in_random_order(
    batches: Iterable[Batch], scratch: Path, seed: int, memory_bytes: int = MEMORY_BYTES
) -> Iterator[Batch]:
    """The same lines, in an order drawn uniformly from all permutations.

    Every line gets a random 64-bit key and the lines are sorted by it, in memory where they fit into `memory_bytes`
    and otherwise after scattering them over files by the key's first bits. So the order depends on (seed, number of
    records) alone, not on how much memory there is.
    """
    source = np.random.PCG64(seed)
    return _sorted_by_key(((lines, source.random_raw(len(lines))) for lines in batches), scratch, memory_bytes, 0)


def _sorted_by_key(keyed: Iterable[Keyed], scratch: Path, memory_bytes: int, level: int) -> Iterator[Batch]:
    keyed = iter(keyed)
    held, held_keys, size = [], [], 0
    for lines, keys in keyed:
        held += lines
        held_keys.append(keys)
        size += sum(map(len, lines))
        if size > memory_bytes and level < 64 // FAN_OUT_BITS:
            break
    else:
        order = np.argsort(np.concatenate(held_keys), kind="stable").tolist() if held else []
        for begin in range(0, len(order), BATCH_RECORDS):
            yield [held[i] for i in order[begin : begin + BATCH_RECORDS]]
        return
    directory = scratch / f"level{level}"
    directory.mkdir()
    first = [(held, np.concatenate(held_keys))]
    del held, held_keys
    _scatter(chain(first, keyed), directory, 64 - FAN_OUT_BITS * (level + 1))
    for bucket in range(1 << FAN_OUT_BITS):
        lines_path, keys_path = directory / f"{bucket}.lines", directory / f"{bucket}.keys"
        if lines_path.exists():
            with open(lines_path, "rb") as lines_file, open(keys_path, "rb") as keys_file:
                lines_path.unlink(), keys_path.unlink()  # the disk space is free as soon as they are read
                yield from _sorted_by_key(_read_bucket(lines_file, keys_file), scratch, memory_bytes, level + 1)
    directory.rmdir()


def _scatter(keyed: Iterator[Keyed], directory: Path, shift: int) -> None:
    """Append each line and its key to the files of its bucket: the key's bits from `shift` up, within the level."""
    pending: list[Batch] = [[] for _ in range(1 << FAN_OUT_BITS)]
    pending_keys: list[list[np.ndarray]] = [[] for _ in range(1 << FAN_OUT_BITS)]
    waiting = 0

    def flush() -> None:
        # Opened for each append: 256 files held open would come close to the usual limits.
        for bucket, lines in enumerate(pending):
            if lines:
                with open(directory / f"{bucket}.lines", "ab") as file:
                    file.write(b"\n".join(lines) + b"\n")
                with open(directory / f"{bucket}.keys", "ab") as file:
                    file.write(np.concatenate(pending_keys[bucket]).tobytes())
                lines.clear()
                pending_keys[bucket].clear()

    for lines, keys in keyed:
        buckets = (keys >> np.uint64(shift)).astype(np.int64) & ((1 << FAN_OUT_BITS) - 1)
        for line, bucket in zip(lines, buckets.tolist(), strict=True):
            pending[bucket].append(line)
        for bucket in np.unique(buckets).tolist():
            pending_keys[bucket].append(keys[buckets == bucket])
        waiting += sum(map(len, lines))
        lines.clear()  # the first batch may be all that memory holds
        if waiting >= 64 << 20:
            flush()
            waiting = 0
    flush()


def _read_bucket(lines_file: io.BufferedReader, keys_file: io.BufferedReader) -> Iterator[Keyed]:
    rest = b""
    while block := lines_file.read(16 << 20):
        *lines, rest = (rest + block).split(b"\n")
        yield lines, np.frombuffer(keys_file.read(8 * len(lines)), np.uint64)


class PartitionWriter:
    """Cuts a stream of lines into partitions of exactly `max_records` (the last: what is left), in several formats."""

    def __init__(self, directories: dict[str, Path], final_parent: Path, max_records: int) -> None:
        """directories: format ("csv", "fasta", "parquet", "arrow") -> where to write; final_parent: for the log."""
        self.formats = {name: FORMATS[name](path) for name, path in directories.items()}
        self.final_parent = final_parent
        self.max_records = max_records
        self.number = 0  # of the partition being written
        self.filled = 0  # records in it

    def write(self, lines: Batch) -> None:
        while lines:
            now, lines = lines[: self.max_records - self.filled], lines[self.max_records - self.filled :]
            for output in self.formats.values():
                output.write(self.number, now)
            self.filled += len(now)
            if self.filled == self.max_records:
                self._end_partition()

    def close(self) -> int:
        """Finish; returns the number of records written."""
        records = self.number * self.max_records + self.filled
        if self.filled:  # an input that is an exact multiple ends without an empty file
            self._end_partition()
        for output in self.formats.values():
            output.close()
        return records

    def _end_partition(self) -> None:
        for name, output in self.formats.items():
            file_name = output.end_partition()
            logger.info("Writing %d records to %s", self.filled, self.final_parent / name / file_name)
        self.number += 1
        self.filled = 0


class _Files:
    """A file per partition, opened at its first record."""

    suffix = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = None

    def write(self, number: int, lines: Batch) -> None:
        if self.file is None:
            self.file = open(self.directory / f"x{number:03d}.{self.suffix}", "wb")  # noqa: SIM115
            self.begin()
        self.add(lines)

    def end_partition(self) -> str:
        self.end()
        sync(self.file)
        name = Path(self.file.name).name
        self.file.close()
        self.file = None
        return name

    def begin(self) -> None: ...

    def add(self, lines: Batch) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


class _Csv(_Files):
    suffix = "csv"

    def begin(self) -> None:
        self.file.write(b"id,text\n")

    def add(self, lines: Batch) -> None:
        text = b"\n".join(lines)
        if b"," not in text and b'"' not in text:  # nothing to quote: the tab is the only thing to change
            self.file.write(text.replace(b"\t", b",") + b"\n")
            return
        quoted = io.StringIO()
        csv.writer(quoted, lineterminator="\n").writerows(line.decode("ascii").split("\t") for line in lines)
        self.file.write(quoted.getvalue().encode("ascii"))


class _Fasta(_Files):
    suffix = "fasta"

    def add(self, lines: Batch) -> None:
        self.file.write(b">" + b"\n>".join(lines).replace(b"\t", b"\n") + b"\n")


class _Parquet(_Files):
    suffix = "parquet"

    def begin(self) -> None:
        self.writer = pa.parquet.ParquetWriter(self.file, arrow_schema(TEXT_FEATURES))

    def add(self, lines: Batch) -> None:
        self.writer.write_batch(_record_batch(lines))

    def end(self) -> None:
        self.writer.close()


class _Arrow:
    """One `datasets` directory, a shard per partition."""

    def __init__(self, directory: Path) -> None:
        self.writer = DatasetWriter(directory, TEXT_FEATURES, shard_bytes=None)

    def write(self, number: int, lines: Batch) -> None:
        self.writer.write(_record_batch(lines))

    def end_partition(self) -> str:
        self.writer.end_shard()
        return f"data-{self.writer.shards - 1:05d}-of-*.arrow"  # how many there will be is known at the end

    def close(self) -> None:
        self.writer.close()


FORMATS = {"csv": _Csv, "fasta": _Fasta, "parquet": _Parquet, "arrow": _Arrow}


def _record_batch(lines: Batch) -> pa.RecordBatch:
    columns = zip(*(line.split(b"\t") for line in lines), strict=True)
    arrays = [pa.array(column, pa.binary()).cast(pa.string()) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(TEXT_FEATURES))
