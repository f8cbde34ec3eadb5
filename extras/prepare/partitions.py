"""Shuffle records that do not fit into memory, and write them to partitions of an exact size, in several formats.

Records are lines of bytes, `id TAB text [TAB cluster] NEWLINE` (extras/prepare/sources/records.py). Each gets a random
64-bit key and is scattered over 256 bucket files by the key's first bits; then each bucket is read and sorted by the
whole key. A bucket fits into memory up to 32 GB of text; a larger one is read several times, for a range of keys each.
A killed run resumes after the last complete partition.

DuckDB (2.0, ORDER BY key) gives the same order in the same CPU time (1.3 s for 500,000 records) but took 560 MB where
this takes 310 to 370 MB, and it keeps no buckets for a run that resumes.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from common.files.safe_files import sync
from extras.prepare.dataset_writer import (
    CLUSTER_FEATURES,
    TEXT_FEATURES,
    arrow_schema,
    shard_name,
    write_dataset_files,
)
from extras.prepare.output_directory import Build
from extras.prepare.sources.record_lines import fields_of, lines_of
from extras.prepare.sources.records import FIELDS, Lines, columns, prefetch, skip, view

MEMORY_BYTES = 128 << 20  # text of the records in memory; the peak is about twice that
BATCH_BYTES = 2 << 20  # text of a batch of records
BUCKET_BITS = 8
BUCKETS = 1 << BUCKET_BITS
SCHEMA = pa.schema([("key", pa.uint64()), ("line", pa.large_binary())])
SCATTERED = "records in buckets"  # in the journal of the build


def in_random_order(batches: Iterable[Lines], build: Build, seed: int, written: Callable[[], int]) -> Iterator[Lines]:
    """The lines of `batches` in an order drawn uniformly from all permutations.

    The order depends on (seed, number of records) alone, not on the memory. `written()`: number of records in complete
    partitions; they are skipped, and buckets that hold no others are removed. A killed build that had scattered all
    records resumes from the buckets, without reading `batches`.
    """
    buckets = [build.scratch / f"{number:03d}.bucket" for number in range(BUCKETS)]
    noted = build.done(SCATTERED)
    if noted is not None and noted["boot"] == boot_id():
        counts = noted["counts"]
    else:
        for path in build.scratch.iterdir():  # of a run that was killed before all were scattered
            path.unlink()
        with closing(prefetch(_with_keys(batches, seed))) as keyed:
            held, counts = _scatter(keyed, buckets)
        if not any(counts):
            yield from skip(_sorted_lines(held), written())
            return
        build.note(SCATTERED, {"boot": boot_id(), "counts": counts})
    yield from prefetch(_in_buckets(buckets, counts, written))


def boot_id() -> str:
    """Identifies this boot of this machine. Buckets are not flushed to the disk (most are deleted before they get
    there), so after a reboot they may be incomplete."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.uuid4())  # differs each time: never resume


def _with_keys(batches: Iterable[Lines], seed: int) -> Iterator[pa.RecordBatch]:
    source = np.random.PCG64(seed)
    for lines in batches:
        yield pa.RecordBatch.from_arrays([pa.array(source.random_raw(len(lines))), lines], schema=SCHEMA)


def _by_key(keys: np.ndarray) -> np.ndarray:
    """A stable argsort of the keys."""
    order = np.argsort(keys)  # not stable, but several times as fast
    ordered = keys[order]
    return np.argsort(keys, kind="stable") if (ordered[1:] == ordered[:-1]).any() else order


def _by_bucket(keys: np.ndarray) -> np.ndarray:
    return np.argsort((keys >> np.uint64(64 - BUCKET_BITS)).astype(np.uint8), kind="stable")  # a radix sort


def _sorted(
    batches: list[pa.RecordBatch], ordered: Callable[[np.ndarray], np.ndarray] = _by_key
) -> Iterator[pa.RecordBatch]:
    """The rows sorted by their keys, in new batches; empties `batches` to free memory."""
    if not batches:
        return
    rows = pa.concat_batches(batches)
    batches.clear()
    if not rows.num_rows:
        return
    order = ordered(rows.column("key").to_numpy())
    _, offsets = view(rows.column("line"))
    ends = np.cumsum(np.diff(offsets)[order])
    cuts = np.searchsorted(ends, np.arange(BATCH_BYTES, ends[-1], BATCH_BYTES))
    for part in np.split(order, np.unique(cuts)):
        if len(part):
            yield rows.take(pa.array(part))


def _sorted_lines(batches: list[pa.RecordBatch]) -> Iterator[Lines]:
    return (rows.column("line") for rows in _sorted(batches))


