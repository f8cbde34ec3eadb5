"""Clusters of embeddings, each named by the words and classes that its members have more often than others."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from extras.after.maps.projections import COMPONENTS, MANY, principal_components
from extras.prepare.sources.compression import open_decompressed

logger = logging.getLogger(__name__)
NO_CLUSTER = -1
SMALLEST, ONE_IN = 5, 100  # members of a cluster: 5, or a hundredth of the proteins
MANY_CLUSTERS = 20  # by k-means, where there are too many proteins for HDBSCAN
STARTS = 10  # of k-means, of which the best counts
SIGNIFICANCE = 0.01  # after Bonferroni's correction
IN_A_NAME = 3  # terms
FEWEST_MEMBERS = 2  # that have a term, for it to be part of a name
ATTRIBUTE = re.compile(rb"\s\w+=")  # UniProt's headers end in OS=..., OX=..., UniRef's in n=... Tax=...
WORD = re.compile(r"[^\W_][\w'-]*[^\W_]")


@dataclass(frozen=True)
class Term:
    """A word of the description, or COLUMN=CLASS; members of the cluster that have it, and proteins in all."""

    text: str
    members: int
    proteins: int


@dataclass(frozen=True)
class Cluster:
    """members: places, int64; centre: the place of the member that is nearest to their mean; terms: those that name
    it, the most significant first."""

    number: int
    members: np.ndarray
    centre: int
    terms: list[Term]

    @property
    def name(self) -> str:
        return ", ".join(term.text for term in self.terms) or f"cluster {self.number}"


def clustered(vectors: np.ndarray, asked: int | None, smallest: int | None, seed: int) -> tuple[np.ndarray, str]:
    """(int64 [proteins], 0 for the largest cluster, NO_CLUSTER for none; how).

    vectors: float32 [proteins, hidden]; asked: clusters of k-means; without, HDBSCAN finds their number, from
    `smallest` members on, and leaves proteins between clusters out.
    """
    from sklearn.cluster import HDBSCAN, KMeans

    count = len(vectors)
    if asked is None and count > MANY:
        asked = MANY_CLUSTERS
        logger.info("k-means, as HDBSCAN of more than %s proteins takes long: see --num_clusters", f"{MANY:,}")
    with threadpool_limits(1):
        reduced, _ = principal_components(vectors, COMPONENTS)
        if asked is not None:
            how = f"k-means of {asked}"
            labels = KMeans(min(asked, count), n_init=STARTS, random_state=seed).fit_predict(reduced)
        else:
            smallest = smallest or max(SMALLEST, count // ONE_IN)
            how = f"HDBSCAN, at least {smallest} members"
            labels = HDBSCAN(min(smallest, count), copy=True).fit_predict(reduced)
    return by_size(labels), how


def by_size(labels: np.ndarray) -> np.ndarray:
    """Numbered from 0 for the largest; of equal ones the one that comes first."""
    numbers, first, counts = np.unique(labels[labels >= 0], return_index=True, return_counts=True)
    order = np.lexsort((first, -counts))
    renamed = {NO_CLUSTER: NO_CLUSTER} | {int(numbers[place]): rank for rank, place in enumerate(order)}
    return np.array([renamed[int(label)] for label in labels], np.int64)


def named(labels: np.ndarray, vectors: np.ndarray, terms: Sequence[set[str]]) -> list[Cluster]:
    """The clusters, the largest first. terms: of each protein, of which names are made."""
    overall = Counter(term for of_protein in terms for term in of_protein)
    clusters = []
    tests = len(overall) * max(1, int(labels.max()) + 1)
    for number in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == number)
        mean = vectors[members].mean(0)
        centre = int(members[np.argmax(vectors[members] @ mean)])
        own = Counter(term for place in members for term in terms[place])
        found = over_represented(own, overall, len(members), len(labels), tests)
        clusters.append(Cluster(number + 1, members, centre, found))
    return clusters


def over_represented(own: Counter[str], overall: Counter[str], members: int, proteins: int, tests: int) -> list[Term]:
    """Terms that members have more often than a random draw of as many proteins: hypergeometric test, one-sided,
    corrected for the number of `tests`."""
    from scipy.stats import hypergeom

    texts = sorted(text for text, count in own.items() if count >= FEWEST_MEMBERS)
    drawn = np.array([own[text] for text in texts])
    having = np.array([overall[text] for text in texts])
    log_p = hypergeom.logsf(drawn - 1, proteins, having, members) if texts else drawn
    significant = np.flatnonzero(log_p < math.log(SIGNIFICANCE / max(1, tests)))
    best = sorted(significant.tolist(), key=lambda place: (log_p[place], texts[place]))[:IN_A_NAME]
    return [Term(texts[place], int(drawn[place]), int(having[place])) for place in best]


def descriptions_of(fasta: str) -> dict[str, str]:
    """{id: the header's text after it, up to the first attribute such as OS=}."""
    found = {}
    with open_decompressed(fasta) as file:
        for line in file:
            if line.startswith(b">"):
                name, _, text = line[1:].strip().partition(b" ")
                description = ATTRIBUTE.split(b" " + text, maxsplit=1)[0].strip()
                found[name.decode(errors="replace")] = description.decode(errors="replace")
    return found


def words_of(description: str) -> set[str]:
    """Words of two letters or more, in lower case, without numbers."""
    return {word for word in WORD.findall(description.lower()) if not word.isdecimal()}
