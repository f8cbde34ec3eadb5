"""Probes fitted and judged: on the part that is held out, or on each fold by a fit to the others.

They are scikit-learn's: standardised features, ridge regression for numbers, logistic regression for classes, the
strength of regularisation chosen by cross-validation within the training part, whole groups at a time; or a Gaussian
process, whose parameters maximise the likelihood of the training labels.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from common.cli import UserError
from extras.after.downstream.calibration import calibration, probabilities_of, temperature_of
from extras.after.downstream.conformal import scores_of_classes, scores_of_numbers
from extras.after.downstream.metrics import percentiles, resampled, values_of
from extras.after.downstream.probes import LEAST, Examples

PARTS = ("probe", "baseline", "difference")  # of results
ALPHAS = tuple(10.0**n for n in range(-2, 6))  # of ridge
STRENGTHS = tuple(10.0**n for n in range(-4, 2))  # C of logistic
FOLDS = 3  # within the training part
GP_MOST = 3000  # labels to train on: its time grows with their cube, the saved probe with their square


class Outputs(NamedTuple):
    """Of examples, by a fitted probe. predictions: [N]; logits: of classes in the order of their names, [N, C], or
    None; sigma: the Gaussian process' standard deviation, [N], or None."""

    predictions: np.ndarray
    logits: np.ndarray | None = None
    sigma: np.ndarray | None = None

    @property
    def scores(self) -> np.ndarray | None:
        """Of the second of two classes, or None."""
        of_two = self.logits is not None and self.logits.shape[1] == 2
        return self.logits[:, 1] - self.logits[:, 0] if of_two else None

    def at(self, places: np.ndarray) -> Outputs:
        return Outputs(*(None if each is None else each[places] for each in self))


@dataclass(frozen=True)
class Fit:
    """model: scikit-learn's pipeline; temperature: of its logits, 1 of numbers."""

    model: Any
    temperature: float


@dataclass(frozen=True)
class Evaluation:
    """results: {"probe": {metric: [value, low, high]}, "baseline": ..., "difference": probe minus baseline}, and what
    results.json has beside them; places: int [M], the examples that were held out; outputs: theirs; scores: how wrong
    these are, as of conformal.py, [M]; fit: to the training part, or with folds to all examples."""

    results: dict[str, dict[str, Any]]
    places: np.ndarray
    outputs: Outputs
    scores: np.ndarray
    fit: Fit


