"""Probes: linear models from a model's embeddings to labels, judged on held-out proteins beside a plain baseline.

The probe is scikit-learn's: standardised features, ridge regression for numbers, logistic regression for classes, the
strength of regularisation chosen by cross-validation within the training part, whole groups at a time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from common.cli import UserError
from extras.after.downstream.labels import (
    class_names,
    contradictions,
    is_absent,
    is_regression,
    place_of,
    read_rows,
    sequences_of,
    usable_rows,
    words_of,
)
from extras.after.downstream.metrics import log_undefined, percentiles, resampled, values_of
from extras.after.downstream.results import named_tables
from extras.after.downstream.splits import check_sides, split_of
from extras.after.inference.encoder import Encoder, EncoderFlags, embed
from extras.after.inference.mutation_scores import RESIDUES

logger = logging.getLogger(__name__)
PARTS = ("probe", "baseline", "difference")  # of results
PROBES = ("ridge", "linear", "logistic")
ALPHAS = tuple(10.0**n for n in range(-2, 6))  # of ridge
STRENGTHS = tuple(10.0**n for n in range(-4, 2))  # C of logistic
FOLDS = 3
LEAST = 10  # labels to train on, and to evaluate on
TEST_SHARE = 0.2  # where no split is given
NEIGHBOURS = 2  # residues on each side, in the baseline of a residue


@dataclass(frozen=True)
class Labelled:
    """A protein with its label, or those of its residues. group: held out whole; split: None if not given; where: for
    errors."""

    name: str
    sequence: str
    label: str
    group: str
    split: str | None
    where: str


@dataclass(frozen=True)
class Examples:
    """features: [N, F]; baseline: [N, G]; labels: [N], floats or strings; groups: [N], which are held out whole (a
    cluster, a protein); test, validation: [N], whether held out, and whether to choose the regularisation on."""

    features: np.ndarray
    baseline: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    test: np.ndarray
    validation: np.ndarray


def examples_of(
    rows: Sequence[Labelled], embedded: Sequence[np.ndarray | None], probe: str | None, where: str
) -> tuple[Examples, list[dict[str, Any]]]:
    """(the examples, {"id", "position" of a residue} of each). UserError names the first row that does not fit.

    embedded: float32 [hidden], or per residue [L, hidden], of each row; None: not known yet, one of a protein.
    """
    features, baseline, texts, groups, splits, about = [], [], [], [], [], []
    for row, embedding in zip(rows, embedded, strict=True):
        split = row.split or split_of(row.group, (0.0, TEST_SHARE))
        if embedding is None or embedding.ndim == 1:
            vector = np.zeros(0, np.float32) if embedding is None else embedding
            pieces = [(vector, composition(row.sequence), row.label.strip(), None)]
        else:
            words = words_of(row.label)
            if len(words) != len(row.sequence):
                raise UserError(f"{row.where}: {len(words)} labels for {len(row.sequence)} residues")
            if len(embedding) != len(words):
                raise UserError(
                    f"{row.where}: {len(embedding)} embeddings for {len(words)} residues: run embed.py again"
                )
            places = range(len(words))
            pieces = list(zip(embedding, neighbourhood(row.sequence), words, places, strict=True))
        for vector, plain, text, place in pieces:
            if not is_absent(text):
                features.append(vector)
                baseline.append(plain)
                texts.append(text)
                groups.append(row.group)
                splits.append(split)
                about.append({"id": row.name} | ({} if place is None else {"position": place + 1}))
    if not texts:
        raise UserError(f"{where}: no row has a label")
    labels, clusters, sides = labels_of(texts, probe, where), np.array(groups), np.array(splits)
    test, validation = sides == "test", sides == "validation"
    examples = Examples(np.stack(features), np.stack(baseline), labels, clusters, test, validation)
    check(examples, where)
    return examples, about


def labels_of(texts: Sequence[str], probe: str | None, where: str = "labels") -> np.ndarray:
    """Floats if the probe is a regression, or unset and all are numbers; else the texts. UserError if they are not."""
    asked = None if probe is None else probe != "logistic"
    if is_regression(texts, asked, where, "--probe logistic"):
        return np.array([float(text) for text in texts])
    names = class_names(texts)
    return np.array([names[text] for text in texts])


def composition(sequence: str) -> np.ndarray:
    """Frequencies of the 20 residues and the logarithm of the length, float64 [21]."""
    counts = [sequence.count(residue) for residue in RESIDUES]
    return np.array([*(count / len(sequence) for count in counts), np.log(len(sequence))])


def neighbourhood(sequence: str) -> np.ndarray:
    """Each residue and its neighbours, one-hot: float64 [L, 5 x 20]."""
    around = np.zeros((len(sequence) + 2 * NEIGHBOURS, len(RESIDUES)))
    for place, letter in enumerate(sequence):
        if (number := RESIDUES.find(letter)) >= 0:
            around[place + NEIGHBOURS, number] = 1
    return np.concatenate([around[n : n + len(sequence)] for n in range(2 * NEIGHBOURS + 1)], axis=1)


def check(examples: Examples, where: str) -> None:
    """UserError for too few labels, a class that only the held-out part has, and a single label to train on."""
    train, test = examples.labels[~examples.test], examples.labels[examples.test]
    for part, name in ((train, "training"), (test, "held-out")):
        if len(part) < LEAST:
            raise UserError(
                f"{where}: {len(part)} labels in the {name} part: each needs {LEAST} or more: add some, or give a "
                "split"
            )
    trained, held_out = set(train.tolist()), set(test.tolist())
    if len(trained) < 2:
        raise UserError(f"{where}: all labels of the training part are {train[0].item()!r:.40}: nothing to learn")
    if examples.labels.dtype.kind == "U" and (unknown := sorted(held_out - trained)):
        raise UserError(f"{where}: the class {unknown[0][:40]!r} is in the held-out part alone")
    log_undefined(where, "test", held_out, len(set(examples.groups[examples.test].tolist())))


def fitted(features: np.ndarray, labels: np.ndarray, groups: np.ndarray, validation: np.ndarray, probe: str) -> Any:
    """The probe with its best regularisation, fitted to all of these.

    validation: bool [N], to choose it on; none: by cross-validation, whole groups at a time.
    """
    from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV, GroupKFold, PredefinedSplit
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
    parts: Any = PredefinedSplit(np.where(validation, 0, -1)) if validation.any() else GroupKFold(folds)
    search = GridSearchCV(pipeline, grid, cv=parts, scoring="r2" if probe == "ridge" else "accuracy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fold that lacks a class, or does not converge within its iterations
        return search.fit(features, labels, groups=groups).best_estimator_


def chosen_probe(examples: Examples, probe: str | None) -> str:
    return probe or ("logistic" if examples.labels.dtype.kind == "U" else "ridge")


def predict(examples: Examples, features: np.ndarray, probe: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(predictions of the held-out examples, scores of the second of two classes or None), by a probe that is fitted
    on the others. features: [N, F]."""
    train = ~examples.test
    known = (examples.labels[train], examples.groups[train], examples.validation[train])
    model = fitted(features[train], *known, probe)
    held_out = features[examples.test]
    of_two = probe == "logistic" and len(model.classes_) == 2
    return model.predict(held_out), model.decision_function(held_out) if of_two else None


