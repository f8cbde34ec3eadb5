"""Probes: linear models from a model's embeddings to labels, judged on held-out proteins beside a plain baseline.

The probe is scikit-learn's: standardised features, ridge regression for numbers, logistic regression for classes, the
strength of regularisation chosen by cross-validation within the training part, whole groups at a time.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.cli import UserError

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
PROBES = ("ridge", "linear", "logistic")
ALPHAS = tuple(10.0**n for n in range(-2, 6))  # of ridge
STRENGTHS = tuple(10.0**n for n in range(-4, 2))  # C of logistic
FOLDS = 3
LEAST = 10  # labels to train on, and to evaluate on
TEST_SHARE = 0.2  # where no split is given
RESAMPLES = 1000
NEIGHBOURS = 2  # residues on each side, in the baseline of a residue


@dataclass(frozen=True)
class Examples:
    """features: [N, F]; baseline: [N, G]; labels: [N], floats or strings; groups: [N], which are held out whole (a
    cluster, a protein); test: [N], whether held out."""

    features: np.ndarray
    baseline: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    test: np.ndarray


def labels_of(texts: Sequence[str], probe: str | None) -> np.ndarray:
    """Floats if the probe is a regression, or unset and all are numbers; else the texts. UserError if they are not."""
    if probe == "logistic":
        return np.array(texts)
    try:
        numbers = np.array([float(text) for text in texts])
    except ValueError as error:
        if probe:
            raise UserError(f"--probe {probe}: labels must be numbers: {str(error)[:80]}") from error
        return np.array(texts)
    if not np.isfinite(numbers).all():
        raise UserError("labels: NaN or infinity among the numbers: leave the field empty where there is none")
    whole = len(set(texts)) <= 2 and set(texts) <= {"0", "1"}
    return np.array(texts) if probe is None and whole else numbers


def held_out_number(key: str) -> float:
    """From 0 to 1, by a hash: a protein or cluster is held out if it is below a threshold, whatever else there is."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def is_held_out(key: str) -> bool:
    """Whether a protein or cluster is, where no split is given."""
    return held_out_number(key) < TEST_SHARE


def composition(sequence: str) -> np.ndarray:
    """Frequencies of the 20 residues and the logarithm of the length, float64 [21]."""
    counts = [sequence.upper().count(residue) for residue in RESIDUES]
    return np.array([*(count / len(sequence) for count in counts), np.log(len(sequence))])


def neighbourhood(sequence: str) -> np.ndarray:
    """Each residue and its neighbours, one-hot: float64 [L, 5 x 20]."""
    around = np.zeros((len(sequence) + 2 * NEIGHBOURS, len(RESIDUES)))
    for place, letter in enumerate(sequence.upper()):
        if (number := RESIDUES.find(letter)) >= 0:
            around[place + NEIGHBOURS, number] = 1
    return np.concatenate([around[n : n + len(sequence)] for n in range(2 * NEIGHBOURS + 1)], axis=1)


def check(examples: Examples) -> None:
    """UserError for too few labels, and for a class that only the held-out part has, or a single one."""
    train, test = examples.labels[~examples.test], examples.labels[examples.test]
    for part, name in ((train, "training"), (test, "held-out")):
        if len(part) < LEAST:
            raise UserError(f"labels: {len(part)} in the {name} part: a probe needs {LEAST} or more in each")
    if examples.labels.dtype.kind == "U":
        if len(set(train)) < 2:
            raise UserError(f"labels: one class alone in the training part, {str(train[0])[:40]!r}")
        if unknown := sorted(set(test) - set(train)):
            raise UserError(f"labels: the class {str(unknown[0])[:40]!r} is in the held-out part alone")


