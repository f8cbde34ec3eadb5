"""sample_clusters_exponent: draw clusters in proportion to a power of their sizes.

An epoch has as many draws as there are clusters. They are a systematic sample (Madow, Annals of Mathematical
Statistics 1949): points at equal distances, from a random beginning, on the line on which each cluster takes as much
room as it weighs. So a cluster is drawn as often as it weighs, rounded up or down, in every epoch, and exactly so on
average.
"""

from __future__ import annotations

import math

import numpy as np

from common.cli import UserError
from common.data.clusters import Clusters
from common.data.counter_rng import hash_counters, mix_int, scale

UNIT = 1 << 16  # of weights, which are whole numbers: the same on any processor
GOLDEN = 0.6180339887498949  # of the draws: the distance between neighbours on the line


class WeightedClusters:
    """Stands for `Clusters` in a batch plan: draw number 0 to `len()` of an epoch in place of a cluster.

    exponent: above 0 (each cluster alike) to 1 (each protein alike). UserError for others, and from 2^32 clusters on.
    """

    def __init__(self, clusters: Clusters, exponent: float):
        if not 0 < exponent <= 1:
            raise UserError(
                f"sample_clusters_exponent {exponent}: from 0 (each cluster alike) to 1 (each protein alike)"
            )
        if len(clusters) >= 1 << 32:
            raise UserError(
                f"sample_clusters_exponent: {len(clusters):,} clusters: up to {1 << 32:,}, or leave it at 0"
            )
        self.clusters, self.exponent = clusters, exponent
        weights = np.rint(UNIT * np.diff(clusters.offsets).astype(np.float64) ** exponent).astype(np.uint64)
        self.ends = np.cumsum(weights)  # uint64 [clusters]: where each one's room ends
        self.stride = next(
            n for n in range(max(1, int(GOLDEN * len(self))), 2 * len(self)) if math.gcd(n, len(self)) == 1
        )

    def __reduce__(self):
        return WeightedClusters, (self.clusters, self.exponent)

    def __len__(self) -> int:
        return len(self.clusters)

    @property
    def content(self) -> str:
        """Identifies the index and the exponent."""
        return f"{self.exponent:g}:{self.clusters.content}"

    @property
    def num_records(self) -> int:
        return self.clusters.num_records

    def drawn(self, draws: np.ndarray, key: int) -> np.ndarray:
        """The cluster of each of the draws int64 [n] of the epoch of `key`: int64 [n]."""
        count = np.uint64(len(self))
        apart, rest = divmod(int(self.ends[-1]), len(self))
        begin = mix_int(key) % apart
        # Draws of a large cluster are neighbours on the line: they are spread over the epoch.
        places = (draws.astype(np.uint64) * np.uint64(self.stride) + np.uint64(mix_int(key + 1) % len(self))) % count
        points = places * np.uint64(apart) + places * np.uint64(rest) // count + np.uint64(begin)
        return np.searchsorted(self.ends, points, side="right")

    def draw(self, draws: np.ndarray, key: int) -> np.ndarray:
        """A member of the cluster of each draw: records int64 [n], a function of key and draw."""
        clusters = self.drawn(draws, key)
        begin = self.clusters.offsets[clusters].astype(np.int64)
        sizes = self.clusters.offsets[clusters + 1].astype(np.int64) - begin
        return self.clusters.members[begin + scale(hash_counters(key, draws), sizes)].astype(np.int64)


def weighted(clusters: Clusters, exponent: float) -> tuple[WeightedClusters, str]:
    """The clusters by a power of their sizes, and a line about what is drawn."""
    return WeightedClusters(clusters, exponent), (
        f"clusters by their size to the power {exponent:g}, then a member of each: {len(clusters):,} draws an epoch "
        f"of as many clusters of {clusters.num_records:,} proteins"
    )
