"""Sample proteins by clusters: one random member of every cluster per epoch, as ESM-2 was trained.

ESM-2 sampled a UniRef50 cluster uniformly and then one of its UniRef90 members uniformly (Lin et al., Science 2023,
supplementary A.1). The index beside a split, `clusters/`, is two memory-mapped arrays: `members.npy`, the split's
records cluster by cluster, and `offsets.npy`, where each cluster begins. Clusters are ordered by their first
records, so that a block of clusters is mostly a block of records too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np

from common.cli import UserError, one_line
from common.data.counter_rng import hash_counters, scale
from common.files.content_hash import combined_hash

DIRECTORY = "clusters"


class Clusters:
    """The clusters of one split. Cheap to fork; pickles as its path.

    offsets: [clusters + 1], members: [records], uint32, or int64 from 2^32 records on; `len()`: the clusters.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.offsets, self.members = (np.load(directory / f"{n}.npy", mmap_mode="r") for n in ("offsets", "members"))
        if int(self.offsets[-1]) != len(self.members):
            raise UserError(f"{directory}: offsets.npy and members.npy do not match: tokenise again")

    def __reduce__(self):
        return Clusters, (self.directory,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def content(self) -> str:
        """A hash (hex) of the index."""
        return combined_hash(self.directory / name for name in ("offsets.npy", "members.npy"))

    @property
    def num_records(self) -> int:
        return len(self.members)

    def numbers(self) -> np.ndarray:
        """The number of each record's cluster, int64 [records]: in memory, for a held-out split."""
        numbers = np.empty(self.num_records, np.int64)
        numbers[self.members] = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        return numbers

    def draw(self, clusters: np.ndarray, key: int) -> np.ndarray:
        """One member of each of the clusters int64 [n]: records int64 [n], a function of key and cluster."""
        begin = self.offsets[clusters].astype(np.int64)
        sizes = self.offsets[clusters + 1].astype(np.int64) - begin
        return self.members[begin + scale(hash_counters(key, clusters), sizes)].astype(np.int64)


def clusters_to_draw(
    split_directory: Path, num_records: int, asked: bool | Literal["auto"] | None
) -> tuple[Clusters | None, str]:
    """The clusters that --sample_clusters, `asked`, draws by, None for records; and a line about what is drawn.

    auto: those of the index, if the split has one of exactly these records.
    """
    clusters = None
    with suppress(*([] if asked is True else [UserError])):  # an index that nobody asked for may be damaged
        clusters = open_clusters(split_directory, num_records)
    if clusters and asked:
        return clusters, f"clusters, then a member of each: {len(clusters):,} clusters of {num_records:,} proteins"
    about = f"proteins, uniformly: {num_records:,} proteins"
    if clusters:
        about += f"; this split has an index of {len(clusters):,} clusters: --sample_clusters draws them as ESM-2 did"
    return None, about


def open_clusters(split_directory: str | Path, num_records: int, flag: str = "--sample_clusters") -> Clusters:
    """The clusters of a split of `num_records` records. UserError, naming the flag that asks for them, if there are
    none or they do not match."""
    if (clusters := _read(Path(split_directory) / DIRECTORY)) is None:
        raise UserError(
            f"{Path(split_directory) / DIRECTORY}: no clusters: tokenise with --cluster_table or --cluster, or train "
            f"without {flag}"
        )
    if clusters.num_records != num_records:
        raise UserError(
            f"{clusters.directory}: clusters of {clusters.num_records:,} records, but {num_records:,} are in use: "
            f"{flag} needs all of them (no --max_train_samples)"
        )
    return clusters


def cluster_numbers(split_directory: str | Path, num_records: int) -> np.ndarray | None:
    """The number of the cluster of each of a held-out split's first records, int64 [num_records].

    None without an index: of splits drawn one by one, or prepared by an earlier version. UserError if it has fewer
    records.
    """
    if (clusters := _read(Path(split_directory) / DIRECTORY)) is None:
        return None
    if clusters.num_records < num_records:
        raise UserError(
            f"{clusters.directory}: clusters of {clusters.num_records:,} records, but {num_records:,} are in use: "
            "tokenise again"
        )
    return clusters.numbers()[:num_records]


def _read(directory: Path) -> Clusters | None:
    if not (directory / "offsets.npy").is_file():
        return None
    try:
        return Clusters(directory)
    except (ValueError, EOFError, FileNotFoundError) as error:
        raise UserError(f"{directory}: cannot be read ({one_line(error)}): tokenise again") from error