def fitted(features: np.ndarray, labels: np.ndarray, groups: np.ndarray, probe: str) -> Any:
    """The probe with its best regularisation, fitted to all of these."""
    from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV, GroupKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if probe == "linear":
        return make_pipeline(StandardScaler(), LinearRegression()).fit(features, labels)
    estimator, grid = (
        (Ridge(), {"ridge__alpha": ALPHAS})
        if probe == "ridge"
        else (LogisticRegression(max_iter=1000), {"logisticregression__C": STRENGTHS})
    )
    pipeline, folds = make_pipeline(StandardScaler(), estimator), min(FOLDS, len(set(groups)))
    if folds < 2:
        return pipeline.fit(features, labels)
    search = GridSearchCV(pipeline, grid, cv=GroupKFold(folds), scoring="r2" if probe == "ridge" else "accuracy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fold that lacks a class, or does not converge within its iterations
        return search.fit(features, labels, groups=groups).best_estimator_


def confusion(labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """[K, K] counts by label and prediction, both numbers of classes; scikit-learn takes 100 times as long."""
    classes = max(labels.max(), predictions.max()) + 1
    return np.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)


def balanced_accuracy(counts: np.ndarray) -> float:
    """The mean recall of the classes that there are, as scikit-learn's."""
    there = counts.sum(1) > 0
    return float((counts.diagonal()[there] / counts.sum(1)[there]).mean())


def macro_f1(counts: np.ndarray) -> float:
    """The mean F1 of the classes that there are or that are predicted, as scikit-learn's."""
    either = counts.sum(0) + counts.sum(1)
    return float((2 * counts.diagonal()[either > 0] / either[either > 0]).mean())


def metrics_of(labels: np.ndarray) -> dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray | None], float]]:
    """{name: (labels, predictions, scores of the second of two classes) -> value}; classes as their numbers."""
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import r2_score, roc_auc_score

    if labels.dtype.kind != "U":
        return {
            "spearman": lambda y, p, _: float(spearmanr(y, p).statistic),
            "pearson": lambda y, p, _: float(pearsonr(y, p).statistic),
            "r2": lambda y, p, _: float(r2_score(y, p)),
            "mae": lambda y, p, _: float(np.abs(y - p).mean()),
        }
    found: dict[str, Any] = {
        "accuracy": lambda y, p, _: float((y == p).mean()),
        "balanced_accuracy": lambda y, p, _: balanced_accuracy(confusion(y, p)),
        "macro_f1": lambda y, p, _: macro_f1(confusion(y, p)),
    }
    if len(set(labels)) == 2:
        found["auroc"] = lambda y, _, s: float(roc_auc_score(y == y.max(), s))
    return found


def evaluate(examples: Examples, probe: str | None = None) -> tuple[dict[str, dict[str, Any]], np.ndarray]:
    """({"probe": {metric: [value, low, high]}, "baseline": ...}, predictions of the held-out examples).

    probe: of `PROBES`; None: by the labels. low, high: of 95 % of `RESAMPLES` resamplings of the held-out groups.
    UserError as `check`.
    """
    check(examples)
    chosen = probe or ("logistic" if examples.labels.dtype.kind == "U" else "ridge")
    train, test = ~examples.test, examples.test
    found: dict[str, dict[str, Any]] = {}
    predictions = np.array([])
    for name, features in (("baseline", examples.baseline), ("probe", examples.features)):
        model = fitted(features[train], examples.labels[train], examples.groups[train], chosen)
        predictions = model.predict(features[test])
        scores = None
        if chosen == "logistic" and len(model.classes_) == 2:
            scores = model.decision_function(features[test])
        found[name] = with_intervals(examples.labels[test], predictions, scores, examples.groups[test])
    return dict(reversed(found.items())), predictions


def with_intervals(
    labels: np.ndarray,
    predictions: np.ndarray,
    scores: np.ndarray | None,
    groups: np.ndarray,
    resamples: int = RESAMPLES,
) -> dict[str, list[float]]:
    """{metric: [value, low, high]}, as of `evaluate`; low and high are NaN without resamples."""
    metrics = metrics_of(labels)
    if labels.dtype.kind == "U":
        _, codes = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
        labels, predictions = codes[: len(labels)], codes[len(labels) :]
    generator = np.random.default_rng(0)
    _, group = np.unique(groups, return_inverse=True)
    members = [np.flatnonzero(group == n) for n in range(group.max() + 1)]
    drawn = [
        np.concatenate([members[n] for n in generator.integers(len(members), size=len(members))])
        for _ in range(resamples)
    ]
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamplings without a correlation, or with a class alone
        for name, metric in metrics.items():

            def value(rows: Any, metric: Any = metric) -> float:
                try:
                    return metric(labels[rows], predictions[rows], None if scores is None else scores[rows])
                except ValueError:
                    return np.nan

            resampled = [value(rows) for rows in drawn]
            low, high = np.nanpercentile(resampled, [2.5, 97.5]) if np.isfinite(resampled).any() else (np.nan, np.nan)
            found[name] = [value(slice(None)), float(low), float(high)]
    return found
