"""Step 1 with --cluster_table: splits of whole clusters and the index of the training records' clusters."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.files.bad_records import BadRecords, Policy
from common.files.clusters import DIRECTORY
from common.files.csv_records import read_rows
from common.files.output_directory import Build
from common.prepare.cluster_index import Buckets, draw_splits, join, write_index
from common.prepare.cluster_table import hash_names, read_table
from common.prepare.splits import SPLITS

logger = logging.getLogger(__name__)
WINDOW = 1 << 16


class ClusterSplits(NamedTuple):
    """counts: usable records of every file; sizes: records of every split; labels: windows of uint8 (splits.py)."""

    counts: list[int]
    sizes: tuple[int, ...]
    labels: Iterator[np.ndarray]
    bad_records: BadRecords
    results: dict


def split_by_clusters(
    build: Build,
    files: list[Path],
    table: Path,
    sizes_of: Callable[[int], tuple[int, int, int]],
    all_left: bool,
    seed: int,
    policy: Policy,
) -> ClusterSplits:
    """Done once: what a killed run completed is taken up.

    sizes_of: number of records -> sizes of the splits; all_left: train takes whatever the others leave.
    """
    directory = build.scratch / DIRECTORY
    if (found := build.done("clusters")) is None:

        def draw(joined: Buckets) -> np.ndarray:
            return draw_splits(joined, sizes_of(joined.rows), all_left, directory / "labels.npy")

        found = _make(directory, files, table, draw, seed, BadRecords(policy))
        build.note("clusters", found)
    labels = np.load(directory / "labels.npy", mmap_mode="r")
    results = found["results"]
    logger.info("%s clusters of training records", f"{results['train_clusters']:,}")
    if results["not_in_cluster_table"]:
        logger.warning(
            "%s of %s records are not in %s: each is a cluster of its own",
            *(f"{n:,}" for n in (results["not_in_cluster_table"], len(labels))),
            table,
        )
    if found["repeated"]:
        logger.warning("%s: %s rows put a member into a second cluster: left out", table, f"{found['repeated']:,}")
    windows = (np.asarray(labels[first : first + WINDOW]) for first in range(0, len(labels), WINDOW))
    return ClusterSplits(found["counts"], found["sizes"], windows, BadRecords(policy, **found["bad"]), results)


def publish_index(build: Build) -> None:
    """Put the index beside the training split, once."""
    target = build.paths["arrow"] / SPLITS[0] / DIRECTORY
    if not target.exists():
        (build.scratch / DIRECTORY / "index").rename(target)


def _make(directory: Path, files: list[Path], table: Path, draw: Callable, seed: int, bad: BadRecords) -> dict:
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "index").mkdir(parents=True)
    counts = []

    def names() -> Iterator[np.ndarray]:
        for path in files:
            counts.append(0)
            for rows in read_rows(path, bad):
                counts[-1] += rows.num_rows
                yield hash_names(rows.column("id"))

    joined = join(names(), read_table(table), seed, directory)
    labels = draw(joined.buckets)
    clusters = write_index(joined.buckets, labels, directory / "index", directory)
    joined.buckets.remove()
    for name in ("begins.npy", "ranks.npy"):
        (directory / name).unlink()
    return {
        "counts": counts,
        "sizes": [int((labels == split).sum()) for split in range(len(SPLITS))],
        "bad": bad.state,
        "repeated": joined.repeated,
        "results": {"train_clusters": clusters, "not_in_cluster_table": joined.missing},
    }
