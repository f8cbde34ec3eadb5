"""PCA beside NumPy's singular value decomposition; seeds; small inputs."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from common.cli import UserError
from extras.after.maps.projections import MANY, method_of, principal_components, project, umap_class
from tests.extras.after.maps.mapping import groups

WITH_UMAP = ["pca", "tsne", "umap"]


def check(method: str) -> None:
    if method == "umap":
        pytest.importorskip("umap", reason="umap-learn is not installed")


@pytest.mark.parametrize("count", [9, 80], ids=["fewer proteins than numbers", "more"])
def test_pca_is_that_of_numpy(count):
    vectors = np.random.default_rng(1).normal(size=(count, 20)).astype(np.float32) * np.linspace(3, 0.1, 20)
    points, axes = project(vectors.astype(np.float32), "pca", 0)
    centred = vectors - vectors.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    np.testing.assert_allclose(np.abs(points), np.abs(u * s)[:, :2], rtol=1e-3, atol=1e-3)
    shares = s**2 / (s**2).sum()
    assert axes == tuple(f"PC {n + 1} ({100 * shares[n]:.1f} % of the variance)" for n in range(2))
    assert principal_components(vectors, 50)[0].shape == (count, min(count, 20))


@pytest.mark.parametrize("method", WITH_UMAP)
def test_same_seed_gives_the_same_map_on_any_number_of_threads(method):
    check(method)
    vectors = groups(3, 30)
    points = project(vectors, method, 3).points
    with threadpool_limits(2):
        assert (project(vectors, method, 3).points == points).all()
    if method == "umap":  # PCA has no seed, and t-SNE begins at PCA's map
        assert not np.allclose(project(vectors, method, 4).points, points)


@pytest.mark.parametrize("method", WITH_UMAP)
def test_groups_lie_apart(method):
    check(method)
    points = project(groups(3, 30), method, 0).points.reshape(3, 30, 2)
    centres = points.mean(1)
    within = np.linalg.norm(points - centres[:, None], axis=2).mean()
    between = np.linalg.norm(centres[:, None] - centres, axis=2)[np.triu_indices(3, 1)].min()
    assert between > 2 * within


@pytest.mark.parametrize("count", [4, 5, 20])
@pytest.mark.parametrize("method", WITH_UMAP)
def test_few_proteins_have_a_map(method, count):
    check(method)
    points = project(groups(4, 5)[:: 20 // count][:count], method, 0).points
    assert points.shape == (count, 2)
    assert np.isfinite(points).all()


def test_many_proteins_get_pca_unless_asked():
    assert [method_of(None, MANY), method_of(None, MANY + 1), method_of("tsne", MANY + 1)] == ["tsne", "pca", "tsne"]


def test_umap_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "umap", None)
    with pytest.raises(UserError, match="--method umap: needs umap-learn: pip install -r requirements-map.txt"):
        umap_class()
