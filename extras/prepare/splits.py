"""Sizes of the train, validation and test splits, and their records: drawn one by one, or by whole clusters.

For clusters, records and the table of clusters are joined by 64-bit hashes of their names, in 256 buckets that are
each joined in memory. The disk holds 16 bytes a row of the table and 16 a record, twice for a while; memory holds one
bucket (some 100 MB for 190 million rows). Among 190 million names, two share a hash with probability 0.001; they would
count as one. DuckDB (2.0) takes 1.06 s of CPU and 380 MB to join 500,000 records with 2 million rows, this 0.67 s and
154 MB.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from common.cli import UserError
from common.data.counter_rng import CLUSTER_ORDER, derive_key, hash_counters
from common.files.safe_files import sync_directory

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
UNUSED = len(SPLITS)
WINDOW = 1 << 16  # records whose labels are drawn together
HELD_OUT = 50_000  # default number of records of validation, and of test
MAX_HELD_OUT = 0.1  # largest share of validation + test together, without --train_size
# Of a held-out split, at least so many clusters: a mean over 20 has a quarter of the deviation of one, and a loss or a
# metric is not that of the one family that fills the split (276 of 8,000 UniRef90 proteins: two thirds of 400).
HELD_OUT_CLUSTERS = 20
POOL = 2  # times the records held out: in clusters that may be, so that training keeps small ones as well


def split_sizes(
    records: int, train: float | None = None, validation: float | None = None, test: float | None = None
) -> tuple[int, int, int]:
    """Number of records in (train, validation, test), out of `records`.

    Sizes are counts, or fractions below 1. Given sizes are used exactly if they fit. The default (None) of validation
    and test is HELD_OUT each: of the rest after a given train, else at most a tenth of the input together; that of
    train is the rest. Given sizes that do not fit are scaled down in proportion, with a warning: to the input, and,
    without a given train, counts of validation + test to a tenth of it. A split that was requested keeps at least one
    record. UserError for fewer than 3 records, an invalid size, or if all three are 0.
    """
    if records < 3:
        raise UserError(f"{records} records: at least 3 are needed to make the splits")
    requested = dict(zip(SPLITS, (train, validation, test), strict=True))
    sizes_given = {name: _count(name, size, records) for name, size in requested.items() if size is not None}
    if len(sizes_given) == len(SPLITS) and not any(sizes_given.values()):
        raise UserError("--train_size, --validation_size and --test_size are 0: no record would be used")
    defaults = [name for name in SPLITS[1:] if name not in sizes_given]
    tenth = int(MAX_HELD_OUT * records)
    held_out = min(HELD_OUT, max(1, tenth // 2))
    sizes, total = sizes_given, sum(sizes_given.values())
    if train is None and total + len(defaults) >= records:
        fractions = all(requested[name] < 1 for name in sizes_given)
        limit = records - 1 if fractions else max(tenth, sum(n > 0 for n in sizes_given.values()))
        sizes = _scale(sizes_given, min(limit, records - 1 - len(defaults)))
    elif train is not None and total + len(defaults) > records:
        sizes = _scale(sizes_given, records - held_out * len(defaults))
    if sizes != sizes_given:
        logger.warning(
            "%s do not fit into %s records: scaled down to %s (fractions, or sizes that fit, are used exactly)",
            " + ".join(f"{name} {n:,}" for name, n in sizes_given.items()),
            f"{records:,}",
            " + ".join(f"{n:,}" for n in sizes.values()),
        )
    rest = records - sum(sizes.values())
    most = (rest - 1 if train is None else rest) // max(len(defaults), 1)
    sizes = dict.fromkeys(defaults, min(HELD_OUT if train is not None else held_out, most)) | sizes
    sizes.setdefault("train", records - sum(sizes.values()))
    return tuple(sizes[name] for name in SPLITS)


def split_labels(records: int, sizes: tuple[int, int, int], seed: int) -> Iterator[np.ndarray]:
    """The split of every record in order (0 train, 1 validation, 2 test, 3 unused), in arrays of up to WINDOW, uint8.

    Uniform over all ways to choose splits of exactly these sizes, with one window in memory: the counts of the labels
    in the next window are multivariate hypergeometric, and their positions in it a shuffle.
    """
    generator = np.random.default_rng([seed, 1])  # not the stream that shuffled the partitions
    remaining = np.array([*sizes, records - sum(sizes)], dtype=np.int64)
    assert (remaining >= 0).all()
    while left := int(remaining.sum()):
        counts = generator.multivariate_hypergeometric(remaining, min(WINDOW, left), method="marginals")
        labels = np.repeat(np.arange(4, dtype=np.uint8), counts)
        generator.shuffle(labels)
        remaining -= counts
        yield labels


def labels_by_file(windows: Iterable[np.ndarray], counts: list[int]) -> Iterator[np.ndarray]:
    """The labels of all records, in windows, regrouped by file. counts: records of each file."""
    windows, ahead = iter(windows), np.empty(0, np.uint8)
    for count in counts:
        parts = [ahead]
        while sum(map(len, parts)) < count:
            parts.append(next(windows))
        labels = np.concatenate(parts)
        ahead = labels[count:]
        yield labels[:count]


def _count(name: str, size: float, records: int) -> int:
    if not (math.isfinite(size) and size >= 0) or (size >= 1 and size != int(size)):
        raise UserError(f"--{name}_size {size:g}: give a number of records, or a fraction below 1")
    if size >= 1:
        return int(size)
    return max(1, round(size * records)) if size else 0


def _scale(sizes: dict[str, int], limit: int) -> dict[str, int]:
    """`sizes` scaled down to a sum of at most `limit`; each is at least 1 unless it is 0."""
    total = sum(sizes.values())
    if total <= limit:
        return sizes
    scaled = {name: max(1, n * limit // total) if n else 0 for name, n in sizes.items()}
    largest = max(scaled, key=scaled.__getitem__)
    scaled[largest] += limit - sum(scaled.values())  # the remainder of rounding, or the excess of the minimum of 1
    return scaled


BUCKET_BITS = 8
ROW = np.dtype([("key", "<u8"), ("value", "<u8")])
HELD_ROWS = 1 << 20  # rows in memory before they are written to their buckets
SORTED_ROWS = 1 << 16  # of them sorted at a time: they stay in the processor's cache
CHUNK = 1 << 20  # records read at a time
TRAIN, VALIDATION, TEST = range(len(SPLITS))


class Buckets:
    """Rows (key, value), uint64 each, in files by the upper bits of the key; rows keep their order.

    Each row is written once and read once, however many buckets there are.
    """

    def __init__(self, directory: Path, bits: int = BUCKET_BITS):
        """2**bits files, bits up to 16. Existing files are kept; `rows` counts added rows only."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.bits = directory, bits
        self.rows = self._held = 0
        self._sorted: list[tuple[np.ndarray, np.ndarray]] = []  # rows in memory, by bucket, and each bucket's first

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.rows += len(keys)
        for first in range(0, len(keys), SORTED_ROWS):
            some, of_some = keys[first : first + SORTED_ROWS], values[first : first + SORTED_ROWS]
            bucket = (some >> np.uint64(32) >> np.uint64(32 - self.bits)).astype(np.uint16)  # 0 bits: 0
            order = np.argsort(bucket, kind="stable")  # a radix sort
            rows = np.empty(len(some), ROW)
            rows["key"], rows["value"] = some[order], of_some[order]
            self._sorted.append((rows, np.searchsorted(bucket[order], np.arange((1 << self.bits) + 1))))
            self._held += len(some)
            if self._held >= HELD_ROWS:
                self.flush()

    def flush(self) -> None:
        held, self._sorted, self._held = self._sorted, [], 0
        for number in range(1 << self.bits):
            of_bucket = [rows[bounds[number] : bounds[number + 1]] for rows, bounds in held]
            if any(map(len, of_bucket)):
                with open(self.directory / str(number), "ab") as file:
                    np.concatenate(of_bucket).tofile(file)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Keys and values of each bucket, in the order of the keys."""
        for number in range(1 << self.bits):
            path = self.directory / str(number)
            rows = np.fromfile(path, ROW) if path.exists() else np.empty(0, ROW)
            yield rows["key"], rows["value"]

    def sync(self) -> None:
        """Flush all rows to the disk."""
        self.flush()
        with ThreadPoolExecutor(16) as pool:  # one after the other takes eight times as long
            list(pool.map(sync_directory, self.directory.iterdir()))  # it flushes files as well
        sync_directory(self.directory)

    def remove(self) -> None:
        shutil.rmtree(self.directory)


class Joined(NamedTuple):
    """Records by cluster: key of the cluster (random order), number of the record; and counts."""

    buckets: Buckets
    missing: int  # records without a cluster, or that are not in the table: one cluster each
    repeated: int  # rows of the table that put a member into a second cluster: ignored


def join(
    records: Iterable[np.ndarray], table: Iterable[tuple[np.ndarray, np.ndarray]], seed: int, scratch: Path
) -> Joined:
    """records: hashes of names uint64 [n], in blocks; table: (clusters', members') hashes, in blocks."""
    of_table, of_records, joined = (Buckets(scratch / name) for name in ("table", "records", "joined"))
    for clusters, members in table:
        of_table.add(members, clusters)
    for names in records:
        of_records.add(names, np.arange(of_records.rows, of_records.rows + len(names)))
    of_table.flush()
    of_records.flush()
    key = derive_key(seed, CLUSTER_ORDER)
    missing = repeated = 0
    for (members, clusters), (names, numbers) in zip(of_table, of_records, strict=True):
        order = np.argsort(members, kind="stable")
        members, clusters = members[order], clusters[order]
        is_first = np.diff(members, prepend=members[:1] ^ np.uint64(1)) != 0
        first = np.flatnonzero(is_first)
        repeated += int((clusters != np.repeat(clusters[first], np.diff(first, append=len(members)))).sum())
        members, clusters = members[first], clusters[first]
        # A record that is not in the table forms a cluster with all records of its name.
        index = np.searchsorted(members, names)
        known = index < len(members)
        known[known] = members[index[known]] == names[known]
        cluster = names.copy()
        cluster[known] = clusters[index[known]]
        missing += int((~known).sum())
        joined.add(hash_counters(key, cluster), numbers)
    joined.sync()
    of_table.remove()
    of_records.remove()
    return Joined(joined, missing, repeated)


def of_clusters(clusters: Iterable[np.ndarray], missing: int, seed: int, scratch: Path) -> Joined:
    """As `join`, of records whose clusters are known: their hashes uint64 [n], in blocks. missing: see Joined."""
    joined, key = Buckets(scratch / "joined"), derive_key(seed, CLUSTER_ORDER)
    for of_records in clusters:
        numbers = np.arange(joined.rows, joined.rows + len(of_records))
        joined.add(hash_counters(key, of_records), numbers)
    joined.sync()
    return Joined(joined, missing, repeated=0)


def draw_splits(joined: Buckets, sizes: tuple[int, int, int], all_left: bool, path: Path) -> np.ndarray:
    """The split of every record uint8 [records] (as splits.split_labels), memory-mapped from `path`: whole clusters.

    In random order, each cluster goes to validation if it still fits there, else to test, else to train (all_left:
    without a limit). No split exceeds its size, and the first two miss theirs by less than a cluster. Clusters above
    `largest_held_out` are not held out.
    """
    labels = open_memmap(path, "w+", np.uint8, (joined.rows,))
    largest = largest_held_out(joined, sizes)
    free = {VALIDATION: sizes[VALIDATION], TEST: sizes[TEST], TRAIN: joined.rows if all_left else sizes[TRAIN]}
    for records, bounds in _clusters(joined):
        members = np.diff(bounds)
        label = np.full(len(members), UNUSED, np.uint8)
        for split in free:
            candidates = np.flatnonzero((label == UNUSED) & (members <= largest.get(split, joined.rows)))
            chosen = _fitting(members, candidates, free[split])
            label[chosen] = split
            free[split] -= int(members[chosen].sum())
        labels[records] = np.repeat(label, members)
    labels.flush()
    for split, size in enumerate(sizes):
        if size and not (labels == split).any():
            name = SPLITS[split]
            raise UserError(
                f"{name}, {size:,} records: no cluster is small enough for it: give a larger --{name}_size"
            )
    return labels


def largest_held_out(joined: Buckets, sizes: tuple[int, int, int]) -> dict[int, int]:
    """{VALIDATION, TEST: records of the largest cluster that may be drawn for it}: its size / HELD_OUT_CLUSTERS.

    More, with a warning, where clusters up to that size hold fewer than POOL times the records to hold out.
    """
    wanted, held, enough = POOL * (sizes[VALIDATION] + sizes[TEST]), 0, 0
    for members, records in sorted(_records_by_size(joined).items()):
        held, enough = held + records, members
        if held >= wanted:
            break
    largest = {split: max(sizes[split] // HELD_OUT_CLUSTERS, enough) for split in (VALIDATION, TEST)}
    for split, most in largest.items():
        if sizes[split] and most > max(1, sizes[split] // HELD_OUT_CLUSTERS):
            logger.warning(
                "%s: of %s records, one cluster may be up to %s, more than a %dth: smaller clusters hold too few",
                *(SPLITS[split], f"{sizes[split]:,}", f"{most:,}", HELD_OUT_CLUSTERS),
            )
    return largest


def _records_by_size(joined: Buckets) -> Counter[int]:
    """{records of a cluster: records in all clusters of that size}."""
    by_size: Counter[int] = Counter()
    for _, bounds in _clusters(joined):
        members, counts = np.unique(np.diff(bounds), return_counts=True)
        by_size.update(dict(zip(members.tolist(), (members * counts).tolist(), strict=True)))
    return by_size


def without_copies(labels: np.ndarray, copies: np.ndarray, path: Path) -> np.ndarray:
    """The labels with UNUSED for copies (bool, one for each record in a split), memory-mapped from `path`."""
    remaining = open_memmap(path, "w+", np.uint8, labels.shape)
    first = 0
    for chunk in _chunks(len(labels)):
        remaining[chunk] = labels[chunk]
        used = np.flatnonzero(labels[chunk] != UNUSED)
        remaining[chunk][used[copies[first : first + len(used)]]] = UNUSED
        first += len(used)
    return remaining


def write_indices(
    joined: Buckets, labels: np.ndarray, directories: list[Path], scratch: Path, most_in_32_bits: int = 1 << 32
) -> list[int]:
    """offsets.npy and members.npy of each split, in its directory; returns the splits' numbers of clusters.

    labels: uint8 [records] (as `split_labels`); the records of a cluster are all in one split, or unused. The arrays
    are uint32 below `most_in_32_bits` records, else int64.
    """
    count = len(labels)
    dtype = np.uint32 if count < most_in_32_bits else np.int64
    # At each cluster's first used record its size, later its begin; and each record's number in its split.
    begins = open_memmap(scratch / "begins.npy", "w+", dtype, (count,))
    ranks = open_memmap(scratch / "ranks.npy", "w+", dtype, (count,))
    clusters = np.zeros(len(SPLITS), np.int64)
    for records, bounds in _used_clusters(joined, labels):
        first = records[bounds[:-1]]
        begins[first] = np.diff(bounds)
        clusters += np.bincount(labels[first], minlength=len(SPLITS))
    members = []
    for split, directory in enumerate(directories):
        offsets = open_memmap(directory / "offsets.npy", "w+", dtype, (int(clusters[split]) + 1,))
        size = _write_offsets(begins, ranks, labels, split, offsets)
        members.append(open_memmap(directory / "members.npy", "w+", dtype, (size,)))
    for records, bounds in _used_clusters(joined, labels):
        first = records[bounds[:-1]]
        places = np.repeat(begins[first].astype(np.int64) - bounds[:-1], np.diff(bounds)) + np.arange(len(records))
        for split, of_split in enumerate(members):
            chosen = labels[records] == split
            of_split[places[chosen]] = ranks[records[chosen]]
    for array in members:
        array.flush()
    return clusters.tolist()


def _write_offsets(begins: np.ndarray, ranks: np.ndarray, labels: np.ndarray, split: int, offsets: np.ndarray) -> int:
    """Fill `offsets` and the split's part of begins and ranks (see `write_indices`); returns its number of records."""
    cluster = member = rank = 0
    for chunk in _chunks(len(labels)):
        in_split = labels[chunk] == split
        places = np.flatnonzero(in_split & (begins[chunk] > 0))
        ends = member + np.cumsum(begins[chunk][places], dtype=np.int64)
        begins[chunk][places] = ends - begins[chunk][places]
        offsets[cluster + 1 : cluster + 1 + len(places)] = ends
        ranks[chunk][in_split] = np.arange(rank, rank + int(in_split.sum()))
        cluster += len(places)
        member = int(ends[-1]) if len(ends) else member
        rank += int(in_split.sum())
    offsets.flush()
    return rank


