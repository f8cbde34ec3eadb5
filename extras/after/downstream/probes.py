"""What probes are fitted to: labelled proteins and residues with their embeddings, and a plain baseline of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.cli import UserError
from extras.after.downstream.labels import (
    class_names,
    contradictions,
    is_absent,
    is_regression,
    place_of,
    words_of,
)
from extras.after.downstream.metrics import log_undefined
from extras.after.downstream.splits import check_sides, split_of
from extras.after.inference.mutation_scores import RESIDUES

PROBES = ("ridge", "linear", "logistic", "gp")
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
    cluster, a protein); test, validation: bool [N], whether held out, and whether to choose the regularisation on;
    fold: int [N], of --folds, where each is held out once."""

    features: np.ndarray
    baseline: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    test: np.ndarray
    validation: np.ndarray
    fold: np.ndarray | None = None

    @property
    def held_out(self) -> list[np.ndarray]:
        """Of each fit the examples that it does not see, bool [N]."""
        return [self.test] if self.fold is None else [self.fold == n for n in range(self.fold.max() + 1)]


def examples_of(
    rows: Sequence[Labelled],
    embedded: Sequence[np.ndarray | None],
    probe: str | None,
    where: str,
    folds: int | None = None,
) -> tuple[Examples, list[dict[str, Any]]]:
    """(the examples, {"id", "position" of a residue} of each). UserError names the first row that does not fit.

    embedded: float32 [hidden], or per residue [L, hidden], of each row; None: not known yet, one of a protein. folds:
    none is held out yet (`with_folds`).
    """
    features, baseline, texts, groups, splits, about = [], [], [], [], [], []
    for row, embedding in zip(rows, embedded, strict=True):
        split = "train" if folds else row.split or split_of(row.group, (0.0, TEST_SHARE))
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
    if not folds:
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
