"""Embeddings in two dimensions: PCA, t-SNE, UMAP. The same seed gives the same map, on any number of cores."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from common.cli import UserError

logger = logging.getLogger(__name__)
METHODS = ("pca", "tsne", "umap")
INSTALL = "pip install -r requirements-map.txt -c constraints.txt"
COMPONENTS = 50  # that t-SNE, UMAP and HDBSCAN read: the usual reduction, which leaves little out
PERPLEXITY, NEIGHBOURS = 30, 15  # defaults of scikit-learn's t-SNE, and of UMAP
MANY = 50_000  # proteins; above, t-SNE and HDBSCAN take long


class Projection(NamedTuple):
    """points: float64 [proteins, 2]; axes: their labels."""

    points: np.ndarray
    axes: tuple[str, str]


def method_of(asked: str | None, proteins: int) -> str:
    """t-SNE by default, but PCA where that would take long."""
    if asked is None and proteins > MANY:
        logger.info("PCA, as t-SNE of more than %s proteins takes long: --method tsne asks for it", f"{MANY:,}")
    return asked or ("tsne" if proteins <= MANY else "pca")


def project(vectors: np.ndarray, method: str, seed: int) -> Projection:
    """vectors: float32 [proteins, hidden]. One thread: sums of several are rounded in any order."""
    with threadpool_limits(1):
        if method == "pca":
            points, shares = principal_components(vectors, 2)
            of_variance = (f"PC {number} ({share:.1%} of the variance)" for number, share in enumerate(shares, 1))
            first, second = (text.replace("%", " %") for text in of_variance)
            return Projection(points, (first, second))
        reduced, _ = principal_components(vectors, COMPONENTS)
        points = tsne(reduced, seed) if method == "tsne" else umap(reduced, seed)
    name = {"tsne": "t-SNE", "umap": "UMAP"}[method]
    return Projection(points, (f"{name} 1", f"{name} 2"))


def principal_components(vectors: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(float64 [proteins, components], the part of the variance of each): `most`, or as many as there are."""
    from sklearn.decomposition import PCA

    count = min(most, *vectors.shape)
    solver = "covariance_eigh" if len(vectors) > vectors.shape[1] else "full"  # both exact
    pca = PCA(count, svd_solver=solver)
    points = pca.fit_transform(vectors)
    return points.astype(np.float64), pca.explained_variance_ratio_


def tsne(reduced: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(reduced) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(reduced).astype(np.float64)


def umap(reduced: np.ndarray, seed: int) -> np.ndarray:
    reducer = umap_class()
    neighbours = min(NEIGHBOURS, len(reduced) - 1)
    # The spectral start needs more proteins than neighbours.
    start = "spectral" if len(reduced) > 2 * NEIGHBOURS else "pca"
    fitted = reducer(n_neighbors=neighbours, init=start, random_state=seed, n_jobs=1)
    return fitted.fit_transform(reduced).astype(np.float64)


def umap_class() -> Any:
    """UserError where UMAP is not installed."""
    try:
        from umap import UMAP
    except ImportError:
        raise UserError(f"--method umap: needs umap-learn: {INSTALL}; or choose --method tsne") from None
    return UMAP
