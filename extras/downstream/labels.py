"""Labels of proteins and of residues, from a CSV file to a model's targets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.cli import UserError
from common.models.esm2.alphabet import encode
from extras.inference.mutation_tables import read_rows as read_table
from extras.sources.fasta import read_fasta

TASKS = ("regression", "classification", "token_regression", "token_classification")
UNLABELLED = {"", ".", "nan"}
IGNORE = -100  # the class of a residue without a label
SPLITS = ("train", "validation", "test")
SHORT = {"val": "validation", "valid": "validation", "dev": "validation"}


@dataclass(frozen=True)
class Example:
    """name: an id, or the line of the file; ids: uint8 [L + 2]; target: a float or the index of a class; of residues
    float64 [L] or int64 [L], NaN or IGNORE where there is no label; split: of `SPLITS`; group: the cluster, or the
    sequence, which is in one split whole and which intervals are over."""

    name: str
    ids: np.ndarray
    target: Any
    split: str
    group: str

    def labelled(self) -> np.ndarray:
        """The labels that there are, one-dimensional."""
        target = np.atleast_1d(self.target)
        return target[target != IGNORE] if target.dtype.kind == "i" else target[np.isfinite(target)]


@dataclass(frozen=True)
class TaskSpec:
    """name: of `TASKS`; classes: their names, () for a regression."""

    name: str
    classes: tuple[str, ...] = ()

    @property
    def of_residues(self) -> bool:
        return self.name.startswith("token_")


def read_rows(path: str, where: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file, each with its number as `line`. UserError if it lacks one of the columns."""
    names, rows = read_table(path, where)
    for name in columns:
        if name not in names:
            raise UserError(f"{where}: no column {name!r}, only {', '.join(map(repr, names))}"[:300])
    return [row | {"line": str(line)} for line, row in enumerate(rows, 2)]


