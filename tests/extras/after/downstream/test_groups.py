"""What is held out whole: beside a union of pairs by brute force, and by MMseqs2."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from common.cli import UserError
from extras.after.downstream.groups import Clustering, groups_of
from extras.after.downstream.labels import read_examples
from tests.data_fixtures import different
from tests.extras.after.downstream.tables import write_table


def parts_by_brute_force(sequences, clusters):
    """Pairs of proteins of one part: joined as long as any two parts share a sequence or a cluster."""
    parts = [{n} for n in range(len(sequences))]
    joined = True
    while joined:
        joined = False
        for one in parts:
            for other in parts:
                if one is not other and any(
                    sequences[a] == sequences[b] or (clusters[a] and clusters[a] == clusters[b])
                    for a in one
                    for b in other
                ):
                    one |= other
                    parts.remove(other)
                    joined = True
                    break
            if joined:
                break
    return sorted(map(sorted, parts))


@pytest.mark.parametrize("seed", range(5))
def test_clusters_with_equal_sequences_are_one_group(seed, caplog):
    generator = np.random.default_rng(seed)
    sequences = [different(n) for n in generator.integers(40, size=50)]
    clusters = ["" if n == 0 else f"c{n}" for n in generator.integers(20, size=50)]
    groups = groups_of(Clustering(column="of"), [{"of": name} for name in clusters], sequences, [])
    found = {}
    for number, group in enumerate(groups):
        found.setdefault(group, []).append(number)
    expected = parts_by_brute_force(sequences, clusters)
    assert sorted(found.values()) == expected
    merged = len(set(clusters) - {""}) - sum(any(clusters[n] for n in part) for part in expected)
    assert merged > 0
    assert f"--cluster_column: {merged} clusters have a protein of another cluster: merged with it" in caplog.messages
    alone = clusters.count("")
    assert f"--cluster_column: {alone} of 50 proteins are in no cluster: each is its own" in caplog.messages


def test_groups_without_clusters_are_sequences_and_those_of_a_column_its_names():
    sequences, rows = [different(n // 2) for n in range(10)], [{"of": f"c{n // 4}"} for n in range(10)]
    assert groups_of(Clustering(), rows, sequences, []) == sequences
    assert groups_of(Clustering(column="of"), rows, sequences, []) == [row["of"] for row in rows]


def families():
    """Pairs of relatives: 5 % of 120 residues are drawn anew."""
    generator = np.random.default_rng(0)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    for family in range(40):
        ancestor = generator.choice(letters, 120)
        for _ in range(2):
            text = np.where(generator.random(120) < 0.05, generator.choice(letters, 120), ancestor)
            yield family, "".join(text)


def test_fine_tuning_holds_out_the_clusters_of_a_table(tmp_path):
    members = list(families())
    rows = [(f"p{n}", text, n / 7) for n, (_, text) in enumerate(members)]
    path = write_table(tmp_path / "a.csv", ("id", "sequence", "label"), rows)
    table = tmp_path / "clusters.tsv"
    table.write_text("ur50_id\tur90_id\n" + "".join(f"f{family}\tp{n}\n" for n, (family, _) in enumerate(members)))
    _, examples = read_examples(str(path), sizes=(0.2, 0.2), cluster_table=str(table))
    assert len({each.group for each in examples}) == 40
    assert all(a.split == b.split for a, b in zip(examples[::2], examples[1::2], strict=True))
    assert {each.split for each in examples} == {"train", "validation", "test"}
    without = write_table(tmp_path / "b.csv", ("sequence", "label"), [row[1:] for row in rows])
    with pytest.raises(UserError, match="no column 'id'"):
        read_examples(str(without), cluster_table=str(table))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="no mmseqs")
def test_fine_tuning_holds_out_clusters_by_mmseqs(tmp_path):
    members = list(families())
    path = write_table(
        tmp_path / "a.csv", ("sequence", "label"), [(text, n / 7) for n, (_, text) in enumerate(members)]
    )
    _, examples = read_examples(str(path), sizes=(0.2, 0.2), cluster=0.5)
    assert [each.group for each in examples] == [
        min(text for family, text in members if family == own) for own, _ in members
    ]


@pytest.mark.parametrize(
    ("clustering", "said"),
    [
        (Clustering(column="a", identity=0.3), "--cluster_column and --cluster: give one of them"),
        (Clustering(identity=30), "--cluster 30: an identity above 0 and at most 1"),
        (Clustering(table="nowhere.tsv"), "--cluster_table nowhere.tsv: no such file"),
    ],
)
def test_clustering_flags_that_cannot_be_used_are_refused(clustering, said):
    with pytest.raises(UserError, match=said):
        clustering.check()
