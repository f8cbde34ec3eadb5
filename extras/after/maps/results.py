"""What map.py computes of embeddings, and its files: picture, page, coordinates, neighbours, clusters."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import UserError
from common.figures import FigureFlags
from common.flags import Flags, flag
from extras.after.downstream.results import RESULTS
from extras.after.maps.clusters import NO_CLUSTER, Cluster, clustered, named, words_of
from extras.after.maps.colouring import KINDS, LENGTH, Colouring, of_clusters, of_lengths, of_table
from extras.after.maps.neighbours import Index, Neighbours, exact, faiss_module, recall
from extras.after.maps.page import write_page
from extras.after.maps.picture import draw
from extras.after.maps.projections import METHODS, Projection, method_of, project, umap_class
from extras.after.maps.vectors import Embedded

logger = logging.getLogger(__name__)
PICTURE, PAGE, POINTS, CLUSTERS = "map", "map.html", "map.csv", "clusters.csv"
NEIGHBOURS, QUERIES = "neighbours.csv", "query_neighbours.csv"
NAMED = 10  # clusters in the log


@dataclass
class MapFlags(Flags):
    group = "map"

    method: str | None = flag(
        None,
        "The projection: umap needs umap-learn. Default: tsne, or pca of more than 50,000 proteins.",
        choices=METHODS,
    )
    table: str | None = flag(None, "A CSV file with a column to colour by, and to name clusters by.")
    id_column: str = flag("id", "The column of the ids in --table.")
    colour_by: str | None = flag(None, "A column of --table, or length. Default: the cluster.", "color_by")
    colour_as: str | None = flag(
        None,
        "Read the column as numbers or as classes. Default: numbers if all values are.",
        "color_as",
        choices=KINDS,
    )
    neighbours: int = flag(10, "Nearest neighbours of each protein, by the cosine of the embeddings.", "neighbors")
    approximate: bool = flag(
        False, "Neighbours by an index of faiss, for millions of proteins; its recall is measured."
    )
    num_clusters: int | None = flag(None, "Clusters of k-means. Default: HDBSCAN finds their number.")
    min_cluster_size: int | None = flag(
        None, "Of HDBSCAN: members of the smallest cluster. Default: a hundredth of the proteins, at least 5."
    )
    seed: int = flag(0, "Of t-SNE, UMAP, k-means and faiss: the same seed gives the same map.")

    def check(self) -> None:
        self.require_at_least(1, "neighbours", "num_clusters")
        self.require_at_least(2, "min_cluster_size")
        self.require_at_least(0, "seed")
        if self.num_clusters and self.min_cluster_size:
            raise UserError("--num_clusters and --min_cluster_size: of k-means and of HDBSCAN: give one of them")
        if self.table and not self.colour_by:
            raise UserError("--table: which of its columns? Give --colour_by COLUMN")
        if self.colour_by and not self.table and self.colour_by != LENGTH:
            raise UserError(
                f"--colour_by {self.colour_by}: of which table? Give --table labels.csv, or --colour_by {LENGTH}"
            )
        if self.table and not Path(self.table).is_file():
            raise UserError(f"--table {self.table}: no such file")
        if self.method == "umap":
            umap_class()
        if self.approximate:
            faiss_module()


@dataclass(frozen=True)
class Map:
    """All that is written. labels: int64 [proteins], the clusters' places or NO_CLUSTER; column: the colouring by
    --colour_by, if any; found, queried: neighbours of the proteins and of the new ones."""

    embedded: Embedded
    projection: Projection
    labels: np.ndarray
    clusters: list[Cluster]
    column: Colouring | None
    found: Neighbours
    queried: Neighbours | None
    facts: dict[str, Any]

    def colourings(self) -> list[Colouring]:
        """The first is the picture's."""
        titles = [f"{cluster.number} {cluster.name}" if cluster.terms else cluster.name for cluster in self.clusters]
        others = [of_clusters(self.labels, titles), of_lengths(self.embedded.lengths)]
        column = self.column
        return [column, *(each for each in others if each.title != column.title)] if column else others


def make_map(
    flags: MapFlags,
    embedded: Embedded,
    new: Embedded | None = None,
    descriptions: dict[str, str] | None = None,
    device: torch.device | None = None,
) -> Map:
    """new: proteins whose neighbours to find; descriptions: of ids, for the names of clusters; device: of the exact
    neighbours. UserError for a table that does not fit."""
    vectors, count = embedded.vectors, len(embedded.ids)
    column = of_lengths(embedded.lengths) if flags.colour_by else None
    if flags.table and flags.colour_by:
        column = of_table(flags.table, flags.id_column, flags.colour_by, flags.colour_as, embedded.ids)
    found, queried, facts = search(flags, vectors, new, device)
    method = method_of(flags.method, count)
    projection = project(vectors, method, flags.seed)
    labels, how = clustered(vectors, flags.num_clusters, flags.min_cluster_size, flags.seed)
    clusters = named(labels, vectors, terms_of(embedded.ids, descriptions or {}, column if flags.table else None))
    results: dict[str, Any] = {"proteins": count, "method": method, "axes": projection.axes, "neighbours": facts}
    results["clusters"] = {"method": how, "found": len(clusters), "in_none": int((labels == NO_CLUSTER).sum())}
    if flags.table and column:
        results["column"] = {"missing": column.missing}
        if column.numbers is None:
            results["column"] |= agreement(column.texts, found)
    return Map(embedded, projection, labels, clusters, column, found, queried, results)


