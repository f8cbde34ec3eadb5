#!/usr/bin/env python3
r"""What a model's embeddings know: a linear probe from embeddings to your labels, judged on held-out proteins.

python probe.py --model_name_or_path out/final_model --fasta proteins.fasta --labels labels.csv --output_dir probed
python probe.py --embeddings embedded --fasta proteins.fasta --labels labels.csv --output_dir probed

The second one reads what embed.py wrote for that file. labels.csv has a row a protein: its `id` in the FASTA file and
its `label`, a number or a class. With --per_residue (of embed.py, too) the label is a string of a class letter a
residue, or numbers separated by blanks (`.` is none), or the column `position` says of which residue it is.
OUTPUT_DIR gets predictions.csv, results.json and the probe, which predict.py takes. docs/after.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import csv
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.cli import run
from common.files.content_hash import content_hash
from common.flags import flat, parse_arguments
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.labelled_embeddings import labelled_embeddings, source_of
from extras.after.downstream.metrics import about_intervals, shown
from extras.after.downstream.outputs import Manifest, Output, claimed
from extras.after.downstream.probe_fits import PARTS, Evaluation, chosen_probe, evaluate, with_folds
from extras.after.downstream.probe_flags import ProbeFlags
from extras.after.downstream.probes import Examples, Labelled, contradicting, examples_of
from extras.after.downstream.results import RESULTS, to_open
from extras.after.downstream.saved_probe import PROBE, SavedProbe, Source, saved_probe, write_probes
from extras.after.downstream.stock_model import config_for_proteins
from extras.after.inference.embedded import facts_of, parts_of
from extras.after.inference.exported import exported
from extras.prepare.relatives import say_relatives

logger = logging.getLogger(__name__)
PREDICTIONS = "predictions.csv"
FILES = ("fasta", "labels", "cluster_table")


def shown_parts(results: dict[str, Any], named: str = "") -> list[str]:
    """Lines of a table, a metric each. named: what stands before its name."""
    return [
        f"{f'{named} {name}'.strip():18}" + "".join(shown(results[part][name]).rjust(26) for part in PARTS)
        for name in results["probe"]
    ]


def identity(args: ProbeFlags) -> dict[str, Any]:
    """What decides the result: the flags, and the content of model and data."""
    free = {"output_dir", "overwrite", "use_cpu", "model_name_or_path", "embeddings", "count_relatives", "proteins"}
    free |= {*FILES}
    flags = {name: value for name, value in asdict(args).items() if name not in free}
    flags["label_column"] = args.columns[0] if len(args.columns) == 1 else args.columns  # as in earlier outputs
    if args.folds is None:
        del flags["folds"]
    if args.embeddings:
        flags["embeddings"] = facts_of(parts_of(args.embeddings)[0])
    else:
        flags["model"] = model_hash(str(args.model_name_or_path))
    return (
        {"script": "probe.py"}
        | flags
        | args.proteins.given
        | {name: content_hash(getattr(args, name)) for name in FILES if getattr(args, name)}
    )


def related(proteins: list[Labelled], examples: Examples, about: list[dict[str, Any]]) -> dict[str, Any]:
    """As `say_relatives`, of the held-out proteins and the others."""
    held_out = {about[place]["id"] for place in np.flatnonzero(examples.test)}
    test, others = (
        [each.sequence for each in proteins if (each.name in held_out) == is_test] for is_test in (True, False)
    )
    return say_relatives(test, others)


class Task(NamedTuple):
    """A column of labels: what its probe was fitted to and how it did. about: as of `examples_of`; results: for
    results.json; line: about them, for the log."""

    column: str
    examples: Examples
    about: list[dict[str, Any]]
    evaluation: Evaluation
    results: dict[str, Any]
    line: str

    def rows(self) -> Iterator[dict[str, Any]]:
        """Of predictions.csv."""
        labels, fold = self.examples.labels, self.examples.fold
        found = self.evaluation.outputs.predictions.tolist()
        for place, prediction in zip(self.evaluation.places.tolist(), found, strict=True):
            row = self.about[place] | {"label": labels[place], "prediction": prediction}
            yield row if fold is None else row | {"fold": fold[place] + 1}

    def saved(self, probe: str | None) -> SavedProbe:
        kind, of_all = chosen_probe(self.examples, probe), self.examples.fold is not None
        count = len(self.examples.labels) if of_all else self.results["counts"]["train"]
        return saved_probe(self.column, kind, self.evaluation, "all" if of_all else "train", count)


def task_of(args: ProbeFlags, column: str, proteins: list[Labelled], embedded: list[np.ndarray | None]) -> Task:
    """Fit and evaluate."""
    where = f"--labels {args.labels}" + (f" ({column})" if len(args.columns) > 1 else "")
    examples, about = examples_of(proteins, embedded, args.probe, where, args.folds)
    more: dict[str, Any] = {"contradicting_labels": contradicting(proteins, examples, about, where)}
    if args.folds:
        examples = with_folds(examples, args.folds, where)
    else:
        more["relatives"] = related(proteins, examples, about) if args.count_relatives else None
    evaluation = evaluate(examples, args.probe)
    held_out = len(evaluation.places)
    counts = {"train": len(examples.labels) - (0 if args.folds else held_out), "test": held_out}
    over = "clusters" if args.clustering.given else "proteins"
    groups = len(set(examples.groups[evaluation.places].tolist()))
    intervals = {"over": over, "test": groups}
    line = f"Trained on {counts['train']:,} labels, evaluated on {held_out:,}"
    if args.folds:
        line = f"{args.folds} folds: each of {held_out:,} labels is held out once; the saved probe is fitted to all"
    line = f"{line}; {about_intervals(over, {'held-out': groups})}"
    results = evaluation.results | {"counts": counts, "intervals": intervals} | more
    return Task(column, examples, about, evaluation, results, line)


def write(args: ProbeFlags, output: Output, tasks: list[Task], source: Source) -> None:
    """Predictions, results and probes."""
    several = len(tasks) > 1
    names = dict.fromkeys(name for task in tasks for name in next(task.rows()))
    hashes = {name: content_hash(getattr(args, name)) for name in ("fasta", "labels")}
    results = {"tasks": {task.column: task.results for task in tasks}} if several else tasks[0].results
    with output.replaced() as partial:
        with (partial / PREDICTIONS).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["label_column", *names] if several else [*names])
            writer.writeheader()
            for task in tasks:
                writer.writerows({"label_column": task.column} | row if several else row for row in task.rows())
        content = results | {"arguments": flat(args), "hashes": hashes}
        (partial / RESULTS).write_text(json.dumps(content, indent=2) + "\n")
        write_probes(partial / PROBE, source, [task.saved(args.probe) for task in tasks])
    print("".join([f"{'':18}", *(part.rjust(26) for part in PARTS)]))
    for task in tasks:
        print("\n".join(shown_parts(task.results, task.column if several else "")))
    for task in tasks:
        logger.info("%s%s", f"{task.column}: " if several else "", task.line)
    logger.info("Written: %s", to_open(output.directory))


def main() -> None:
    args = parse_arguments(__doc__, ProbeFlags)
    directory = Path(str(args.output_dir))
    inputs = {f"--{name}": getattr(args, name) for name in ("model_name_or_path", "embeddings", *FILES)}
    earlier = Manifest.of_earlier(directory, "probe", PREDICTIONS)
    with ExitStack() as stack:
        model = args.model_name_or_path and exported(args.model_name_or_path, stack)
        if model:
            config_for_proteins(model)
        read = replace(args, model_name_or_path=model)
        made_from = identity(read)
        output = stack.enter_context(claimed(directory, inputs, made_from, args.overwrite, earlier))
        if output is not None:
            labels = labelled_embeddings(read)
            tasks = [task_of(args, column, *found) for column, found in labels.items()]
            source = source_of(read, "position" in tasks[0].about[0])
            write(args, output, tasks, replace(source, model=args.model_name_or_path))


if __name__ == "__main__":
    run(main)