def evaluate(examples: Examples, probe: str | None = None) -> tuple[dict[str, dict[str, Any]], np.ndarray]:
    """({"probe": {metric: [value, low, high]}, "baseline": ..., "difference": probe minus baseline}, predictions of
    the held-out examples).

    probe: of `PROBES`; None: by the labels. low, high: as of `with_intervals`, over the held-out groups; those of the
    difference are paired: both are evaluated on the same resamples.
    """
    chosen, test = chosen_probe(examples, probe), examples.test
    labels, groups = examples.labels[test], examples.groups[test]
    values: dict[str, dict[str, float]] = {}
    drawn: dict[str, dict[str, np.ndarray]] = {}
    predictions = np.array([])
    for name, features in (("baseline", examples.baseline), ("probe", examples.features)):
        predictions, scores = predict(examples, features, chosen)
        values[name] = values_of(labels, predictions, scores)
        drawn[name] = resampled(labels, predictions, scores, groups)
    values["difference"] = {name: value - values["baseline"][name] for name, value in values["probe"].items()}
    drawn["difference"] = {name: each - drawn["baseline"][name] for name, each in drawn["probe"].items()}
    return {name: percentiles(values[name], drawn[name]) for name in PARTS}, predictions


class ProbeEvaluation:
    """--eval_probe: probes of tables with the columns sequence and label, and possibly split."""

    def __init__(self, paths: Sequence[str], longest: int):
        """longest: tokens of a sequence that the model takes. UserError for a table that cannot be used."""
        self.flags = EncoderFlags(max_seq_length=min(longest, EncoderFlags.max_seq_length))
        self.tables: dict[str, tuple[list[tuple[str, bytes]], Examples]] = {}
        self.baselines: dict[str, dict[str, float]] = {}
        for stem, path in named_tables("--eval_probe", paths).items():
            rows = read_sequences(str(path), f"--eval_probe {path}")
            examples, about = examples_of(rows, [None] * len(rows), None, f"--eval_probe {path}")
            contradicting(rows, examples, about, f"--eval_probe {path}")
            self.tables[stem] = [(row.name, row.sequence.encode()) for row in rows], examples
            test = int(examples.test.sum())
            counts = f"{len(rows) - test:,}", f"{test:,}"
            logger.info("%s: a probe is fitted on %s proteins and evaluated on %s others", path, *counts)

    def evaluate(self, model: Any) -> dict[str, float]:
        """`eval_probe_<stem>_<metric>` of a stock model, and `eval_probe_<stem>_baseline_<metric>`."""
        encoder = Encoder(self.flags, model.device, model)
        results: dict[str, float] = {}
        for stem, (proteins, examples) in self.tables.items():
            embedded = np.stack([vector.numpy() for vector in embed(encoder, proteins, pooling="mean")])
            examples = replace(examples, features=embedded)
            probe, labels = chosen_probe(examples, None), examples.labels[examples.test]
            if stem not in self.baselines:
                self.baselines[stem] = values_of(labels, *predict(examples, examples.baseline, probe))
            values = values_of(labels, *predict(examples, examples.features, probe))
            first = next(iter(values))
            baseline = self.baselines[stem]
            logger.info("Probe of %s: %s %.3f, baseline %.3f", stem, first, values[first], baseline[first])
            named = values | {f"baseline_{name}": value for name, value in baseline.items()}
            results |= {f"eval_probe_{stem}_{name}": value for name, value in named.items() if np.isfinite(value)}
        return results


