"""probe.py beside plain scikit-learn on transformers' features; what is held out."""

from __future__ import annotations

import csv
import shutil

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold, PredefinedSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoTokenizer, EsmModel

from common.cli import UserError
from extras.after.downstream.probe_fits import ALPHAS, FOLDS, STRENGTHS
from extras.after.downstream.probes import TEST_SHARE
from extras.after.downstream.splits import split_of
from tests.data_fixtures import call, write_fasta
from tests.extras.after.downstream.probing import COUNT, NAMES, PROBE, ROWS, probe
from tests.extras.after.downstream.tables import write_table
from tests.extras.after.inference.embed_fixtures import call_embed


@pytest.fixture(scope="module")
def stock(model, proteins) -> list[np.ndarray]:
    """transformers' [L, hidden] of each protein."""
    tokenizer, theirs = AutoTokenizer.from_pretrained(model), EsmModel.from_pretrained(model, add_pooling_layer=False)
    with torch.no_grad():
        return [
            theirs.eval()(**tokenizer(t, return_tensors="pt")).last_hidden_state[0, 1:-1].numpy() for _, t in proteins
        ]


def direction(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=32)


def planted(stock: list[np.ndarray]) -> np.ndarray:
    means = np.stack([each.mean(0) for each in stock])
    return (means - means.mean(0)) @ direction()


def test_probe_equals_scikit_learn_on_transformers_features(embedded, fasta, proteins, stock, tmp_path):
    numbers = planted(stock)
    table = [(name, repr(float(y))) for (name, _), y in zip(proteins, numbers, strict=True)]
    labels = write_table(tmp_path / "labels.csv", ["id", "label"], table)
    results, found = probe(embedded["mean"], fasta, labels, tmp_path / "out")
    features = np.stack([each.mean(0) for each in stock])
    test = np.array([split_of(text, (0.0, TEST_SHARE)) == "test" for _, text in proteins])
    groups = np.array([text for _, text in proteins])
    search = GridSearchCV(
        make_pipeline(StandardScaler(), Ridge()), {"ridge__alpha": ALPHAS}, cv=GroupKFold(FOLDS), scoring="r2"
    ).fit(features[~test], numbers[~test], groups=groups[~test])
    expected = search.predict(features[test])
    assert [row["id"] for row in found] == [name for (name, _), held in zip(proteins, test, strict=True) if held]
    np.testing.assert_allclose([float(row["prediction"]) for row in found], expected, atol=1e-3 * numbers.std())
    y = numbers[test]
    theirs = {
        "spearman": spearmanr(y, expected).statistic,
        "pearson": pearsonr(y, expected).statistic,
        "r2": metrics.r2_score(y, expected),
        "mae": metrics.mean_absolute_error(y, expected),
    }
    for name, value in theirs.items():
        mine, low, high = results["probe"][name]
        assert mine == pytest.approx(value, abs=2e-2 if name == "spearman" else 1e-3)
        assert low <= mine <= high
    assert results["probe"]["spearman"][1] > 0.8
    value, low, high = results["difference"]["r2"]
    assert value == pytest.approx(results["probe"]["r2"][0] - results["baseline"]["r2"][0])
    assert 0 < low <= value <= high
    assert results["intervals"] == {"over": "proteins", "test": int(test.sum())}


def test_probe_finds_no_shuffled_labels(embedded, fasta, proteins, stock, tmp_path):
    shuffled = np.random.default_rng(3).permutation(planted(stock))
    table = [(name, float(y)) for (name, _), y in zip(proteins, shuffled, strict=True)]
    labels = write_table(tmp_path / "labels.csv", ["id", "label"], table)
    _, low, _ = probe(embedded["mean"], fasta, labels, tmp_path / "out")[0]["probe"]["spearman"]
    assert low < 0.2


def test_probe_of_residues_equals_scikit_learn_in_either_form(embedded, fasta, proteins, stock, tmp_path):
    """A class of each residue, in a string or a row each; some have none; the split is the table's."""
    wide, long, features, classes, held_out = [], [], [], [], []
    for number, ((name, text), states) in enumerate(zip(proteins[:24], stock, strict=False)):
        split = "test" if number % 4 == 0 else "train"
        letters = np.where(states @ direction(1) > 0, "H", "E")
        letters[::7] = "."
        wide.append((name, "".join(letters), split))
        for place in np.flatnonzero(letters != "."):
            long.append((name, place + 1, letters[place], split))
            features.append(states[place])
            classes.append(letters[place])
            held_out.append((split == "test", text))
    first = write_table(tmp_path / "wide.csv", ["id", "label", "split"], wide)
    second = write_table(tmp_path / "long.csv", ["id", "position", "label", "split"], long)
    results, found = probe(embedded["residues"], fasta, first, tmp_path / "out")
    again, same = probe(embedded["residues"], fasta, second, tmp_path / "again")
    assert results["intervals"] == {"over": "proteins", "test": 6}
    assert (again["probe"], same) == (results["probe"], found)

    x, y, test = np.stack(features), np.array(classes), np.array([each for each, _ in held_out])
    groups = np.array([text for _, text in held_out])
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    grid = {"logisticregression__C": STRENGTHS}
    search = GridSearchCV(pipeline, grid, cv=GroupKFold(FOLDS)).fit(x[~test], y[~test], groups=groups[~test])
    expected = search.predict(x[test])
    predicted = np.array([row["prediction"] for row in found])
    assert [row["label"] for row in found] == y[test].tolist()
    assert (predicted == expected).mean() > 0.995
    assert results["probe"]["auroc"][0] > 0.95


