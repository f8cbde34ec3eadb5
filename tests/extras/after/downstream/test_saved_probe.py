"""A saved probe gives what scikit-learn's gave; folds, several columns of labels, and what is refused."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from common.cli import UserError
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.probe_fits import ALPHAS, FOLDS, evaluate, outputs_of
from extras.after.downstream.probes import Examples
from extras.after.downstream.saved_probe import Source, read_probes, saved_probe, write_probes
from extras.after.inference.embedded import parts_of
from tests.extras.after.downstream.probing import COUNT, NAMES, ROWS, probe
from tests.extras.after.downstream.tables import write_table

SOURCE = Source("out", "hash", {"bf16": False}, 3)


def examples_of(kind: str) -> Examples:
    generator = np.random.default_rng(0)
    features = (generator.normal(size=(120, 6)) * 3 + 1).astype(np.float32)
    value = features[:, 0] - features[:, 1] + generator.normal(size=120)
    labels = {"two": np.where(value > 0, "b", "a"), "three": np.array(["a", "b", "c"])[np.digitize(value, [-2, 2])]}
    groups, test = np.arange(120).astype(str), np.arange(120) % 3 == 0
    return Examples(features, features, labels.get(kind, value), groups, test, np.zeros(120, bool))


@pytest.mark.parametrize(
    ("kind", "name"), [("numbers", "ridge"), ("numbers", "linear"), ("numbers", "gp"), ("two", None), ("three", None)]
)
def test_saved_probe_gives_what_scikit_learns_gave(tmp_path, kind, name):
    examples = examples_of(kind)
    found = evaluate(examples, name)
    made = saved_probe("label", name or "logistic", found, "train", 80)
    write_probes(tmp_path / "probe", SOURCE, [made, made])
    source, probes = read_probes(tmp_path / "probe")
    assert (source, len(probes)) == (SOURCE, 2)
    features = examples.features[examples.test]
    model, outputs = found.fit.model, probes[1].outputs(features)
    if kind == "numbers":
        np.testing.assert_allclose(outputs.predictions, model.predict(features), atol=1e-4)
    else:
        assert (outputs.predictions == model.predict(features)).all()
        powers = np.exp(outputs.logits)
        np.testing.assert_allclose(powers / powers.sum(1, keepdims=True), model.predict_proba(features), atol=1e-4)
        assert probes[0].classes == tuple(model.classes_)
    if name == "gp":
        _, sigma = model.predict(features, return_std=True)
        np.testing.assert_allclose(outputs.sigma, sigma, rtol=1e-4)
    assert (probes[1].arrays["scores"] == found.scores).all()


def test_gaussian_process_is_scikit_learns_and_its_interval_grows_with_sigma():
    examples = examples_of("numbers")
    found, train = evaluate(examples, "gp"), ~examples.test
    apart = np.sqrt(6)
    kernel = ConstantKernel(1.0) * RBF(apart, (apart / 10, apart * 100)) + WhiteKernel(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True)).fit(
            examples.features[train], examples.labels[train]
        )
    mean, sigma = theirs.predict(examples.features[examples.test], return_std=True)
    np.testing.assert_allclose(found.outputs.predictions, mean, rtol=1e-6)
    np.testing.assert_allclose(found.scores, np.abs(examples.labels[examples.test] - mean) / sigma, rtol=1e-5)
    far = outputs_of(found.fit.model, examples.features[:1] + 100)
    assert far.sigma[0] > 1.5 * sigma.mean()


def test_folds_hold_out_each_protein_once_by_nested_choice(embedded, fasta, proteins, tmp_path):
    """As scikit-learn's, a search within each outer training part; the saved probe is one more, of all."""
    generator = np.random.default_rng(2)
    table = [(name, float(generator.normal()), f"c{n // 2}") for n, (name, _) in enumerate(proteins)]
    labels = write_table(tmp_path / "labels.csv", [*NAMES, "of"], table)
    results, found = probe(embedded["mean"], fasta, labels, tmp_path / "out", "--folds", 4, "--cluster_column", "of")
    assert [row["id"] for row in found] == [name for name, *_ in table]
    assert results["counts"] == {"train": COUNT, "test": COUNT}
    assert results["intervals"] == {"over": "clusters", "test": COUNT // 2}
    assert len(results["folds"]) == 4
    columns = pq.read_table(parts_of(str(embedded["mean"]))[0])["embedding"].combine_chunks()
    features, groups = columns.values.to_numpy().reshape(COUNT, -1), np.array([row[2] for row in table])
    y, expected, folds = np.array([row[1] for row in table]), np.zeros(COUNT), np.zeros(COUNT, int)

    def search():
        return GridSearchCV(
            make_pipeline(StandardScaler(), Ridge()), {"ridge__alpha": ALPHAS}, cv=GroupKFold(FOLDS), scoring="r2"
        )

    for number, (train, held) in enumerate(GroupKFold(4).split(features, y, groups)):
        expected[held] = search().fit(features[train], y[train], groups=groups[train]).predict(features[held])
        folds[held] = number + 1
    np.testing.assert_allclose([float(row["prediction"]) for row in found], expected, atol=1e-5)
    assert [int(row["fold"]) for row in found] == folds.tolist()
    source, (saved,) = read_probes(tmp_path / "out" / "probe")
    assert (saved.fitted_on, saved.labels, source.layer) == ("all", COUNT, None)
    of_all = search().fit(features, y, groups=groups)
    np.testing.assert_allclose(saved.outputs(features).predictions, of_all.predict(features), atol=1e-4)
    np.testing.assert_allclose(saved.arrays["scores"], np.abs(y - expected), atol=1e-5)


def test_several_columns_are_one_table_and_a_probe_each(model, embedded, fasta, proteins, tmp_path):
    """Each with its own rows; numbers that the same column alone gives."""
    rows = [(name, n / 7 if n % 3 else "", "ab"[n % 2] if n < 70 else "NA") for n, (name, _) in enumerate(proteins)]
    labels = write_table(tmp_path / "labels.csv", ["id", "rate", "kind"], rows)
    both, found = probe(embedded["mean"], fasta, labels, tmp_path / "both", "--label_column", "rate", "kind")
    assert list(both["tasks"]) == ["rate", "kind"]
    source, probes = read_probes(tmp_path / "both" / "probe")
    assert [(each.label_column, each.kind, each.classes) for each in probes] == [
        ("rate", "ridge", ()),
        ("kind", "logistic", ("a", "b")),
    ]
    assert (source.model, source.model_hash, source.settings["per_residue"]) == (None, model_hash(str(model)), False)
    for column in ("rate", "kind"):
        alone, same = probe(embedded["mean"], fasta, labels, tmp_path / column, "--label_column", column)
        assert {key: alone[key] for key in both["tasks"][column]} == both["tasks"][column]
        assert [row | {"label_column": column} for row in same] == [
            row for row in found if row["label_column"] == column
        ]


@pytest.mark.parametrize(
    ("flags", "classes", "said"),
    [
        (("--folds", 5), "a" + "b" * 89, "has every 'a' of --labels"),
        (("--folds", 91), "ab" * 45, "has 90 proteins or clusters: give fewer folds"),
        (("--folds", 1), "ab" * 45, "--folds 1"),
        (("--folds", 3, "--split_column", "label"), "ab" * 45, "row 2: the split is 'a'"),
        (("--label_column", "label", "other"), "ab" * 45, "no column 'other', only 'id', 'label'"),
        (("--label_column", "label", "label"), "ab" * 45, "names a column twice"),
        (("--probe", "gp"), "ab" * 45, "'a' is not a number"),
    ],
)
def test_probe_refuses_folds_and_columns_in_a_line(embedded, fasta, tmp_path, flags, classes, said):
    labels = write_table(tmp_path / "labels.csv", NAMES, [(f"P{n}", letter) for n, letter in enumerate(classes)])
    with pytest.raises(UserError) as error:
        probe(embedded["mean"], fasta, labels, tmp_path / "out", *flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_folds_are_refused_where_the_table_has_splits(embedded, fasta, tmp_path):
    rows = [(*row, ("train", "test")[n % 2]) for n, row in enumerate(ROWS)]
    labels = write_table(tmp_path / "labels.csv", [*NAMES, "split"], rows)
    with pytest.raises(UserError, match="has splits: leave out their column, or --folds"):
        probe(embedded["mean"], fasta, labels, tmp_path / "out", "--folds", 3)


@pytest.mark.parametrize("change", ["cut", "gone", "format", "shape", "nan"])
def test_damaged_probe_is_refused_in_a_line(tmp_path, change):
    made = saved_probe("label", "ridge", evaluate(examples_of("numbers")), "train", 80)
    write_probes(directory := tmp_path / "probe", SOURCE, [made])
    about, arrays = directory / "probe.json", directory / "probe.safetensors"
    if change == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-9])
    elif change == "gone":
        arrays.unlink()
    elif change == "format":
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
    else:
        found = load_file(arrays)
        found["0.weights"] = found["0.weights"][:, :3].copy() if change == "shape" else found["0.weights"] * np.nan
        save_file(found, arrays)
    with pytest.raises(UserError, match=r"run probe\.py again$") as error:
        read_probes(directory)
    assert "\n" not in str(error.value)