def read_sequences(path: str, where: str) -> list[Labelled]:
    """The labelled rows of a table with the columns sequence and label, and possibly splits. UserError names the first
    row that cannot be used."""
    rows = read_rows(path, where, ("sequence", "label"))
    sequences = sequences_of(rows, "label", None, where)
    rows = [row | {"sequence": sequence} for row, sequence in zip(rows, sequences, strict=True)]
    rows, splits = usable_rows(rows, sequences, "label", None, None, where)
    names = [f"row {row['line']}" for row in rows]
    sequences = [row["sequence"] for row in rows]
    return labelled(rows, names, sequences, sequences, splits, "label", where)


def labelled(
    rows: Sequence[dict[str, str]],
    names: Sequence[str],
    sequences: Sequence[str],
    groups: Sequence[str],
    splits: Sequence[str] | None,
    label_column: str,
    where: str,
) -> list[Labelled]:
    """The proteins of a table's rows. UserError for equal proteins or a group in two splits."""
    places = [place_of(row, where) for row in rows]
    if splits:
        check_sides(sequences, groups, splits, places)
    texts = [row[label_column].strip() for row in rows]
    columns = (names, sequences, texts, groups, splits or [None] * len(rows), places)
    return [Labelled(*each) for each in zip(*columns, strict=True)]


def contradicting(
    rows: Sequence[Labelled], examples: Examples, about: Sequence[dict[str, Any]], where: str
) -> dict[str, Any]:
    """{"proteins": how many have contradicting labels, "first": those of one}. about: {"id", "position" of a residue}
    of each example."""
    residues = {row.name: row.sequence for row in rows}
    return contradictions(
        (
            (residues[each["id"]], each.get("position"), each["id"], label)
            for each, label in zip(about, examples.labels.tolist(), strict=True)
        ),
        where,
    )
