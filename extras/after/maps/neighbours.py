"""The most similar proteins by the cosine of their embeddings: exact, or by an index of faiss with measured recall."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.cli import UserError
from common.console import slow_bar
from extras.after.maps.projections import INSTALL

BLOCK_BYTES = 256 << 20  # similarities in memory at a time
SAMPLE = 1000  # proteins that recall is measured on
PROBED = 32  # cells of the index that a search reads
PER_CELL = 256  # vectors that a cell's centre is fitted on at most; faiss takes as many
ROUNDING = 1e-5  # of a similarity


@dataclass(frozen=True)
class Neighbours:
    """places: int64 [queries, k], of the vectors, the most similar first; similarities: float32 [queries, k]."""

    places: np.ndarray
    similarities: np.ndarray


def exact(
    queries: np.ndarray,
    vectors: np.ndarray,
    k: int,
    own: np.ndarray | None = None,
    device: torch.device | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Neighbours:
    """The k of `vectors` that have the largest inner products with each query, all of them compared.

    queries: [queries, hidden]; vectors: [proteins, hidden]; own: the place of each query among the vectors, which is
    no neighbour of itself; block_bytes: of similarities in memory.
    """
    step = max(1, block_bytes // (4 * len(vectors)))
    all_vectors = torch.from_numpy(vectors).to(device).T
    k = min(k, len(vectors) - (own is not None))
    places, similarities = [], []
    with slow_bar(len(queries), "proteins", hidden=len(queries) <= step, desc="neighbours") as bar:
        for begin in range(0, len(queries), step):
            block = torch.from_numpy(queries[begin : begin + step]).to(device) @ all_vectors
            if own is not None:
                block[torch.arange(len(block)), torch.from_numpy(own[begin : begin + step])] = -torch.inf
            values, found = block.topk(k)
            places.append(found.cpu().numpy())
            similarities.append(values.cpu().numpy())
            bar.update(len(block))
    return in_order(np.concatenate(places), np.concatenate(similarities))


def in_order(places: np.ndarray, similarities: np.ndarray) -> Neighbours:
    """The most similar first; of equal ones the one that comes first in the file."""
    order = np.lexsort((places, -similarities))
    return Neighbours(np.take_along_axis(places, order, 1), np.take_along_axis(similarities, order, 1))


class Index:
    """faiss's inverted file: vectors in about sqrt(proteins) cells, of which a search reads the nearest `PROBED`."""

    def __init__(self, vectors: np.ndarray, seed: int) -> None:
        faiss = faiss_module()
        count, hidden = vectors.shape
        cells = max(1, min(round(math.sqrt(count)), count // 39))  # faiss warns below 39 vectors a cell
        self.vectors = np.ascontiguousarray(vectors, np.float32)
        self.coarse = faiss.IndexFlatIP(hidden)  # faiss keeps no reference to it
        self.index = faiss.IndexIVFFlat(self.coarse, hidden, cells, faiss.METRIC_INNER_PRODUCT)
        self.index.cp.seed, self.index.cp.max_points_per_centroid = seed, PER_CELL
        self.index.nprobe = min(PROBED, cells)
        self.index.train(self.vectors)
        self.index.add(self.vectors)

    def search(self, queries: np.ndarray, k: int, own: np.ndarray | None = None) -> Neighbours:
        """As `exact`, but a neighbour in a cell that is not read is missed. A query whose cells have fewer than k
        is compared with all."""
        k = min(k, len(self.vectors) - (own is not None))
        similarities, places = self.index.search(np.ascontiguousarray(queries), k + (own is not None))
        if own is not None:
            similarities, places = without_own(similarities, places, own)
        if (few := (places < 0).any(1)).any():
            whole = exact(queries[few], self.vectors, k, None if own is None else own[few])
            places[few], similarities[few] = whole.places, whole.similarities
        return in_order(places, similarities)


def without_own(similarities: np.ndarray, places: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[queries, k + 1] -> [queries, k]: without each query itself, or without the last where it was not found."""
    is_own = places == own[:, None]
    is_own[~is_own.any(1), -1] = True
    shape = len(own), places.shape[1] - 1
    return similarities[~is_own].reshape(shape), places[~is_own].reshape(shape)


def recall(index: Index, k: int, seed: int, device: torch.device | None = None) -> dict[str, float | int]:
    """{"recall": the part of the exact k neighbours' similarities that the index reaches, "sample": proteins it was
    measured on}, over a random sample. One that is as similar as the exact k-th counts, whichever of equals it is."""
    count = len(index.vectors)
    own = np.sort(np.random.default_rng(seed).choice(count, min(SAMPLE, count), replace=False))
    true = exact(index.vectors[own], index.vectors, k, own, device)
    found = index.search(index.vectors[own], k, own)
    reached = found.similarities >= true.similarities[:, -1:] - ROUNDING
    return {"recall": float(reached.mean()), "sample": len(own)}


def faiss_module() -> Any:
    """UserError where faiss is not installed."""
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)  # else it says which builds it did not find
    try:
        import faiss
    except ImportError:
        raise UserError(f"--approximate: needs faiss: {INSTALL}; or leave it out") from None
    return faiss
