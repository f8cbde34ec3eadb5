"""Nearest neighbours beside scikit-learn's brute force; the index' recall."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from common.cli import UserError
from extras.after.maps import neighbours
from extras.after.maps.neighbours import Index, exact, recall, without_own
from tests.extras.after.maps.mapping import groups


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    drawn = groups(5, 60, hidden=16, spread=0.5)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.mark.parametrize("block_bytes", [1, 4 * 300 * 7, 1 << 20], ids=["a row", "7 rows", "all"])
def test_exact_neighbours_are_those_of_brute_force(vectors, block_bytes):
    found = exact(vectors, vectors, 6, np.arange(len(vectors)), block_bytes=block_bytes)
    reference = NearestNeighbors(n_neighbors=6, metric="cosine", algorithm="brute").fit(vectors.astype(np.float64))
    distances, places = reference.kneighbors()  # without each itself
    assert (found.places == places).all()
    np.testing.assert_allclose(1 - found.similarities, distances, atol=1e-6)


def test_neighbours_of_new_proteins_include_one_that_is_there(vectors):
    found = exact(vectors[40:43], vectors, 3)
    assert found.places[:, 0].tolist() == [40, 41, 42]
    np.testing.assert_allclose(found.similarities[:, 0], 1, atol=1e-6)


def test_equal_neighbours_come_in_the_order_of_the_file(vectors):
    repeated = np.concatenate([vectors[:3]] * 4)
    found = exact(vectors[:1], repeated, 4)
    assert found.places[0].tolist() == [0, 3, 6, 9]


def test_fewer_proteins_than_neighbours_give_all_others(vectors):
    found = exact(vectors[:5], vectors[:5], 10, np.arange(5))
    assert [sorted(row) for row in found.places.tolist()] == [[n for n in range(5) if n != own] for own in range(5)]


def test_own_place_is_left_out_of_the_index_results():
    similarities = np.array([[0.9, 0.8, 0.7], [1.0, 0.5, 0.4]], np.float32)
    places = np.array([[4, 5, 6], [1, 2, 3]])  # the first did not find itself
    values, kept = without_own(similarities, places, np.array([0, 1]))
    assert kept.tolist() == [[4, 5], [2, 3]]
    np.testing.assert_array_equal(values, np.array([[0.9, 0.8], [0.5, 0.4]], np.float32))


def test_index_that_reads_all_cells_is_exact_and_else_its_recall_is_measured(vectors, monkeypatch):
    pytest.importorskip("faiss", reason="faiss is not installed")
    own = np.arange(len(vectors))
    true = exact(vectors, vectors, 6, own)
    index = Index(vectors, seed=0)
    assert index.index.nlist == 7  # 300 // 39
    found = index.search(vectors, 6, own)
    assert (found.places == true.places).all()
    assert recall(index, 6, 0) == {"recall": 1.0, "sample": 300}
    monkeypatch.setattr(neighbours, "PROBED", 1)
    narrow = Index(vectors, seed=0)
    found = narrow.search(vectors, 6, own)
    shared = [len(set(mine) & set(those)) / 6 for mine, those in zip(found.places, true.places, strict=True)]
    measured = recall(narrow, 6, 0)["recall"]
    assert measured < 1
    assert measured == pytest.approx(np.mean(shared))
    assert (narrow.search(vectors, 6, own).places == Index(vectors, seed=0).search(vectors, 6, own).places).all()
    whole = narrow.search(vectors, 200, own)  # more than a cell has
    assert (whole.places >= 0).all()


def test_approximate_neighbours_need_faiss(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match="--approximate: needs faiss: pip install -r requirements-map.txt"):
        neighbours.faiss_module()
