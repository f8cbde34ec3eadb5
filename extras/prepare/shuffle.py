"""One random order over records that do not fit into memory, made in two passes over temporary files.

Every record gets a random 64-bit key. Records are scattered over 256 files by the key's first bits, and file after
file is read and sorted by the whole key. Each fits into memory up to 32 GB of text; beyond that it is read once for
every part of it that fits.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from extras.prepare.output_directory import Build
from extras.sources.records import Lines, ahead, skip, view

MEMORY_BYTES = 128 << 20  # text of the records held at once; the peak is about twice that
BATCH_BYTES = 2 << 20  # text of the records passed on at once
BUCKET_BITS = 8
BUCKETS = 1 << BUCKET_BITS
SCHEMA = pa.schema([("key", pa.uint64()), ("line", pa.large_binary())])
SCATTERED = "records in buckets"  # in the journal of the build


def in_random_order(batches: Iterable[Lines], build: Build, seed: int, written: Callable[[], int]) -> Iterator[Lines]:
    """The lines of `batches` in an order drawn uniformly from all permutations.

    The order depends on (seed, number of records) alone, not on how much memory there is. `written()` says how many
    records of it are written for good: the first that is yielded is the one after them, and temporary files with
    nothing but them are removed. A killed build that had scattered all records goes on from there, without `batches`.
    """
    buckets = [build.scratch / f"{number:03d}.bucket" for number in range(BUCKETS)]
    noted = build.done(SCATTERED)
    if noted is not None and noted["boot"] == boot_id():
        counts = noted["counts"]
    else:
        for path in build.scratch.iterdir():  # of a run that was killed while it scattered
            path.unlink()
        with closing(ahead(_with_keys(batches, seed))) as keyed:
            held, counts = _scatter(keyed, buckets)
        if not any(counts):
            yield from skip(_sorted_lines(held), written())
            return
        build.note(SCATTERED, {"boot": boot_id(), "counts": counts})
    yield from ahead(_in_buckets(buckets, counts, written))


def boot_id() -> str:
    """Which start of which machine this is. The buckets outlive the process there; they are not flushed to the disk,
    most of which they would reach only to be deleted, so nobody else can count on them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(uuid.uuid4())  # never the same again


def _with_keys(batches: Iterable[Lines], seed: int) -> Iterator[pa.RecordBatch]:
    source = np.random.PCG64(seed)
    for lines in batches:
        yield pa.RecordBatch.from_arrays([pa.array(source.random_raw(len(lines))), lines], schema=SCHEMA)


def _by_key(keys: np.ndarray) -> np.ndarray:
    """The order of the keys; equal ones keep theirs."""
    order = np.argsort(keys)  # not stable, and several times as fast
    found = keys[order]
    return np.argsort(keys, kind="stable") if (found[1:] == found[:-1]).any() else order


def _by_bucket(keys: np.ndarray) -> np.ndarray:
    return np.argsort((keys >> np.uint64(64 - BUCKET_BITS)).astype(np.uint8), kind="stable")  # a radix sort


def _sorted(
    batches: list[pa.RecordBatch], ordered: Callable[[np.ndarray], np.ndarray] = _by_key
) -> Iterator[pa.RecordBatch]:
    """The rows in the order of their keys, in new batches; `batches` is emptied."""
    rows = pa.concat_batches(batches) if batches else []
    batches.clear()
    if not len(rows):
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
    """Append each row to the file of its bucket and return (nothing, how many rows each got).

    Where all rows fit into memory they are returned instead, and no bucket has any.
    """
    counts = np.zeros(BUCKETS, np.int64)
    held, size, appending = [], 0, None
    with ThreadPoolExecutor(1) as pool:  # one half is written while the other is read
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
    """Move what is held to the files; returns how many rows went to each."""
    counts = np.zeros(BUCKETS, np.int64)
    for batch in _sorted(held, _by_bucket):
        number_of = (batch.column("key").to_numpy() >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
        cuts = np.searchsorted(number_of, np.arange(BUCKETS + 1)).tolist()
        for number, (begin, end) in enumerate(pairwise(cuts)):
            if begin < end:
                # Opened for each append: 256 files held open would come close to the usual limits.
                with open(buckets[number], "ab") as file:
                    file.write(batch.slice(begin, end - begin).serialize())
        counts += np.diff(cuts)
    return counts


def _in_buckets(buckets: list[Path], counts: list[int], written: Callable[[], int]) -> Iterator[Lines]:
    ends = np.cumsum(counts)
    first = written()
    used_up = 0
    for number, path in enumerate(buckets):
        while used_up < number and ends[used_up] <= written():
            buckets[used_up].unlink(missing_ok=True)
            used_up += 1
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
    """The rows of a file with keys from `first_key` to `last_key`."""
    with pa.OSFile(str(path)) as file:
        while file.tell() < file.size():
            rows = pa.ipc.read_record_batch(pa.ipc.read_message(file), SCHEMA)
            keys = rows.column("key").to_numpy()
            inside = (keys >= first_key) & (keys <= last_key)
            yield rows if inside.all() else rows.filter(pa.array(inside))
