"""A probe's metrics, intervals and difference from its baseline, beside scikit-learn, SciPy and a plain bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics

from common.cli import UserError
from extras.after.downstream.metrics import LEAST_GROUPS, values_of, with_intervals
from extras.after.downstream.probe_fits import evaluate
from extras.after.downstream.probes import Examples, check, labels_of


def test_labels_are_classes_or_numbers_by_what_they_are():
    assert labels_of(["0", "1", "1"], None).dtype.kind == "U"
    assert labels_of(["0", "1", "1"], "ridge").dtype.kind == "f"
    assert labels_of(["0", "1", "2"], None).dtype.kind == "f"
    assert labels_of(["0", "1", "2"], "logistic").dtype.kind == "U"
    assert labels_of(["H", "E", "1"], None).dtype.kind == "U"


@pytest.mark.parametrize("classes", [2, 3])
def test_values_equal_scikit_learn(classes):
    """With ties among the scores, and a class that is predicted but never right."""
    generator = np.random.default_rng(classes)
    y, p = (np.array(list("abc"))[generator.integers(classes, size=50)] for _ in range(2))
    y[y == "c"] = "b"
    scores = generator.integers(9, size=50) / 9 if classes == 2 else None
    found = values_of(y, p, scores)
    assert found.pop("accuracy") == pytest.approx(metrics.accuracy_score(y, p))
    assert found.pop("macro_f1") == pytest.approx(metrics.f1_score(y, p, average="macro", zero_division=0))
    recall = metrics.recall_score(y, p, average="macro", labels=sorted(set(y)))
    assert found.pop("balanced_accuracy") == pytest.approx(recall)
    if scores is not None:
        assert found.pop("auroc") == pytest.approx(metrics.roc_auc_score(y == "b", scores))
    assert not found
    numbers, guesses = generator.integers(7, size=(2, 40)).astype(float)
    found = values_of(numbers, guesses, None)
    assert found["spearman"] == pytest.approx(spearmanr(numbers, guesses).statistic)
    assert found["r2"] == pytest.approx(metrics.r2_score(numbers, guesses))


def test_intervals_over_proteins_are_those_of_a_plain_bootstrap_and_no_residues_narrow_them():
    """Labelled residues of 20 proteins, whose errors agree within a protein.

    The 2.5 % quantile of 1,000 normal draws has a standard deviation of sqrt(0.025 x 0.975 / 1000) / 0.058 = 0.085 of
    theirs; 4 sigma: 0.34 of the bootstrap's standard deviation.
    """
    generator = np.random.default_rng(5)
    groups = np.repeat(np.arange(20), 30)
    labels = np.repeat(generator.normal(size=20), 30) + generator.normal(size=600) * 0.1
    predictions = labels + np.repeat(generator.normal(size=20), 30) * 0.5
    found = with_intervals(labels, predictions, None, groups)
    drawn = {"pearson": [], "mae": []}
    for _ in range(3000):
        rows = np.concatenate([np.flatnonzero(groups == n) for n in generator.integers(20, size=20)])
        drawn["pearson"].append(np.corrcoef(labels[rows], predictions[rows])[0, 1])
        drawn["mae"].append(np.abs(labels[rows] - predictions[rows]).mean())
    assert found["pearson"][0] == pytest.approx(pearsonr(labels, predictions).statistic)
    for name, values in drawn.items():
        np.testing.assert_allclose(found[name][1:], np.percentile(values, [2.5, 97.5]), atol=0.34 * np.std(values))
    over_residues = with_intervals(labels, predictions, None, np.arange(600))
    widths = [each["mae"][2] - each["mae"][1] for each in (found, over_residues)]
    assert widths[1] < widths[0] / 3


def test_difference_from_the_baseline_is_paired():
    """A probe of the baseline's own features differs from it in no resample."""
    generator = np.random.default_rng(6)
    features = generator.normal(size=(80, 3))
    labels = features @ [1.0, 2.0, 0.5] + generator.normal(size=80)
    groups, test = np.arange(80).astype(str), np.arange(80) % 2 == 0
    found = evaluate(Examples(features, features, labels, groups, test, np.zeros(80, bool))).results
    assert found["probe"]["r2"][2] - found["probe"]["r2"][1] > 0.1
    assert found["difference"] == {name: [0.0, 0.0, 0.0] for name in found["probe"]}


def test_probe_says_what_one_held_out_protein_and_its_only_label_leave_undefined(caplog):
    test, features = np.arange(40) < 20, np.zeros((40, 1))
    labels, groups = np.where(test, 1.5, np.arange(40.0)), np.where(test, "held out", np.arange(40).astype(str))
    check(Examples(features, features, labels, groups, test, np.zeros(40, bool)), "here")
    assert caplog.messages == [
        "here: one protein or cluster in the test split: its metrics say nothing of others",
        "here: all labels of the test split are 1.5: spearman, pearson and r2 are not defined",
    ]
    constant = Examples(features, features, labels[::-1], groups, test, np.zeros(40, bool))
    with pytest.raises(UserError, match="all labels of the training part are 1.5: nothing to learn"):
        check(constant, "here")


def test_intervals_are_undefined_for_few_groups_and_metrics_for_constant_predictions():
    labels, groups = np.arange(60.0), np.repeat(np.arange(LEAST_GROUPS), 60 // LEAST_GROUPS)
    assert with_intervals(labels, np.zeros(60), None, groups)["spearman"] == [None, None, None]
    assert with_intervals(labels, labels, None, groups)["mae"] == [0.0, 0.0, 0.0]
    few = np.minimum(groups, LEAST_GROUPS - 2)
    assert with_intervals(labels, labels, None, few)["mae"] == [0.0, None, None]
    classes = np.array(["a", "b", "c"] * 4)
    assert "auroc" not in values_of(classes, classes, None)