def estimator_of(probe: str, features: int) -> tuple[Any, dict[str, tuple[float, ...]]]:
    """(the pipeline, what to choose from)."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if probe == "gp":
        apart = float(np.sqrt(features))  # about as far as two examples are, of standardised features
        kernel = ConstantKernel(1.0) * RBF(apart, (apart / 10, apart * 100)) + WhiteKernel(0.1)
        return make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True)), {}
    estimator, grid = {
        "linear": (LinearRegression(), {}),
        "ridge": (Ridge(), {"ridge__alpha": ALPHAS}),
        "logistic": (LogisticRegression(max_iter=1000), {"logisticregression__C": STRENGTHS}),
    }[probe]
    return make_pipeline(StandardScaler(), estimator), grid


def inner_parts(groups: np.ndarray, validation: np.ndarray) -> Any:
    """How the training part is split, to choose on; None for a single group. validation: as of `fitted`."""
    from sklearn.model_selection import GroupKFold, PredefinedSplit

    folds = min(FOLDS, len(set(groups)))
    if folds < 2:
        return None
    return PredefinedSplit(np.where(validation, 0, -1)) if validation.any() else GroupKFold(folds)


def fitted(features: np.ndarray, labels: np.ndarray, groups: np.ndarray, validation: np.ndarray, probe: str) -> Any:
    """The probe with its best regularisation, fitted to all of these.

    validation: bool [N], to choose it on; none: by cross-validation, whole groups at a time. UserError for more
    labels than a Gaussian process takes.
    """
    from sklearn.model_selection import GridSearchCV

    if probe == "gp" and len(labels) > GP_MOST:
        raise UserError(f"--probe gp: {len(labels):,} labels to train on, of at most {GP_MOST:,}: give --probe ridge")
    pipeline, grid = estimator_of(probe, features.shape[1])
    parts = inner_parts(groups, validation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fold that lacks a class, or does not converge within its iterations
        if not grid or parts is None:
            return pipeline.fit(features, labels)
        search = GridSearchCV(pipeline, grid, cv=parts, scoring="r2" if probe == "ridge" else "accuracy")
        return search.fit(features, labels, groups=groups).best_estimator_


def outputs_of(model: Any, features: np.ndarray) -> Outputs:
    """model: of `fitted`; features: [N, F]."""
    last = model[-1]
    if hasattr(last, "classes_"):
        scores = model.decision_function(features)
        logits = np.stack([np.zeros_like(scores), scores], 1) if scores.ndim == 1 else scores
        return Outputs(model.predict(features), logits)
    if hasattr(last, "kernel_"):
        predictions, sigma = model.predict(features, return_std=True)
        return Outputs(predictions, sigma=sigma)
    return Outputs(model.predict(features))


def inner_temperature(
    model: Any, features: np.ndarray, labels: np.ndarray, groups: np.ndarray, validation: np.ndarray
) -> float:
    """Of a classifier: from what the same model says of each inner part, fitted to the others. 1 if none has all
    classes."""
    from sklearn.base import clone

    classes, logits, truth = model.classes_, [], []
    parts = inner_parts(groups, validation)
    for inner, held in parts.split(features, labels, groups) if parts else ():
        if len(set(labels[inner].tolist())) == len(classes):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part = clone(model).fit(features[inner], labels[inner])
            logits.append(outputs_of(part, features[held]).logits)
            truth.append(np.searchsorted(classes, labels[held]))
    return temperature_of(np.concatenate(logits), np.concatenate(truth)) if logits else 1.0


def chosen_probe(examples: Examples, probe: str | None) -> str:
    return probe or ("logistic" if examples.labels.dtype.kind == "U" else "ridge")


def predict(examples: Examples, features: np.ndarray, probe: str) -> tuple[np.ndarray, np.ndarray | None]:
    """(predictions of the held-out examples, scores of the second of two classes or None), by a probe that is fitted
    on the others. features: [N, F]."""
    outputs = outputs_of(fit_to_others(examples, features, examples.test, probe), features[examples.test])
    return outputs.predictions, outputs.scores


def fit_to_others(examples: Examples, features: np.ndarray, held_out: np.ndarray, probe: str) -> Any:
    """held_out: bool [N]."""
    train = ~held_out
    known = (examples.labels[train], examples.groups[train], examples.validation[train])
    return fitted(features[train], *known, probe)


def with_temperature(model: Any, examples: Examples, held_out: np.ndarray) -> Fit:
    """model: fitted to the features of the others."""
    if not hasattr(model[-1], "classes_"):
        return Fit(model, 1.0)
    train = ~held_out
    known = (examples.features[train], examples.labels[train], examples.groups[train], examples.validation[train])
    return Fit(model, inner_temperature(model, *known))


def joined(parts: list[Outputs]) -> Outputs:
    columns = zip(*parts, strict=True)
    return Outputs(*(None if column[0] is None else np.concatenate(column) for column in columns))


def evaluate(examples: Examples, probe: str | None = None) -> Evaluation:
    """Fit, and judge on what each fit has not seen, all folds together.

    probe: of `PROBES`; None: by the labels. Intervals: as of `with_intervals`, over the held-out groups; those of the
    difference are paired: both are evaluated on the same resamples.
    """
    chosen, parts = chosen_probe(examples, probe), examples.held_out
    places = np.concatenate([np.flatnonzero(part) for part in parts])
    order = np.argsort(places)
    labels, groups = examples.labels[places[order]], examples.groups[places[order]]
    values: dict[str, dict[str, float]] = {}
    drawn: dict[str, dict[str, np.ndarray]] = {}
    models, outputs = [], Outputs(np.array([]))
    for name, features in (("baseline", examples.baseline), ("probe", examples.features)):
        models = [fit_to_others(examples, features, part, chosen) for part in parts]
        each = [outputs_of(model, features[part]) for model, part in zip(models, parts, strict=True)]
        outputs = joined(each).at(order)
        values[name] = values_of(labels, outputs.predictions, outputs.scores)
        drawn[name] = resampled(labels, outputs.predictions, outputs.scores, groups)
    values["difference"] = {name: value - values["baseline"][name] for name, value in values["probe"].items()}
    drawn["difference"] = {name: each - drawn["baseline"][name] for name, each in drawn["probe"].items()}
    results: dict[str, Any] = {name: percentiles(values[name], drawn[name]) for name in PARTS}
    fits = [with_temperature(model, examples, part) for model, part in zip(models, parts, strict=True)]
    scores, more = wrongness(labels, outputs, fits, [int(part.sum()) for part in parts], order)
    if examples.fold is None:
        return Evaluation(results | more, places[order], outputs, scores, fits[0])
    more["folds"] = [of_fold(labels[part], outputs.at(np.flatnonzero(part))) for part in parts]
    nothing = np.zeros(len(examples.labels), bool)
    final = with_temperature(fit_to_others(examples, examples.features, nothing, chosen), examples, nothing)
    return Evaluation(results | more, places[order], outputs, scores, final)


def of_fold(labels: np.ndarray, outputs: Outputs) -> dict[str, float | None]:
    """{metric: value} of a fold; None where it is not defined."""
    values = values_of(labels, outputs.predictions, outputs.scores)
    return {name: value if np.isfinite(value) else None for name, value in values.items()}


def wrongness(
    labels: np.ndarray, outputs: Outputs, fits: list[Fit], counts: list[int], order: np.ndarray
) -> tuple[np.ndarray, dict[str, Any]]:
    """(how wrong the outputs are, as of conformal.py, [M]; of classes {"calibration": ...}, for results.json).

    counts: examples that each fit has not seen; order: of `outputs`, from the order of the fits.
    """
    if outputs.logits is None:
        return scores_of_numbers(labels, outputs.predictions, outputs.sigma), {}
    truth = np.searchsorted(fits[0].model.classes_, labels)
    temperature = np.repeat([fit.temperature for fit in fits], counts)[order][:, None]
    of_fits = {"temperature": float(np.mean([fit.temperature for fit in fits]))}
    probabilities = probabilities_of(outputs.logits, temperature)
    found = of_fits | calibration(outputs.logits, truth, temperature)
    return scores_of_classes(probabilities, truth), {"calibration": found}


def with_folds(examples: Examples, folds: int, where: str) -> Examples:
    """Each example in one of so many folds, whole groups at a time; of classes, about as many of each in every fold.

    UserError, which begins with `where`, for fewer groups than folds, and for a fold without which a class has no
    example.
    """
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    of_classes, groups = examples.labels.dtype.kind == "U", len(set(examples.groups.tolist()))
    if groups < folds:
        raise UserError(f"--folds {folds}: {where} has {groups} proteins or clusters: give fewer folds")
    every = sorted(set(examples.labels.tolist()))
    if len(every) < 2:
        raise UserError(f"{where}: all labels are {every[0]!r:.40}: nothing to learn")
    fold = np.zeros(len(examples.labels), int)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class with fewer examples than folds: see below
        splitter = StratifiedGroupKFold(folds) if of_classes else GroupKFold(folds)
        try:
            parts = list(splitter.split(examples.features, examples.labels, examples.groups))
        except ValueError:  # no class has as many examples as there are folds
            parts = list(GroupKFold(folds).split(examples.features, examples.labels, examples.groups))
    for number, (train, held) in enumerate(parts):
        fold[held] = number
        trained = set(examples.labels[train].tolist())
        if of_classes and (lost := [name for name in every if name not in trained]):
            raise UserError(
                f"--folds {folds}: fold {number + 1} has every {lost[0][:40]!r} of {where}: give fewer folds, or more "
                "proteins (or clusters) of that class"
            )
        if len(trained) < 2 or len(train) < LEAST:
            why = (
                f"{len(train)} labels, of at least {LEAST}"
                if len(trained) > 1
                else "one label alone: nothing to learn"
            )
            raise UserError(f"--folds {folds}: {where} without fold {number + 1} has {why}")
    return replace(examples, fold=fold)
