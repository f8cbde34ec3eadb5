"""Bring records into clusters, splits and the index of members (extras/prepare/clusters.py), on disk: memory stays
flat.

Records and table meet by 64-bit hashes of their names, in 256 buckets that are each joined in memory. The disk holds
16 bytes a row of the table and 16 a record, twice for a while; memory one bucket (some 100 MB for 190 million rows)
and pages that the system caches. (Among 190 million names, two share a hash in one case of a thousand; they would
count as one.)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from common.cli import UserError
from common.files.hashing import CLUSTER_ORDER, derive_key, hash_counters
from extras.prepare.splits import SPLITS, UNUSED

NUM_BUCKETS = 256
HELD_ROWS = 1 << 20  # before they are written to their buckets
CHUNK = 1 << 20  # records, of a pass over all of them
TRAIN, VALIDATION, TEST = range(len(SPLITS))


class Buckets:
    """Rows (key, value), uint64 each, in files by the upper bits of the key; what was added first comes first."""

    def __init__(self, directory: Path):
        """What is there already stays; `rows` counts what is added."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.held: list[np.ndarray] = []
        self.rows = 0

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.held.append(np.stack([keys, values.astype(np.uint64)], axis=1))
        self.rows += len(keys)
        if sum(map(len, self.held)) >= HELD_ROWS:
            self.flush()

    def flush(self) -> None:
        rows = np.concatenate([np.empty((0, 2), np.uint64), *self.held])
        self.held = []
        bucket = (rows[:, 0] >> np.uint64(56)).astype(np.uint8)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(NUM_BUCKETS + 1))
        for number in np.flatnonzero(np.diff(bounds)):
            with open(self.directory / str(number), "ab") as file:
                rows[order[bounds[number] : bounds[number + 1]]].tofile(file)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a bucket; buckets are in the order of the keys."""
        path = self.directory / str(number)
        rows = np.fromfile(path, np.uint64).reshape(-1, 2) if path.exists() else np.empty((0, 2), np.uint64)
        return rows[:, 0], rows[:, 1]

    def remove(self) -> None:
        shutil.rmtree(self.directory)


class Joined(NamedTuple):
    """Records by cluster: key of the cluster (random order), number of the record; and counts."""

    buckets: Buckets
    missing: int  # records that the table does not name: clusters of their own
    repeated: int  # rows of the table whose member stands in another cluster already: the first row counts


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
    for number in range(NUM_BUCKETS):
        members, clusters = of_table[number]
        order = np.argsort(members, kind="stable")
        members, clusters = members[order], clusters[order]
        is_first = np.diff(members, prepend=members[:1] ^ np.uint64(1)) != 0
        first = np.flatnonzero(is_first)
        repeated += int((clusters != np.repeat(clusters[first], np.diff(first, append=len(members)))).sum())
        members, clusters = members[first], clusters[first]
        names, numbers = of_records[number]
        # A record that is not in the table goes by its own name, as do others of that name.
        at = np.searchsorted(members, names)
        known = at < len(members)
        known[known] = members[at[known]] == names[known]
        cluster = names.copy()
        cluster[known] = clusters[at[known]]
        missing += int((~known).sum())
        joined.add(hash_counters(key, cluster), numbers)
    joined.flush()
    of_table.remove()
    of_records.remove()
    return Joined(joined, missing, repeated)


def draw_splits(joined: Buckets, sizes: tuple[int, int, int], all_left: bool, path: Path) -> np.ndarray:
    """The split of every record uint8 [records] (as splits.split_labels), memory-mapped from `path`: whole clusters.

    Clusters come in random order; each goes to validation if it still fits there, else to test, else to train
    (all_left: in any case). So no split exceeds its size, and the first two miss theirs by less than a cluster.
    """
    labels = open_memmap(path, "w+", np.uint8, (joined.rows,))
    room = {VALIDATION: sizes[VALIDATION], TEST: sizes[TEST], TRAIN: joined.rows if all_left else sizes[TRAIN]}
    for records, bounds in _clusters(joined):
        members = np.diff(bounds)
        label = np.full(len(members), UNUSED, np.uint8)
        for split in room:
            chosen = _fitting(members, np.flatnonzero(label == UNUSED), room[split])
            label[chosen] = split
            room[split] -= int(members[chosen].sum())
        labels[records] = np.repeat(label, members)
    labels.flush()
    for split, size in enumerate(sizes):
        if size and not (labels == split).any():
            raise UserError(f"--{SPLITS[split]}_size {size:,}: no cluster is small enough for it: give a larger size")
    return labels


def without_copies(labels: np.ndarray, copies: np.ndarray, path: Path) -> np.ndarray:
    """The labels with UNUSED for copies (bool, one for each record that is in a split), memory-mapped from `path`."""
    kept = open_memmap(path, "w+", np.uint8, labels.shape)
    first = 0
    for chunk in _chunks(len(labels)):
        kept[chunk] = labels[chunk]
        used = np.flatnonzero(labels[chunk] != UNUSED)
        kept[chunk][used[copies[first : first + len(used)]]] = UNUSED
        first += len(used)
    return kept


def write_index(joined: Buckets, labels: np.ndarray, directory: Path, scratch: Path) -> int:
    """offsets.npy and members.npy of the training records; returns the number of clusters."""
    count = len(labels)
    # At the first training record of each cluster its size, later its begin; and each record's number in the split.
    begins = open_memmap(scratch / "begins.npy", "w+", np.uint32, (count,))
    ranks = open_memmap(scratch / "ranks.npy", "w+", np.uint32, (count,))
    clusters = 0
    for records, bounds in _training_clusters(joined, labels):
        begins[records[bounds[:-1]]] = np.diff(bounds)
        clusters += len(bounds) - 1
    offsets = open_memmap(directory / "offsets.npy", "w+", np.uint32, (clusters + 1,))
    cluster = member = rank = 0
    for chunk in _chunks(count):
        places = np.flatnonzero(begins[chunk])
        ends = member + np.cumsum(begins[chunk][places], dtype=np.int64)
        begins[chunk][places] = ends - begins[chunk][places]
        offsets[cluster + 1 : cluster + 1 + len(places)] = ends
        ranks[chunk] = rank + np.cumsum(labels[chunk] == TRAIN) - (labels[chunk] == TRAIN)
        cluster += len(places)
        member = int(ends[-1]) if len(ends) else member
        rank += int((labels[chunk] == TRAIN).sum())
    members = open_memmap(directory / "members.npy", "w+", np.uint32, (rank,))
    for records, bounds in _training_clusters(joined, labels):
        first = records[bounds[:-1]]
        places = np.repeat(begins[first].astype(np.int64) - bounds[:-1], np.diff(bounds)) + np.arange(len(records))
        members[places] = ranks[records]
    for array in (offsets, members):
        array.flush()
    return clusters


def _chunks(count: int) -> Iterator[slice]:
    return (slice(first, first + CHUNK) for first in range(0, count, CHUNK))


def _training_clusters(joined: Buckets, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """As `_clusters`, of the training records alone; a cluster without any is left out."""
    for records, bounds in _clusters(joined):
        training = labels[records] == TRAIN
        yield records[training], np.unique(np.append(0, np.cumsum(training))[bounds])


def _clusters(joined: Buckets) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Bucket by bucket: records int64 [n], cluster by cluster and in order within each, and bounds int64 [c + 1]."""
    for number in range(NUM_BUCKETS):
        keys, records = joined[number]
        order = np.lexsort((records, keys))
        keys, records = keys[order], records[order].astype(np.int64)
        bounds = np.concatenate(([0], np.flatnonzero(keys[1:] != keys[:-1]) + 1, [len(keys)])) if len(keys) else [0]
        yield records, np.array(bounds, dtype=np.int64)


def _fitting(members: np.ndarray, candidates: np.ndarray, room: int) -> np.ndarray:
    """Those of the candidates, in order, that fit into what the ones before left of `room` members."""
    chosen = []
    while room > 0 and len(candidates := candidates[members[candidates] <= room]):
        total = np.cumsum(members[candidates])
        fit = int(np.searchsorted(total, room, side="right"))
        chosen.append(candidates[:fit])
        room -= int(total[fit - 1])
        candidates = candidates[fit:]
    return np.concatenate(chosen) if chosen else candidates[:0]
