"""map.py as a whole: its files, the neighbours of new proteins, resume, and what it refuses in one line."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from common.cli import UserError
from extras.after.maps import results
from tests.data_fixtures import call, everything_in, proteins, write_fasta
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.inference.embed_fixtures import call_embed, make_model
from tests.extras.after.maps.mapping import MAP, groups, mapped, rows_of, write_embeddings

KIND = ["membrane", "kinase", "capsid"]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    return write_embeddings(tmp_path_factory.mktemp("embedded") / "embedded", groups(3, 20))


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    rows = [(f"P{n}", KIND[n // 20]) for n in range(57)]
    return write_table(tmp_path_factory.mktemp("labels") / "labels.csv", ["id", "kind"], rows)


def test_map_has_coordinates_clusters_neighbours_and_pictures(embedded, labels, tmp_path, capsys):
    flags = ("--table", labels, "--colour_by", "kind", "--neighbours", 4, "--figure_format", "svg")
    found = mapped(embedded, tmp_path / "out", *flags)
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {
        *("map.svg", "map.html", "map.csv", "neighbours.csv", "clusters.csv", "results.json"),
    }
    assert found["clusters"] == {"method": "HDBSCAN, at least 5 members", "found": 3, "in_none": 0}
    assert found["neighbours"] == {"k": 4, "method": "exact"}
    total, same = 57, 20 * 19 * 2 + 17 * 16
    assert found["column"] == {
        "missing": 3,
        "pairs": found["column"]["pairs"],
        "nearest_agrees": 1.0,
        "chance": pytest.approx(same / (total * (total - 1))),
    }
    points = rows_of(tmp_path / "out" / "map.csv")
    assert [row["id"] for row in points] == [f"P{n}" for n in range(60)]
    assert [row["kind"] for row in points] == [KIND[n // 20] if n < 57 else "" for n in range(60)]
    assert points[4]["length"] == "15"
    clusters = {row["cluster"]: row for row in rows_of(tmp_path / "out" / "clusters.csv")}
    assert {clusters[points[20 * n]["cluster"]]["name"] for n in range(3)} == {f"kind={name}" for name in KIND}
    assert clusters[points[59]["cluster"]]["found_in"] == "kind=capsid: 17 of 17"
    neighbours = rows_of(tmp_path / "out" / "neighbours.csv")
    assert [(row["id"], row["rank"]) for row in neighbours] == [
        (f"P{n}", str(k)) for n in range(60) for k in range(1, 5)
    ]
    assert all(int(row["id"][1:]) // 20 == int(row["neighbour"][1:]) // 20 for row in neighbours)
    assert all(row["id"] != row["neighbour"] for row in neighbours)
    assert "kind=membrane (20 of 20)" in capsys.readouterr().out


def test_clusters_are_named_by_descriptions(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    words = [f"Putative {'ATPase' if n < 20 else 'porin'} {n} OS=Mus musculus" for n in range(40)]
    embedded = write_embeddings(tmp_path / "embedded", groups(2, 20), words=words)
    mapped(embedded, tmp_path / "out", "--fasta", tmp_path / "embedded.fasta")
    named = {row["centre"]: row for row in rows_of(tmp_path / "out" / "clusters.csv")}
    assert {int(centre[1:]) // 20: row["name"] for centre, row in named.items()} == {0: "atpase", 1: "porin"}
    assert {row["found_in"] for row in named.values()} == {"atpase: 20 of 20", "porin: 20 of 20"}
    assert "No words" not in caplog.text
    mapped(embedded, tmp_path / "unnamed")
    assert {row["name"] for row in rows_of(tmp_path / "unnamed" / "clusters.csv")} == {"cluster 1", "cluster 2"}
    assert "No words to name clusters by: give --fasta with descriptions, or --table and --colour_by" in caplog.text


def test_embeddings_of_another_fasta_are_refused(embedded, tmp_path):
    other = write_fasta(tmp_path / "other.fasta", proteins(60))
    with pytest.raises(UserError, match=r"--embeddings .*: not of --fasta .*other.fasta: give the file embed.py had"):
        mapped(embedded, tmp_path / "out", "--fasta", other)
    assert not (tmp_path / "out").exists()


def test_new_proteins_get_their_neighbours(embedded, labels, tmp_path):
    new = write_embeddings(tmp_path / "new", groups(3, 1, seed=9), ["N0", "N1", "N2"])
    flags = ("--query", new, "--table", labels, "--colour_by", "kind", "--neighbours", 5)
    mapped(embedded, tmp_path / "out", *flags)
    rows = rows_of(tmp_path / "out" / "query_neighbours.csv")
    assert [row["id"] for row in rows] == [name for name in ("N0", "N1", "N2") for _ in range(5)]
    assert all(int(row["neighbour"][1:]) // 20 == int(row["id"][1]) for row in rows)
    assert {row["kind"] for row in rows[:5]} == {"membrane"}
    other = write_embeddings(tmp_path / "other", groups(3, 1), model="another")
    with pytest.raises(UserError, match=r"--query .*other: of another model, or other flags, than --embeddings"):
        mapped(embedded, tmp_path / "out2", "--query", other)


def test_model_and_fasta_give_what_embed_gives(tmp_path):
    model, fasta = make_model(tmp_path / "model"), write_fasta(tmp_path / "my.fasta", proteins(30))
    call_embed(model, fasta, tmp_path / "embedded")
    call_embed(model, fasta, tmp_path / "residues", "--per_residue")
    source = ("--model_name_or_path", model, "--fasta", fasta, "--use_cpu")
    call(MAP, *source, "--query", fasta, "--method", "pca", "--output_dir", tmp_path / "out")
    mapped(tmp_path / "embedded", tmp_path / "again", "--fasta", fasta, "--method", "pca")
    mapped(tmp_path / "residues", tmp_path / "means", "--fasta", fasta, "--method", "pca")
    for name in ("map.csv", "neighbours.csv", "clusters.csv", "map.png", "map.html"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    queried = rows_of(tmp_path / "out" / "query_neighbours.csv")
    assert all(row["id"] == row["neighbour"] for row in queried if row["rank"] == "1")
    for one, other in zip(*(rows_of(tmp_path / name / "map.csv") for name in ("again", "means")), strict=True):
        assert float(one["x"]) == pytest.approx(float(other["x"]), abs=1e-4)


def test_finished_map_is_left_and_a_stopped_one_is_made_again(embedded, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    out, flags = tmp_path / "out", ("--method", "pca")
    mapped(embedded, out, *flags)
    before, times = everything_in(out), (out / "map.csv").stat()
    mapped(embedded, out, *flags)
    assert "was made by the same command: nothing to do" in caplog.text
    assert (out / "map.csv").stat().st_mtime_ns == times.st_mtime_ns
    with pytest.raises(UserError, match="was made from other input or arguments: --overwrite it"):
        mapped(embedded, out, *flags, "--num_clusters", 2)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(results, "write_neighbours", stop)
        with pytest.raises(KeyboardInterrupt):
            mapped(embedded, out, *flags, "--num_clusters", 2, "--overwrite")
    assert everything_in(out) == before, "finished work is kept"
    (out / "mine.txt").write_text("of the user")
    mapped(embedded, out, *flags, "--overwrite", "--num_clusters", 2)
    assert (out / "mine.txt").exists()
    mapped(embedded, tmp_path / "other", *flags, "--num_clusters", 2)
    assert (out / "map.html").read_bytes() == (tmp_path / "other" / "map.html").read_bytes()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("three", "3 proteins: a map needs 4 or more"),
        ("nan", "the embedding of 'P7' is NaN, infinite or zero, 2 in all: embed again"),
        ("zero", "the embedding of 'P7' is NaN, infinite or zero, 1 in all"),
        ("same", "all 20 embeddings are the same"),
        ("twice", "two proteins have the id 'P1': rename one"),
    ],
)
def test_embeddings_without_a_map_are_refused(tmp_path, change, said):
    vectors, ids = groups(2, 10), [f"P{n}" for n in range(20)]
    if change == "three":
        vectors, ids = vectors[:3], ids[:3]
    elif change == "nan":
        vectors[7, 1] = vectors[9, 1] = np.nan
    elif change == "zero":
        vectors[7] = 0
    elif change == "same":
        vectors[:] = vectors[0]
    else:
        ids[4] = "P1"
    embedded = write_embeddings(tmp_path / "embedded", vectors, ids)
    with pytest.raises(UserError) as error:
        mapped(embedded, tmp_path / "out")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--embeddings", "/none"), "--embeddings /none: no finished embeddings there: run embed.py first"),
        (("--embedding_column", "embedding_3"), "no column 'embedding_3': --embedding_column is of embedding"),
        (("--colour_by", "kind"), "--colour_by kind: of which table? Give --table labels.csv"),
        (("--table", "LABELS"), "--table: which of its columns? Give --colour_by COLUMN"),
        (("--table", "/none.csv", "--colour_by", "kind"), "--table /none.csv: no such file"),
        (("--table", "LABELS", "--colour_by", "sort"), "no column 'sort', only 'id', 'kind'"),
        (("--query", "/none"), "--query /none: no finished embeddings there"),
        (("--num_clusters", 3, "--min_cluster_size", 5), "--num_clusters and --min_cluster_size: of k-means and of"),
        (("--neighbours", 0), "--neighbours 0: must be at least 1"),
        (("--method", "som"), "--method som: choose pca, tsne, umap"),
        (("--bf16",), "--bf16: does nothing with --embeddings"),
        (("--model_name_or_path", "x", "--fasta", __file__), "--model_name_or_path and --embeddings: give one"),
    ],
)
def test_map_refuses_in_a_line(embedded, labels, tmp_path, flags, said):
    flags = [labels if word == "LABELS" else word for word in flags]
    with pytest.raises(UserError) as error:
        mapped(embedded, tmp_path / "out", *flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