def test_probe_chooses_its_regularisation_on_the_validation_split(embedded, fasta, proteins, stock, tmp_path):
    numbers = planted(stock) + np.random.default_rng(1).normal(size=COUNT)
    splits = [("train", "train", "valid", "test")[n % 4] for n in range(COUNT)]
    table = [(name, float(y), s) for (name, _), y, s in zip(proteins, numbers, splits, strict=True)]
    labels = write_table(tmp_path / "labels.csv", ["id", "label", "split"], table)
    _, found = probe(embedded["mean"], fasta, labels, tmp_path / "out")
    features, side = np.stack([each.mean(0) for each in stock]), np.array(splits)
    known = side != "test"
    folds = PredefinedSplit(np.where(side[known] == "valid", 0, -1))
    pipeline = make_pipeline(StandardScaler(), Ridge())
    search = GridSearchCV(pipeline, {"ridge__alpha": ALPHAS}, cv=folds, scoring="r2").fit(
        features[known], numbers[known]
    )
    expected = search.predict(features[~known])
    np.testing.assert_allclose([float(row["prediction"]) for row in found], expected, atol=1e-3 * numbers.std())


def test_probe_holds_out_whole_clusters(embedded, fasta, proteins, stock, tmp_path):
    """By a table, or by MMseqs2's clusters of mutated copies."""
    families = {name: f"UniRef50_{number // 3}" for number, (name, _) in enumerate(proteins)}
    table = tmp_path / "clusters.tsv"
    table.write_text("ur50_id\tur90_id\n" + "".join(f"{family}\t{name}\n" for name, family in families.items()))
    numbers = planted(stock)
    pairs = [(name, float(y)) for (name, _), y in zip(proteins, numbers, strict=True)]
    labels = write_table(tmp_path / "labels.csv", ["id", "label"], pairs)
    results, found = probe(embedded["mean"], fasta, labels, tmp_path / "out", "--cluster_table", table)
    held_out = {row["id"] for row in found}
    inside = {families[name] for name in held_out}
    assert results["intervals"] == {"over": "clusters", "test": len(inside)}
    assert 0 < len(held_out) < COUNT
    assert {name for name, family in families.items() if family in inside} == held_out
    mixed = [(name, y, ("train", "test")[number % 2]) for number, (name, y) in enumerate(pairs)]
    write_table(labels, ["id", "label", "split"], mixed)
    with pytest.raises(UserError, match="row 3: the cluster .* is in the train split, too"):
        probe(embedded["mean"], fasta, labels, tmp_path / "mixed", "--cluster_table", table)
    assert not (tmp_path / "mixed").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="no mmseqs")
def test_probe_clusters_by_mmseqs_and_counts_relatives(model, tmp_path, caplog):
    caplog.set_level("INFO")
    generator = np.random.default_rng(0)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
    members = []
    for family in range(60):
        ancestor = generator.choice(letters, 120)
        for copy in range(2):
            text = np.where(generator.random(120) < 0.05, generator.choice(letters, 120), ancestor)
            members.append((f"F{family}_{copy}", "".join(text)))
    fasta = write_fasta(tmp_path / "my.fasta", members)
    call_embed(model, fasta, tmp_path / "embedded")
    table = [(name, float(n)) for n, (name, _) in enumerate(members)]
    labels = write_table(tmp_path / "labels.csv", ["id", "label"], table)
    flags = ("--cluster", 0.5, "--count_relatives", "True")
    results, found = probe(tmp_path / "embedded", fasta, labels, tmp_path / "out", *flags)
    held_out = [row["id"].split("_")[0] for row in found]
    assert held_out
    assert all(held_out.count(family) == 2 for family in held_out)
    assert results["relatives"] == {
        "proteins": len(found),
        "with_relative": 0,
        "by": "MMseqs2 search",
        "identity": 0.5,
        "coverage": 0.8,
    }
    # 20 families with a member on each side, 10 that are held out whole.
    sides = ["test" if n < 40 and n % 2 or n >= 100 else "train" for n in range(120)]
    split = [(*row, side) for row, side in zip(table, sides, strict=True)]
    labels = write_table(tmp_path / "split.csv", ["id", "label", "split"], split)
    results, found = probe(tmp_path / "embedded", fasta, labels, tmp_path / "split", *flags[2:])
    assert len(found) == 40
    assert results["relatives"]["with_relative"] == 20
    assert "test: 20 of 40 proteins have a relative in train (MMseqs2 search, " in caplog.text