def _chunks(count: int) -> Iterator[slice]:
    return (slice(first, first + CHUNK) for first in range(0, count, CHUNK))


def _used_clusters(joined: Buckets, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bucket by bucket: the records that are used, int64 [n], cluster by cluster, and bounds int64 [c + 1]. Clusters
    without any are left out."""
    for records, bounds in _clusters(joined):
        used = labels[records] != UNUSED
        yield records[used], np.unique(np.append(0, np.cumsum(used))[bounds])


def _clusters(joined: Buckets) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bucket by bucket: records int64 [n], cluster by cluster and in order within each, and bounds int64 [c + 1]."""
    for keys, records in joined:
        order = np.lexsort((records, keys))
        keys, records = keys[order], records[order].astype(np.int64)
        bounds = np.concatenate(([0], np.flatnonzero(keys[1:] != keys[:-1]) + 1, [len(keys)])) if len(keys) else [0]
        yield records, np.array(bounds, dtype=np.int64)


def _fitting(members: np.ndarray, candidates: np.ndarray, free: int) -> np.ndarray:
    """Greedily, in order: the candidates that fit into `free` members together with those chosen before them."""
    chosen = []
    while free > 0 and len(candidates := candidates[members[candidates] <= free]):
        total = np.cumsum(members[candidates])
        fit = int(np.searchsorted(total, free, side="right"))
        chosen.append(candidates[:fit])
        free -= int(total[fit - 1])
        candidates = candidates[fit:]
    return np.concatenate(chosen) if chosen else candidates[:0]