def held_out_number(key: str) -> float:
    """From 0 to 1, by a hash: a protein or cluster is held out if it is below a threshold, whatever else there is."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def separated(label: str) -> list[str]:
    return label.replace(",", " ").split()


def words_of(label: str) -> list[str]:
    """The labels of residues: separated by blanks or commas, else a letter each."""
    words = separated(label)
    return words if len(words) > 1 else list(label)


def is_unlabelled(label: str) -> bool:
    return label.lower() in UNLABELLED or all(word.lower() in UNLABELLED for word in words_of(label))


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def task_of(sequences: Sequence[str], labels: Sequence[str], asked: str | None, where: str = "labels") -> TaskSpec:
    """The task, from the labels unless asked for.

    Of residues if most labels have a word a residue. A regression if all are numbers other than 0 and 1; letters of
    residues, which no blank or comma separates, are classes even where they are digits.
    """
    fitting = sum(len(words_of(label)) == len(s) for s, label in zip(sequences, labels, strict=True))
    of_residues = asked.startswith("token_") if asked else 2 * fitting > len(labels)
    words = {w for label in labels for w in (words_of(label) if of_residues else [label])}
    words = {word for word in words if word.lower() not in UNLABELLED}
    wrong = next((word for word in sorted(words) if not is_number(word)), None)
    letters = of_residues and all(len(separated(label)) == 1 for label in labels)
    regression = asked.endswith("regression") if asked else not (wrong or letters or words <= {"0", "1"})
    if regression and wrong:
        raise UserError(f"--problem_type {asked}: the label {wrong[:40]!r} is not a number")
    if not regression and len(words) < 2:
        raise UserError(f"{where}: one class alone, {min(words, default='')[:40]!r}: a classification needs two")
    name = ("token_" if of_residues else "") + ("regression" if regression else "classification")
    return TaskSpec(name, () if regression else tuple(sorted(words)))


def target_of(task: TaskSpec, sequence: str, label: str, where: str) -> Any:
    """As `Example.target`. UserError, which begins with `where`, if the label does not fit the sequence."""
    if not task.of_residues:
        return task.classes.index(label) if task.classes else float(label)
    words = words_of(label)
    if len(words) != len(sequence):
        raise UserError(f"{where}: {len(words)} labels for {len(sequence)} residues")
    absent = [word.lower() in UNLABELLED for word in words]
    if task.classes:
        return np.array([IGNORE if no else task.classes.index(w) for w, no in zip(words, absent, strict=True)])
    return np.array([math.nan if no else float(word) for word, no in zip(words, absent, strict=True)])


def split_of(group: str, sizes: tuple[float, float]) -> str:
    """By a hash of a sequence or a cluster, so that equal ones stay together. sizes: of validation and test, fractions
    of 1."""
    number, (validation, test) = held_out_number(group), sizes
    return "test" if number < test else "validation" if number < test + validation else "train"


def read_examples(
    path: str,
    fasta: str | None = None,
    label_column: str = "label",
    problem_type: str | None = None,
    sizes: tuple[float, float] = (0.1, 0.2),
    longest: int = 1022,
    cluster_column: str | None = None,
) -> tuple[TaskSpec, list[Example]]:
    """The task and the labelled proteins of a CSV file; sequences are in its column `sequence` or in a FASTA file.

    Where there is a column `split`, it is used; rows whose field is empty are left out. Without one, and for the
    validation split that it lacks, `split_of`. longest: residues of a sequence; cluster_column: of related proteins,
    which one split gets whole. UserError, naming the line, for what does not fit; for a sequence or cluster on two
    sides; for a split without labels, or with a class that is not trained on.
    """
    where = f"--dataset {path}"
    named = (label_column, "id" if fasta else "sequence", cluster_column)
    rows = read_rows(path, where, [name for name in named if name])
    rows = [{name: value.strip() for name, value in row.items()} for row in rows]
    if fasta:
        proteins = {name.decode(): text.decode("latin-1") for name, text in read_fasta(fasta)}
        for row in rows:
            if row["id"] not in proteins:
                raise UserError(f"{where}, line {row['line']}: {row['id'][:40]!r} is not in --fasta {fasta}")
            row["sequence"] = proteins[row["id"]]
    rows = [row for row in rows if row["sequence"] and not is_unlabelled(row[label_column])]
    rows = [row for row in rows if row.get("split") != ""]
    if not rows:
        raise UserError(f"{where}: no row has a label")
    most = max(rows, key=lambda row: len(row["sequence"]))
    if (residues := len(most["sequence"])) > longest:
        raise UserError(
            f"{where}, line {most['line']}: the longest sequence has {residues:,} residues: give --max_seq_length "
            f"{residues + 2}, or cut what is longer than {longest:,}"
        )
    task = task_of([row["sequence"] for row in rows], [row[label_column] for row in rows], problem_type, where)
    given = {SHORT.get(row["split"].lower(), row["split"].lower()) for row in rows if "split" in row}
    examples, sides = [], {}
    for row in rows:
        sequence, place = row["sequence"], f"{where}, line {row['line']}"
        group = (cluster_column and row[cluster_column]) or sequence
        split = split_of(group, sizes)
        if "split" in row:
            word = SHORT.get(row["split"].lower(), row["split"].lower())
            if word not in SPLITS:
                raise UserError(f"{place}: split is {row['split'][:40]!r}: expected {', '.join(SPLITS)}")
            taken = "validation" not in given and split_of(group, (sizes[0], 0.0)) == "validation"
            split = "validation" if word == "train" and taken else word
        for key, same in ((sequence, "same sequence"), (group, f"cluster {group[:40]!r}")):
            if sides.setdefault(key, split) != split:
                raise UserError(f"{place}: the {same} is in the {sides[key]} split, too: put it in one")
        target = target_of(task, sequence, row[label_column], place)
        examples.append(Example(row.get("id") or f"line {row['line']}", encode(sequence), target, split, group))
    check_splits(task, examples, where)
    return task, examples


def check_splits(task: TaskSpec, examples: Sequence[Example], where: str) -> None:
    labels = {name: [e.labelled() for e in examples if e.split == name] for name in SPLITS}
    for name, found in labels.items():
        if not found:
            raise UserError(f"{where}: no protein of the {name} split: give more, or change the sizes of the splits")
    if task.classes:
        trained = set(np.concatenate(labels["train"]).tolist())
        for name in SPLITS[1:]:
            if new := sorted(set(np.concatenate(labels[name]).tolist()) - trained):
                raise UserError(
                    f"{where}: the class {task.classes[new[0]][:40]!r} of the {name} split is not in train"
                )