def search(
    flags: MapFlags, vectors: np.ndarray, new: Embedded | None, device: torch.device | None
) -> tuple[Neighbours, Neighbours | None, dict[str, Any]]:
    """Neighbours of all proteins and of new ones, and how they were found."""
    own, k = np.arange(len(vectors)), flags.neighbours
    if not flags.approximate:
        found = exact(vectors, vectors, k, own, device)
        queried = exact(new.vectors, vectors, k, device=device) if new else None
        return found, queried, {"k": found.places.shape[1], "method": "exact"}
    index = Index(vectors, flags.seed)
    found, queried = index.search(vectors, k, own), index.search(new.vectors, k) if new else None
    measured = recall(index, k, flags.seed, device)
    logger.info("Recall of the index: %.4f, measured on %s proteins", measured["recall"], f"{measured['sample']:,}")
    return found, queried, {"k": found.places.shape[1], "method": "faiss IVFFlat"} | measured


def terms_of(ids: Sequence[str], descriptions: dict[str, str], column: Colouring | None) -> list[set[str]]:
    """What may name a protein's cluster: the words of its description, and its class."""
    terms = [words_of(descriptions.get(name, "")) for name in ids]
    if column is not None and column.numbers is None:
        for of_protein, text in zip(terms, column.texts, strict=True):
            of_protein |= {f"{column.title}={text}"} if text else set()
    return terms


def agreement(texts: Sequence[str], found: Neighbours) -> dict[str, float | int]:
    """How often the nearest neighbour has a protein's class, where both have one, beside chance: a random other
    protein that has one."""
    pairs = [(text, texts[place]) for text, place in zip(texts, found.places[:, 0], strict=True)]
    known = [first == second for first, second in pairs if first and second]
    _, counts = np.unique([text for text in texts if text], return_counts=True)
    total = int(counts.sum())
    chance = float((counts * (counts - 1)).sum() / (total * (total - 1))) if total > 1 else float("nan")
    if not known:
        return {"pairs": 0}
    return {"pairs": len(known), "nearest_agrees": float(np.mean(known)), "chance": chance}


def write_map(
    made: Map, query_ids: Sequence[str], directory: Path, figures: FigureFlags, more: dict[str, Any]
) -> None:
    """Write all files. more: for results.json."""
    colourings = made.colourings()
    draw(made.projection, colourings[0], made.clusters, directory / PICTURE, figures)
    write_page(directory / PAGE, made.embedded, made.projection, colourings)
    write_points(made, directory / POINTS)
    write_clusters(made, directory / CLUSTERS)
    write_neighbours(made, made.embedded.ids, made.found, directory / NEIGHBOURS)
    if made.queried:
        write_neighbours(made, query_ids, made.queried, directory / QUERIES)
    (directory / RESULTS).write_text(json.dumps(made.facts | more, indent=2) + "\n")


def write_rows(path: Path, names: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([names])
        csv.writer(file).writerows(rows)


def value_column(made: Map) -> tuple[list[str], list[list[str]]]:
    """([name], [text] of each protein) of the table's column, or nothing of each."""
    if made.column is None or made.column.title == LENGTH:
        return [], [[] for _ in made.embedded.ids]
    return [made.column.title], [[text] for text in made.column.texts]


def write_points(made: Map, path: Path) -> None:
    names, texts = value_column(made)
    write_rows(
        path,
        ["id", "length", "x", "y", "cluster", *names],
        (
            [name, length, f"{x:.6g}", f"{y:.6g}", "" if label == NO_CLUSTER else label + 1, *text]
            for name, length, (x, y), label, text in zip(
                made.embedded.ids,
                made.embedded.lengths,
                made.projection.points,
                made.labels.tolist(),
                texts,
                strict=True,
            )
        ),
    )


def write_clusters(made: Map, path: Path) -> None:
    """A row a cluster; `found_in`: of each term the members and the proteins in all that have it."""
    write_rows(
        path,
        ["cluster", "name", "members", "median_length", "centre", "found_in"],
        (
            [
                cluster.number,
                cluster.name,
                len(cluster.members),
                f"{np.median(made.embedded.lengths[cluster.members]):g}",
                made.embedded.ids[cluster.centre],
                "; ".join(f"{term.text}: {term.members} of {term.proteins}" for term in cluster.terms),
            ]
            for cluster in made.clusters
        ),
    )


def write_neighbours(made: Map, ids: Sequence[str], found: Neighbours, path: Path) -> None:
    """k rows a protein, the most similar first, with the neighbour's cluster and value."""
    names, texts = value_column(made)
    labels = ["" if label == NO_CLUSTER else label + 1 for label in made.labels.tolist()]
    write_rows(
        path,
        ["id", "rank", "neighbour", "cosine", "cluster", *names],
        (
            [name, rank, made.embedded.ids[place], f"{cosine:.6f}", labels[place], *texts[place]]
            for name, places, cosines in zip(ids, found.places.tolist(), found.similarities.tolist(), strict=True)
            for rank, (place, cosine) in enumerate(zip(places, cosines, strict=True), 1)
        ),
    )


def summary(made: Map) -> str:
    """The largest clusters, for the terminal."""
    lines = []
    for cluster in made.clusters[:NAMED]:
        terms = ", ".join(f"{term.text} ({term.members} of {term.proteins})" for term in cluster.terms)
        lines.append(f"{cluster.number:>7} {len(cluster.members):>8,}  {terms or '-'}")
    if more := len(made.clusters) - NAMED:
        lines += [f"and {more} more"] if more > 0 else []
    head = f"{'cluster':>7} {'members':>8}  over-represented (members of all that have it)"
    in_none = made.facts["clusters"]["in_none"]
    return "\n".join([head, *lines, f"{'none':>7} {in_none:>8,}"])
