"""Labels of proteins and of residues, from a CSV file to a model's targets."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS, UNK, encode
from extras.after.downstream.groups import Clustering, groups_of
from extras.after.downstream.metrics import log_undefined
from extras.after.downstream.splits import SPLITS, check_sides, given_splits, split_of
from extras.after.inference.mutation_tables import is_missing
from extras.after.inference.mutation_tables import read_rows as read_table
from extras.prepare.sources.proteins import ProteinFlags, clean_texts, read_proteins

logger = logging.getLogger(__name__)
TASKS = ("regression", "classification", "token_regression", "token_classification")
NO_LABEL = (".", "-")  # of a residue, in a string
IGNORE = -100  # the class of a residue without a label


@dataclass(frozen=True)
class Example:
    """name: an id, or the row of the file; ids: uint8 [L + 2]; target: a float or the index of a class; of residues
    float64 [L] or int64 [L], NaN or IGNORE where there is no label; split: of `SPLITS`; group: the cluster, or the
    sequence, which is in one split whole and which intervals are over."""

    name: str
    ids: np.ndarray
    target: Any
    split: str
    group: str

    @property
    def residues(self) -> str:
        return "".join(TOKENS[number] if number != UNK else "X" for number in self.ids[1:-1].tolist())

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
            hint = ": give --label_column" if name == "label" else ""
            raise UserError(f"{where}: no column {name!r}, only {', '.join(map(repr, names))}"[:300] + hint)
    return [row | {"line": str(line)} for line, row in enumerate(rows, 2)]


def separated(label: str) -> list[str]:
    return label.replace(",", " ").split()


def words_of(label: str) -> list[str]:
    """The labels of residues: separated by blanks or commas, else a letter each."""
    words = separated(label)
    return words if len(words) > 1 else list(label)


def is_absent(word: str) -> bool:
    """Whether the label of a residue is none."""
    return word in NO_LABEL or is_missing(word)


def has_label(label: str, residues: int = 0) -> bool:
    """residues: of the protein, where labels are of residues: `NA` of two residues is then two letters."""
    words = words_of(label.strip())
    letters = residues > 0 and len(words) == residues
    return (letters or not is_missing(label)) and not all(map(is_absent, words))


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def class_names(words: Iterable[str]) -> dict[str, str]:
    """{label: its class}. Where all labels are integers, 1 and 1.0 are one class: pandas writes integers as floats if
    one is missing."""
    words = set(words)
    integers = all(is_number(word) and float(word).is_integer() for word in words)
    return {word: _integer(word) if integers else word for word in words}


def _integer(word: str) -> str:
    return re.sub(r"\.0*$", "", word)


def is_regression(words: Sequence[str], asked: bool | None, where: str, to_classify: str) -> bool:
    """Whether labels are numbers, not classes; by default, if all are numbers other than 0 and 1.

    asked: what the user says; to_classify: the flag that makes classes of numbers. UserError if labels are not
    numbers where a regression is asked for, or most of them are.
    """
    if asked is False:
        return False
    if commas := [word for word in words if re.fullmatch(r"-?\d+,\d+", word)]:
        raise UserError(
            f"{where}: {commas[0]!r} has a decimal comma: write it with a point; or, for classes, {to_classify}"
        )
    strange = [word for word in words if not is_number(word)]
    if strange and (asked or 2 * len(strange) < len(words)):
        raise UserError(f"{where}: {strange[0][:40]!r} is not a number: correct it; or, for classes, {to_classify}")
    return bool(asked) or not (strange or set(class_names(words).values()) <= {"0", "1"})


def are_of_residues(sequences: Sequence[str], labels: Sequence[str], asked: str | None) -> bool:
    """Whether most labels have a word a residue, unless asked for."""
    fitting = sum(len(words_of(label)) == len(s) for s, label in zip(sequences, labels, strict=True))
    return asked.startswith("token_") if asked else 2 * fitting > len(labels)


def task_of(sequences: Sequence[str], labels: Sequence[str], asked: str | None, where: str = "labels") -> TaskSpec:
    """The task, from the labels unless asked for.

    Letters of residues, which no blank or comma separates, are classes even where they are digits.
    """
    of_residues = are_of_residues(sequences, labels, asked)
    words = [w for label in labels for w in (words_of(label) if of_residues else [label]) if not is_absent(w)]
    letters = of_residues and all(len(separated(label)) == 1 for label in labels)
    numbers = asked.endswith("regression") if asked else False if letters else None
    kind = "token_classification" if of_residues else "classification"
    regression = is_regression(words, numbers, where, f"--problem_type {kind}")
    classes = () if regression else tuple(sorted(set(class_names(words).values())))
    if not regression and len(classes) < 2:
        raise UserError(f"{where}: one class alone, {min(classes, default='')[:40]!r}: a classification needs two")
    return TaskSpec(kind.replace("classification", "regression") if regression else kind, classes)


def target_of(task: TaskSpec, sequence: str, label: str, where: str) -> Any:
    """A label as a float or the index of a class; of residues float64 [L] or int64 [L], NaN or IGNORE where absent.

    UserError, which begins with `where`, if it does not fit the sequence.
    """
    numbers = {name: number for number, name in enumerate(task.classes)}

    def of_word(word: str) -> float:
        return (numbers[word] if word in numbers else numbers[_integer(word)]) if numbers else float(word)

    if not task.of_residues:
        return of_word(label)
    words = words_of(label)
    if len(words) != len(sequence):
        raise UserError(f"{where}: {len(words)} labels for {len(sequence)} residues")
    none = IGNORE if numbers else math.nan
    return np.array([none if is_absent(word) else of_word(word) for word in words])


def place_of(row: dict[str, str], where: str) -> str:
    return f"{where}, row {row['line']}"


def usable_rows(
    rows: Sequence[dict[str, str]],
    sequences: Sequence[str],
    label_column: str,
    split_column: str | None,
    asked: str | None,
    where: str,
) -> tuple[list[dict[str, str]], list[str] | None]:
    """(the rows with a label, a sequence and a split, their splits or None as of `given_splits`); the others are
    counted in a log line. sequences: of the rows, "" where there is none; asked: as of `task_of`. UserError if no row
    is left."""
    pairs = [(sequence, row[label_column]) for sequence, row in zip(sequences, rows, strict=True)]
    clear = [pair for pair in pairs if pair[0] and has_label(pair[1])]
    of_residues = are_of_residues([sequence for sequence, _ in clear], [label for _, label in clear], asked)
    with_label = [has_label(label, len(sequence) if of_residues else 0) for sequence, label in pairs]
    complete = [row for row, pair, known in zip(rows, pairs, with_label, strict=True) if known and pair[0]]
    if not complete:
        raise UserError(f"{where}: no row has a label")
    splits = given_splits(complete, split_column, [place_of(row, where) for row in complete])
    usable = [row for row, split in zip(complete, splits, strict=True) if split] if splits else complete
    if not usable:
        raise UserError(f"{where}: no row with a label has a split")
    known, all_rows = sum(with_label), len(rows)
    counts = {"label": all_rows - known, "sequence": known - len(complete), "split": len(complete) - len(usable)}
    if left_out := sum(counts.values()):
        lacking = ", ".join(f"{count:,} without a {what}" for what, count in counts.items() if count)
        logger.warning("%s: %s of %s rows are left out: %s", where, f"{left_out:,}", f"{all_rows:,}", lacking)
    return usable, [split for split in splits if split] if splits else None


def sequences_of(
    rows: Sequence[dict[str, str]],
    label_column: str,
    fasta: str | None,
    where: str,
    id_column: str = "id",
    flags: ProteinFlags | None = None,
) -> list[str]:
    """The normalised residues of each row: of its id in a FASTA file, else its column `sequence`; "" if it has none.

    A row without a label may have any text or id; words like NA are no sequence. flags: of gaps and bad records.
    UserError for an unknown id, for text that is no protein, and for a
    `sequence` that is not that of the id.
    """
    proteins, sequences = read_proteins(fasta, flags=flags) if fasta else {}, []
    known = [(row.get("sequence", "").strip(), row[label_column]) for row in rows]
    texts = ["" if is_missing(text) or not has_label(label, len(text)) else text for text, label in known]
    own = clean_texts(texts, where, [f"row {row['line']}" for row in rows], flags)
    if not fasta:
        return own
    for row, sequence in zip(rows, own, strict=True):
        name, place = row[id_column], place_of(row, where)
        if name not in proteins and has_label(row[label_column]):
            raise UserError(f"{place}: {name[:40]!r} is not in {fasta}: correct the id, or leave the row out")
        of_id = proteins.get(name, "")
        if sequence not in ("", of_id):
            raise UserError(f"{place}: `sequence` is not that of {name[:40]!r} in --fasta: remove one of them")
        sequences.append(of_id)
    return sequences


def check_length(sequences: Sequence[str], places: Sequence[str], longest: int) -> None:
    """UserError for a sequence of more than `longest` residues."""
    most, place = max(zip(map(len, sequences), places, strict=True), key=lambda pair: pair[0])
    if most > longest:
        raise UserError(
            f"{place}: the longest sequence has {most:,} residues: give --max_seq_length {most + 2}, or cut what is "
            f"longer than {longest:,}"
        )


def drawn_splits(groups: Sequence[str], given: list[str] | None, sizes: tuple[float, float]) -> list[str]:
    """The split of each row: as in the table, or by a hash of its group (`split_of`). A table that has splits but no
    "validation" gives part of its "train"."""
    if given is None:
        return [split_of(group, sizes) for group in groups]
    if "validation" in given:
        return given
    drawn = [split_of(group, (sizes[0], 0.0)) for group in groups]
    return [one if word == "train" else word for word, one in zip(given, drawn, strict=True)]


def check_sizes(given: list[str] | None, flags: Sequence[str], where: str) -> None:
    """UserError for one of --validation_size and --test_size that does nothing, as the table has splits."""
    idle = [] if given is None else ["--test_size", *(["--validation_size"] if "validation" in given else [])]
    if named := [flag for flag in flags if flag in idle]:
        raise UserError(f"{' and '.join(named)}: no effect, as {where} has splits: leave it out")


def read_examples(
    path: str,
    fasta: str | None = None,
    label_column: str = "label",
    problem_type: str | None = None,
    sizes: tuple[float, float] = (0.1, 0.2),
    longest: int = 1022,
    cluster_column: str | None = None,
    cluster_table: str | None = None,
    cluster: float | None = None,
    split_column: str | None = None,
    flags: Sequence[str] = (),
    proteins: ProteinFlags | None = None,
) -> tuple[TaskSpec, list[Example]]:
    """The task and the labelled proteins of a CSV file; sequences are in its column `sequence` or in a FASTA file.

    Splits as of `given_splits`; rows whose field is empty are left out. Without them, and for the validation split
    that they lack, `split_of`. longest: residues of a sequence; cluster_column, cluster_table, cluster: as of
    `Clustering`; flags: of --validation_size and --test_size those that the user gave; proteins: as of
    `sequences_of`. UserError, naming the row, for what does not fit; for a sequence or cluster in two splits; for a
    split without labels, or with a class that is not trained on; for one of `flags` that has no effect.
    """
    where, clustering = f"--dataset {path}", Clustering(cluster_column, cluster_table, cluster)
    needed = ("id",) if fasta else ("id", "sequence") if cluster_table else ("sequence",)
    wanted = (label_column, *needed, cluster_column, split_column)
    rows = read_rows(path, where, [name for name in wanted if name])
    rows = [{name: value.strip() for name, value in row.items()} for row in rows]
    sequences = sequences_of(rows, label_column, fasta, where, flags=proteins)
    rows = [row | {"sequence": sequence} for row, sequence in zip(rows, sequences, strict=True)]
    rows, table_splits = usable_rows(rows, sequences, label_column, split_column, problem_type, where)
    places, sequences = [place_of(row, where) for row in rows], [row["sequence"] for row in rows]
    check_length(sequences, places, longest)
    task = task_of(sequences, [row[label_column] for row in rows], problem_type, where)
    groups = groups_of(clustering, rows, sequences, [row.get("id", "") for row in rows])
    check_sizes(table_splits, flags, where)
    splits = drawn_splits(groups, table_splits, sizes)
    check_sides(sequences, groups, splits, places)
    examples = [
        Example(
            row.get("id") or f"row {row['line']}",
            encode(sequence),
            target_of(task, sequence, row[label_column], place),
            split,
            group,
        )
        for row, sequence, place, split, group in zip(rows, sequences, places, splits, groups, strict=True)
    ]
    check_splits(task, examples, where)
    return task, examples


def contradictions(items: Iterable[tuple[Hashable, int | None, str, Any]], where: str) -> dict[str, Any]:
    """{"proteins": number of proteins with contradicting labels, "first": those of one}, for results.json; a log line
    if there are any. items: (protein, residue from 1 or None, name, label) of each label."""
    known: dict[tuple[Hashable, int | None], tuple[str, Any]] = {}
    contradicting: dict[Hashable, str] = {}
    for protein, place, name, label in items:
        first, before = known.setdefault((protein, place), (name, label))
        if before != label and protein not in contradicting:
            residue = "" if place is None else f" at residue {place}"
            contradicting[protein] = f"{first[:40]!r} {before}, {name[:40]!r} {label}{residue}"
    one = next(iter(contradicting.values()), None)
    if contradicting:
        logger.warning("%s: %s proteins have contradicting labels: %s", where, f"{len(contradicting):,}", one)
    return {"proteins": len(contradicting), "first": one}


def label_items(task: TaskSpec, examples: Sequence[Example]) -> Iterator[tuple[Hashable, int | None, str, Any]]:
    """(protein, residue from 1 or None, name, label) of each label, for `contradictions`; the protein: its ids."""
    for each in examples:
        protein = each.ids.tobytes()
        for place, target in enumerate(np.atleast_1d(each.target).tolist(), 1):
            if target != IGNORE if task.classes else not math.isnan(target):
                label = task.classes[target] if task.classes else target
                yield protein, place if task.of_residues else None, each.name, label


def check_splits(task: TaskSpec, examples: Sequence[Example], where: str) -> None:
    """UserError for a split without labels, for labels that train does not have, and for a single one in train."""
    labels, groups = {}, {}
    for name in SPLITS:
        of_split = [each for each in examples if each.split == name]
        if not of_split:
            raise UserError(f"{where}: no protein of the {name} split: give more, or change the sizes of the splits")
        values = set(np.concatenate([each.labelled() for each in of_split]).tolist())
        labels[name] = {task.classes[value] for value in values} if task.classes else values
        groups[name] = len({each.group for each in of_split})
    if len(labels["train"]) < 2:
        raise UserError(f"{where}: all labels of the train split are {min(labels['train'])!r:.40}: nothing to learn")
    for name in SPLITS[1:]:
        if task.classes and (new := sorted(labels[name] - labels["train"])):
            raise UserError(
                f"{where}: the class {new[0][:40]!r} of the {name} split is not in train: leave "
                "its rows out, or give more of them"
            )
        log_undefined(where, name, labels[name], groups[name])
