"""What is held out whole: a cluster of related proteins, or equal sequences."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.cli import UserError
from extras.after.inference.mutation_tables import is_missing
from extras.prepare.cluster_splits import cluster_records, read_table, without_prefix
from extras.prepare.output_directory import JOURNAL, Build, Journal
from extras.prepare.sources.records import hash_names

logger = logging.getLogger(__name__)


class Clustering(NamedTuple):
    """--cluster_column, --cluster_table and --cluster: at most one of them."""

    column: str | None = None
    table: str | None = None
    identity: float | None = None

    @property
    def given(self) -> list[str]:
        """The flags that are given."""
        flags = ("--cluster_column", "--cluster_table", "--cluster")
        return [flag for flag, value in zip(flags, self, strict=True) if value is not None]

    def check(self) -> None:
        """UserError for values that are wrong or contradict each other."""
        if len(self.given) > 1:
            raise UserError(f"{' and '.join(self.given)}: give one of them")
        if self.identity is not None and not 0 < self.identity <= 1:
            raise UserError(f"--cluster {self.identity}: an identity above 0 and at most 1, 0.3 say")
        if self.table is not None and not Path(self.table).is_file():
            raise UserError(f"--cluster_table {self.table}: no such file")


def groups_of(
    clustering: Clustering, rows: Sequence[dict[str, str]], sequences: Sequence[str], ids: Sequence[str]
) -> list[str]:
    """The group of each protein: a name of its cluster, or a sequence of it; clusters with equal sequences are one.

    rows: of the labels; sequences: normalised; ids: as in --cluster_table.
    """
    if not clustering.given:
        return list(sequences)
    if clustering.column:
        cells = [row[clustering.column].strip() for row in rows]
        clusters: list[str | int | None] = [None if is_missing(cell) else cell for cell in cells]
    elif clustering.table:
        clusters = _of_table(Path(clustering.table), ids)
    else:
        clusters = _of_mmseqs(float(clustering.identity or 0), sequences)
    parts, merged = _components(sequences, clusters)
    first: dict[int, str] = {}
    for part, cluster, sequence in zip(parts, clusters, sequences, strict=True):
        name = cluster if isinstance(cluster, str) else sequence
        first[part] = min(first.get(part, name), name)
    flag = clustering.given[0]
    if alone := clusters.count(None):
        logger.warning("%s: %d of %d proteins are in no cluster: each is its own", flag, alone, len(clusters))
    if merged:
        logger.warning("%s: %d clusters have a protein of another cluster: merged with it", flag, merged)
    logger.info("%s clusters of %s proteins", f"{len(first):,}", f"{len(rows):,}")
    return [first[part] for part in parts]


def _of_table(table: Path, ids: Sequence[str]) -> list[str | int | None]:
    clusters = {
        member: cluster
        for of_clusters, members in read_table(table)
        for cluster, member in zip(of_clusters.tolist(), members.tolist(), strict=True)
    }
    return [clusters.get(member) for member in hash_names(without_prefix(pa.array(ids))).tolist()]


def _of_mmseqs(identity: float, sequences: Sequence[str]) -> list[str | int | None]:
    unique = list(dict.fromkeys(sequences))
    names = [str(number) for number in range(len(unique))]
    batch = pa.RecordBatch.from_arrays([pa.array(names), pa.array(unique)], names=["id", "text"])
    with TemporaryDirectory(prefix="clusters-") as directory:
        scratch = Path(directory)
        build, threads = Build({}, scratch, Journal(scratch / JOURNAL)), len(os.sched_getaffinity(0))
        table = cluster_records(build, [scratch], lambda _path: [batch], identity, threads)
        of_sequence = dict(zip(unique, _of_table(table, names), strict=True))
    return [of_sequence[sequence] for sequence in sequences]


def _components(sequences: Sequence[str], clusters: Sequence[str | int | None]) -> tuple[list[int], int]:
    """(the connected component of each protein, the number of clusters that were merged), of the graph that joins
    equal sequences and members of a cluster."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    of_sequence = {sequence: number for number, sequence in enumerate(dict.fromkeys(sequences))}
    named = dict.fromkeys(cluster for cluster in clusters if cluster is not None)
    of_cluster = {cluster: number for number, cluster in enumerate(named, len(of_sequence))}
    pairs = [(of_sequence[s], of_cluster[c]) for s, c in zip(sequences, clusters, strict=True) if c is not None]
    edges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    nodes = len(of_sequence) + len(of_cluster)
    graph = coo_array((np.ones(len(edges)), edges.T), shape=(nodes, nodes))
    parts = connected_components(graph, directed=False)[1].tolist()
    merged = len(of_cluster) - len(set(parts[len(of_sequence) :]))
    return [parts[of_sequence[sequence]] for sequence in sequences], merged