def _scatter(batches: Iterator[pa.RecordBatch], buckets: list[Path]) -> tuple[list[pa.RecordBatch], list[int]]:
    """Append each row to the file of its bucket. Returns (an empty list, number of rows in each bucket).

    If all rows fit into memory, returns them instead, and writes no bucket.
    """
    counts = np.zeros(BUCKETS, np.int64)
    held, size, appending = [], 0, None
    with ThreadPoolExecutor(1) as pool:  # write one half while reading the other
        for batch in batches:
            held.append(batch)
            size += batch.nbytes
            if size > MEMORY_BYTES // 2:
                counts += appending.result() if appending else 0
                appending = pool.submit(_append, held, buckets)
                held, size = [], 0
        if appending:
            counts += appending.result()
            counts += _append(held, buckets)
    return held, counts.tolist()


def _append(held: list[pa.RecordBatch], buckets: list[Path]) -> np.ndarray:
    """Move the rows to the bucket files. Returns the number of rows per bucket."""
    counts = np.zeros(BUCKETS, np.int64)
    for batch in _sorted(held, _by_bucket):
        number_of = (batch.column("key").to_numpy() >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
        cuts = np.searchsorted(number_of, np.arange(BUCKETS + 1)).tolist()
        for number, (begin, end) in enumerate(pairwise(cuts)):
            if begin < end:
                # Opened for each append: 256 open files come close to usual limits.
                with open(buckets[number], "ab") as file:
                    file.write(batch.slice(begin, end - begin).serialize())
        counts += np.diff(cuts)
    return counts


def _in_buckets(buckets: list[Path], counts: list[int], written: Callable[[], int]) -> Iterator[Lines]:
    ends = np.cumsum(counts)
    first = written()
    removed = 0
    for number, path in enumerate(buckets):
        while removed < number and ends[removed] <= written():
            buckets[removed].unlink(missing_ok=True)
            removed += 1
        if ends[number] > first and counts[number]:
            begin = int(ends[number]) - counts[number]
            yield from skip(_sorted_bucket(number, path), max(0, first - begin))


def _sorted_bucket(number: int, path: Path) -> Iterator[Lines]:
    parts = -(-path.stat().st_size // MEMORY_BYTES)
    span = 1 << (64 - BUCKET_BITS)  # of keys
    bounds = [number * span + span * part // parts for part in range(parts + 1)]
    for low, high in pairwise(bounds):
        yield from _sorted_lines(list(_read_bucket(path, np.uint64(low), np.uint64(high - 1))))


def _read_bucket(path: Path, first_key: np.uint64, last_key: np.uint64) -> Iterator[pa.RecordBatch]:
    """The rows of a bucket with keys from `first_key` to `last_key`."""
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            rows = pa.ipc.read_record_batch(pa.ipc.read_message(file), SCHEMA)
            keys = rows.column("key").to_numpy()
            inside = (keys >= first_key) & (keys <= last_key)
            yield rows if inside.all() else rows.filter(pa.array(inside))


logger = logging.getLogger(__name__)
WRITTEN = "partitions written"  # in the journal of the build
QUEUED = 64  # batches (of about 2 MB) that may wait to be written


class PartitionWriter:
    """Split a stream of lines into partitions of exactly `max_records` (the last may be smaller), in several formats.

    One thread writes lines, and one flushes complete partitions, so that the next one begins meanwhile. A partition is
    noted in the build's journal once it is flushed in all formats. `written` is the number of records in noted
    partitions; a resumed writer expects the records after them.
    """

    def __init__(self, build: Build, final_parent: Path, max_records: int) -> None:
        """The keys of `build.paths` are formats: csv, fasta, parquet, arrow; final_parent: for the log."""
        self.build = build
        self.final_parent = final_parent
        self.max_records = max_records
        self.number, self.written = build.done(WRITTEN) or (0, 0)  # number: of the partition being filled
        self.filled = 0  # records in it
        self._before = self.written  # records in earlier partitions
        self._files: list[_File] = []  # of the partition being filled
        self._queued: deque[Future] = deque()  # writes to them
        self._flushing: list[_File] = []  # of the partition before it
        self._flushed: Future | None = None
        self._writer, self._flusher = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def __enter__(self) -> PartitionWriter:
        return self

    def __exit__(self, *error) -> None:
        for pool in (self._writer, self._flusher):
            pool.shutdown(cancel_futures=any(error))
        if any(error):
            for file in (*self._flushing, *self._files):
                file.discard()

    def write(self, lines: Lines) -> None:
        while len(lines):
            if not self.filled:
                fields = fields_of(lines)
                self._files = [FORMATS[name](path, self.number, fields) for name, path in self.build.paths.items()]
            head, lines = lines[: self.max_records - self.filled], lines[self.max_records - self.filled :]
            self._queued.append(self._writer.submit(_add, self._files, head))
            if len(self._queued) > QUEUED:
                self._queued.popleft().result()
            self.filled += len(head)
            if self.filled == self.max_records:
                self._end_partition()

    def close(self) -> int:
        """Finish. Returns the number of records written, including those of earlier runs."""
        if self.filled:  # no empty file after an exact multiple of max_records
            self._end_partition()
        if self._flushed:
            self._flushed.result()
        if "arrow" in self.build.paths:
            _name_shards(self.build.paths["arrow"], self.number, self.written)
        return self.written

    def _end_partition(self) -> None:
        while self._queued:
            self._queued.popleft().result()
        if self._flushed:
            self._flushed.result()
        for name in self.build.paths:
            file_name = FORMATS[name].log_name.format(self.number)
            logger.info("Writing %d records to %s", self.filled, self.final_parent / name / file_name)
        self.number += 1
        self._before += self.filled
        self.filled = 0
        self._flushing, self._files = self._files, []
        self._flushed = self._flusher.submit(self._flush, self.number, self._before)

    def _flush(self, number: int, written: int) -> None:
        for file in self._flushing:
            file.end()
        self.build.note(WRITTEN, [number, written])
        self.written = written


def _add(files: list[_File], lines: Lines) -> None:
    for file in files:
        file.add(lines)


class _File:
    """A partition in one format."""

    name = log_name = ""  # with the partition's number

    def __init__(self, directory: Path, number: int, fields: tuple[str, ...]) -> None:
        self.fields = fields
        self.file = open(directory / self.name.format(number), "wb")  # noqa: SIM115
        self.begin()

    def begin(self) -> None: ...

    def add(self, lines: Lines) -> None: ...

    def end(self) -> None:
        with self.file:
            sync(self.file)

    def discard(self) -> None:
        """After an error: what is still buffered goes nowhere, for writing it to a full disk would fail again."""
        if not self.file.closed:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.file.fileno())


class _Csv(_File):
    name = log_name = "x{:03d}.csv"

    def begin(self) -> None:
        self.file.write(",".join(self.fields).encode() + b"\n")

    def add(self, lines: Lines) -> None:
        text = view(lines)[0].tobytes()
        if b"," not in text and b'"' not in text:  # nothing to quote: only the tab changes
            self.file.write(text.replace(b"\t", b","))
            return
        quoted = io.StringIO()
        csv.writer(quoted, lineterminator="\n").writerows(line.split("\t") for line in text.decode().split("\n")[:-1])
        self.file.write(quoted.getvalue().encode())


class _Fasta(_File):
    name = log_name = "x{:03d}.fasta"

    def add(self, lines: Lines) -> None:
        if len(self.fields) == len(FIELDS):  # FASTA has no place for the cluster
            lines = lines_of(columns(lines).select(FIELDS[:2]), with_clusters=False)
        text = view(lines)[0].tobytes()
        self.file.write(b">" + text[:-1].replace(b"\n", b"\n>").replace(b"\t", b"\n") + b"\n")


class _Batches(_File):
    """Record batches, written by `writer`."""

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(CLUSTER_FEATURES if len(self.fields) == len(FIELDS) else TEXT_FEATURES)

    writer: pa.ipc.RecordBatchStreamWriter | pa.parquet.ParquetWriter

    def add(self, lines: Lines) -> None:
        self.writer.write_batch(pa.RecordBatch.from_arrays(columns(lines).columns, schema=self.schema))

    def end(self) -> None:
        self.writer.close()
        super().end()


class _Arrow(_Batches):
    """One `datasets` directory, a shard per partition."""

    name = "data-{:05d}.arrow"
    log_name = "data-{:05d}-of-*.arrow"  # their number is known at the end

    def begin(self) -> None:
        self.writer = pa.ipc.new_stream(self.file, self.schema)


class _Parquet(_Batches):
    name = log_name = "x{:03d}.parquet"

    def begin(self) -> None:
        self.writer = pa.parquet.ParquetWriter(self.file, self.schema)


FORMATS = {"csv": _Csv, "fasta": _Fasta, "parquet": _Parquet, "arrow": _Arrow}


def _name_shards(directory: Path, partitions: int, records: int) -> None:
    for number in range(partitions):
        path = directory / _Arrow.name.format(number)
        if path.exists():  # else renamed by a run that was killed here
            path.rename(directory / shard_name(number, partitions))
    with pa.ipc.open_stream(str(directory / shard_name(0, partitions))) as first:
        has_clusters = FIELDS[-1] in first.schema.names
    write_dataset_files(directory, CLUSTER_FEATURES if has_clusters else TEXT_FEATURES, partitions, records)
