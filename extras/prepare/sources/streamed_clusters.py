"""--dataset with --sample_clusters: the clusters of files that name each record's, and who is drawn in an epoch.

A first pass over the files makes the index of clusters, once a machine: it is kept in the user's cache by the files'
content. Each epoch then draws a member of each cluster, as from prepared data, and the streams leave out all others.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from common.cli import UserError, log_every, one_line
from common.data.clusters import Clusters
from common.data.counter_rng import MEMBER, derive_key
from extras.prepare.sources.find_files import File, Source
from extras.prepare.sources.record_columns import CLUSTERS
from extras.prepare.sources.records import characters, hash_bytes
from extras.prepare.sources.sequence_files import Unit, column_of, read_rows, read_sequences, units_of

logger = logging.getLogger(__name__)
ADVICE = "drop --sample_clusters, or prepare the data with step 1's --cluster_table or --cluster (--dataset_dir)"
ALL_ROW_GROUPS = 1 << 62  # wanted units
AT_ONCE = 1 << 20  # clusters
EPOCHS_KEPT = 2  # streams end their epochs at different steps


def of_clusters(file: File) -> File:
    """The same file, whose texts are the names of clusters. UserError for one without columns."""
    if file.kind == "fasta":
        raise UserError(f"{file.path}: FASTA has no column {CLUSTERS[0]} for --sample_clusters: {ADVICE}")
    return replace(file, content=replace(file.content, columns=CLUSTERS, other_column=ADVICE))


def have_clusters(files: Sequence[File]) -> bool:
    """Whether all files have a column of clusters."""
    with suppress(UserError):
        return all(column_of(of_clusters(file)) for file in files)
    return False


def cluster_hashes(unit: Unit) -> Iterator[np.ndarray]:
    """Hashes of the names of the clusters of a unit's records, uint64 [n] each, block by block."""
    row = 0
    for names in read_rows(Unit(of_clusters(unit.file), unit.row_group), 0):
        data, offsets = characters(names)
        if len(empty := np.flatnonzero(np.diff(offsets) == 0)):
            raise UserError(f"{unit}: row {row + int(empty[0]) + 1:,}: no name of a cluster: {ADVICE}")
        yield hash_bytes(data, offsets)
        row += len(names)


def index_directory(source: Source) -> Path:
    """Where the index of the clusters of a source's training files is kept on this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "esm2-clusters" / source.identity("train")[:32]


def make_index(files: tuple[File, ...], directory: Path) -> None:
    """Write the index of the clusters of all records that have a protein, unless it is there.

    offsets.npy, members.npy: as of prepared data, of records numbered in the order of the files; rows.npy: int64, rows
    of each file or row group. Takes some 30 bytes a record of memory.
    """
    if directory.is_dir():
        return
    started, rows, hashes, members = time.perf_counter(), [], [], []
    with log_every("Reading the clusters of --dataset"):
        for unit in units_of(files, ALL_ROW_GROUPS):
            of_unit, present = read_unit(unit)
            hashes.append(of_unit[present])
            members.append(present + sum(rows))
            rows.append(len(of_unit))
    names, records = np.concatenate(hashes), np.concatenate(members)
    order = np.argsort(names, kind="stable")
    bounds = np.flatnonzero(np.diff(names[order])) + 1
    offsets = np.concatenate(([0], bounds, [len(records)]))
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            index = Path(scratch) / directory.name
            index.mkdir()
            for name, array in (("members", records[order]), ("offsets", offsets), ("rows", np.array(rows))):
                np.save(index / f"{name}.npy", array)
            with suppress(FileExistsError):  # another run was faster
                index.rename(directory)
    except OSError as error:
        if not directory.is_dir():
            raise UserError(
                f"{directory.parent}: {one_line(error)}: set XDG_CACHE_HOME to another directory"
            ) from error
    taken = time.perf_counter() - started
    logger.info("Clusters of %s records read in %.1f s, kept in %s", f"{len(records):,}", taken, directory)


def read_unit(unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the clusters of a unit's records uint64 [n], and which records have a protein, int64."""
    lengths = [np.zeros(0, np.int64), *(np.diff(offsets) for _, offsets in read_sequences(unit, 0))]
    hashes = np.concatenate([np.zeros(0, np.uint64), *cluster_hashes(unit)])
    if len(hashes) != (records := sum(map(len, lengths))):
        raise UserError(f"{unit}: {len(hashes):,} names of clusters of {records:,} records: {ADVICE}")
    return hashes, np.flatnonzero(np.concatenate(lengths))


@dataclass
class StreamedClusters:
    """The index of `make_index`, of some files: which records an epoch has. Pickles as its arguments."""

    files: tuple[File, ...]
    directory: Path
    _chosen: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)

    def __reduce__(self):
        return StreamedClusters, (self.files, self.directory)

    @cached_property
    def clusters(self) -> Clusters:
        return Clusters(self.directory)

    @cached_property
    def _begins(self) -> dict[tuple[str, int], int]:
        """Of each file or row group, the number of its first record."""
        rows = np.load(self.directory / "rows.npy")
        units = units_of(self.files, ALL_ROW_GROUPS)
        begins = (np.cumsum(rows) - rows).tolist()
        return {(unit.file.path, unit.row_group or 0): begin for unit, begin in zip(units, begins, strict=True)}

    def chosen(self, unit: Unit, rows: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Whether an epoch draws each of the rows int64 [n] of a unit: bool [n]."""
        if (seed, epoch) not in self._chosen:
            while len(self._chosen) >= EPOCHS_KEPT:
                del self._chosen[next(iter(self._chosen))]
            self._chosen[seed, epoch] = self._draw(derive_key(seed, epoch, MEMBER))
        return self._chosen[seed, epoch][self._begins[unit.file.path, unit.row_group or 0] + rows]

    def _draw(self, key: int) -> np.ndarray:
        drawn = np.zeros(int(np.load(self.directory / "rows.npy").sum()), bool)
        for first in range(0, len(self.clusters), AT_ONCE):
            drawn[self.clusters.draw(np.arange(first, min(first + AT_ONCE, len(self.clusters))), key)] = True
        return drawn


def clusters_of(source: Source, asked: bool | str, streaming: bool, makes: bool) -> StreamedClusters | None:
    """The clusters of a source's training files, as --sample_clusters, `asked`, says; None to draw proteins.

    makes: make the index, if it is lacking. UserError for files without a column of clusters, unless `auto`.
    """
    files = source.splits["train"]
    if not asked or (asked == "auto" and (streaming or not have_clusters(files))):
        return None
    if streaming:
        raise UserError(f"--sample_clusters with --streaming reads all data each epoch: drop --streaming, or {ADVICE}")
    for file in files:
        column_of(of_clusters(file))
    if makes:
        make_index(files, index_directory(source))
    return StreamedClusters(files, index_directory(source))
