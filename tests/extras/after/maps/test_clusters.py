"""Clusters found again, and named by what their members have more often than others."""

from __future__ import annotations

from collections import Counter
from math import comb

import numpy as np
import pytest

from extras.after.maps import clusters
from extras.after.maps.clusters import by_size, clustered, descriptions_of, named, over_represented, words_of
from tests.extras.after.maps.mapping import groups


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("asked", [None, 3])
def test_groups_are_found_again_and_k_means_alone_has_no_others(asked):
    scattered = np.random.default_rng(1).normal(size=(15, 12)).astype(np.float32)
    vectors = unit(np.concatenate([groups(3, 30, spread=0.05), scattered]))
    labels, how = clustered(vectors, asked, None, 0)
    assert how == ("k-means of 3" if asked else "HDBSCAN, at least 5 members")
    of_groups = labels[:90].reshape(3, 30)
    assert (of_groups == of_groups[:, :1]).all()
    assert sorted(of_groups[:, 0]) == [0, 1, 2]
    assert (clusters.NO_CLUSTER in labels[90:]) == (asked is None)


def test_many_proteins_are_clustered_by_k_means(monkeypatch):
    monkeypatch.setattr(clusters, "MANY", 50)
    monkeypatch.setattr(clusters, "MANY_CLUSTERS", 4)
    labels, how = clustered(unit(groups(3, 30)), None, None, 0)
    assert (how, labels.max()) == ("k-means of 4", 3)


def test_clusters_are_numbered_by_size():
    assert by_size(np.array([7, 2, 2, -1, 5, 5, 2])).tolist() == [2, 0, 0, -1, 1, 1, 0]
    assert by_size(np.array([-1, -1])).tolist() == [-1, -1]


def test_names_are_of_the_hypergeometric_test():
    """`kinase` is in 8 of 10 members and in 10 of 100 proteins; `protein` is everywhere, `rare` in one member."""
    own, overall = Counter(kinase=8, protein=10, rare=1, some=2), Counter(kinase=10, protein=100, rare=1, some=20)
    (term,) = over_represented(own, overall, 10, 100, tests=4)
    assert (term.text, term.members, term.proteins) == ("kinase", 8, 10)
    p = sum(comb(2, n) * comb(98, 10 - n) for n in (2,)) / comb(
        100, 10
    )  # a word that both of its two proteins have here
    pair = Counter(both=2), Counter(both=2), 10, 100
    assert len(over_represented(*pair, tests=int(0.01 / p))) == 1
    assert over_represented(*pair, tests=int(0.01 / p) + 1) == []


def test_clusters_have_members_a_centre_and_a_name():
    vectors = unit(groups(2, 20, spread=0.05))
    labels = np.repeat([0, 1], 20)
    terms = [{"kinase", "protein"} if n < 20 else {"protein"} for n in range(40)]
    first, second = named(labels, vectors, terms)
    assert (first.name, second.name, second.number) == ("kinase", "cluster 2", 2)
    assert first.members.tolist() == list(range(20))
    mean = vectors[20:].mean(0)
    assert second.centre == 20 + int(np.argmin(np.linalg.norm(vectors[20:] - mean / np.linalg.norm(mean), axis=1)))
    assert named(np.full(40, -1), vectors, terms) == []


def test_descriptions_end_at_attributes(tmp_path):
    (tmp_path / "a.fasta").write_text(
        ">sp|P1|A_HUMAN Serine/threonine-protein kinase 2 OS=Homo sapiens OX=9606\nMKV\n"
        ">UniRef90_B Cluster: ABC transporter n=1 Tax=Bacteria\nMKV\n>C\nMKV\n>D OS=Mus musculus\nMK\n"
    )
    found = descriptions_of(str(tmp_path / "a.fasta"))
    assert list(found.values()) == ["Serine/threonine-protein kinase 2", "Cluster: ABC transporter", "", ""]
    assert words_of(found["sp|P1|A_HUMAN"]) == {"serine", "threonine-protein", "kinase"}