def test_probe_leaves_out_what_has_no_label_and_names_contradictions(embedded, fasta, proteins, tmp_path, caplog):
    """Words of R and pandas, an unlabelled stranger, dashes of residues; 0.0 and 1.0 are classes."""
    pairs = [(name, f"{n % 2}.0") for n, (name, _) in enumerate(proteins)]
    labels = write_table(tmp_path / "a.csv", NAMES, [*pairs[3:], ("P0", "NA"), ("P1", "None"), ("stranger", "")])
    results, found = probe(embedded["mean"], fasta, labels, tmp_path / "a")
    assert f"--labels {labels}: 3 of {COUNT} rows are left out: 3 without a label" in caplog.messages
    assert {row["label"] for row in found} == {"0", "1"}
    assert results["contradicting_labels"] == {"proteins": 0, "first": None}

    strings = [
        (name, "".join("HE-."[(n + place) % 4] for place in range(len(t)))) for n, (name, t) in enumerate(proteins)
    ]
    labels = write_table(tmp_path / "b.csv", NAMES, strings)
    _, found = probe(embedded["residues"], fasta, labels, tmp_path / "b")
    assert {row["label"] for row in found} == {"H", "E"}
    held_out = {row["id"] for row in found}
    assert len(found) == sum(text.count("H") + text.count("E") for name, text in strings if name in held_out)


def test_probe_names_contradicting_labels_and_merges_clusters_of_equal_sequences(model, proteins, tmp_path, caplog):
    """Each protein comes again in lower case, as another record, of another cluster, with another label."""
    records = [*proteins, *((f"again_{name}", text.lower()) for name, text in proteins)]
    fasta = write_fasta(tmp_path / "my.fasta", records)
    rows = [(name, n / 7, f"c{n}") for n, (name, _) in enumerate(records)]
    labels = write_table(tmp_path / "a.csv", [*NAMES, "of"], rows)
    call_embed(model, fasta, tmp_path / "embedded")
    results, found = probe(tmp_path / "embedded", fasta, labels, tmp_path / "out", "--cluster_column", "of")
    held_out = {row["id"] for row in found}
    assert {name for name, _ in proteins if name in held_out} == {n[6:] for n in held_out if n.startswith("again_")}
    assert results["intervals"] == {"over": "clusters", "test": len(held_out) // 2}
    first = f"'P0' 0.0, 'again_P0' {COUNT / 7}"
    assert results["contradicting_labels"] == {"proteins": COUNT, "first": first}
    assert f"--labels {labels}: {COUNT} proteins have contradicting labels: {first}" in caplog.messages


def test_probe_replaces_its_own_output_only_with_overwrite_and_the_same_bytes_come_again(
    embedded, fasta, tmp_path, caplog
):
    labels = write_table(tmp_path / "labels.csv", NAMES, ROWS)
    probe(embedded["mean"], fasta, labels, tmp_path / "out")
    first = (tmp_path / "out" / "predictions.csv").read_bytes()
    written = (tmp_path / "out" / "predictions.csv").stat().st_mtime_ns
    caplog.set_level("INFO")
    probe(shutil.copytree(embedded["mean"], tmp_path / "copied"), fasta, labels, tmp_path / "out")
    assert "was made by the same command: nothing to do" in caplog.text
    assert (tmp_path / "out" / "predictions.csv").stat().st_mtime_ns == written
    with pytest.raises(UserError, match="was made from other input or arguments: --overwrite it, or choose another"):
        probe(embedded["residues"], fasta, labels, tmp_path / "out")
    shutil.copy(labels, tmp_path / "out" / "mine.csv")
    probe(embedded["mean"], fasta, labels, tmp_path / "out", "--overwrite")
    assert (tmp_path / "out" / "predictions.csv").read_bytes() == first
    assert (tmp_path / "out" / "mine.csv").exists()
    for out, given in ((tmp_path / "out", tmp_path / "out" / "mine.csv"), (embedded["mean"], labels)):
        with pytest.raises(UserError, match="is in there: choose another"):
            probe(embedded["mean"], fasta, given, out, "--overwrite")


def test_probe_of_a_model_equals_that_of_its_embeddings(model, embedded, fasta, tmp_path):
    labels = write_table(tmp_path / "labels.csv", NAMES, ROWS)
    _, expected = probe(embedded["mean"], fasta, labels, tmp_path / "out")
    flags = ("--model_name_or_path", model, "--fasta", fasta, "--labels", labels, "--output_dir", tmp_path / "own")
    call(PROBE, *flags)
    with (tmp_path / "own" / "predictions.csv").open() as file:
        assert list(csv.DictReader(file)) == expected
