#!/usr/bin/env python3
r"""Fine-tune a model for your labels, of proteins or of their residues: LoRA adapters by peft, or all weights.

python finetune.py --model_name_or_path out/final_model --dataset labels.csv --output_dir tuned

labels.csv has columns `sequence` and `label`: a number or a class a protein, or a label a residue, as a string of
letters or numbers separated by blanks (`.`: none). A column `split` (train, validation, test) is used, or FLIP's `set`
and `validation`. TUNED/model is a stock adapter (or model); results.json and predictions.csv are of held-out proteins.
docs/after.md has more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import csv
import logging
import math
import signal
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import StoppedBySignal, UserError, run
from common.files.content_hash import content_hash
from common.files.runs import final_model_of
from common.files.safe_files import read_json, replace_directory, replace_flushed, write_json
from common.flags import parse_arguments
from common.models.family import encoder_family
from common.models.layers.hf_directory import model_hash
from extras.after.downstream.adapters import BASE_HASH
from extras.after.downstream.calibration import calibration, probabilities_of, temperature_of
from extras.after.downstream.conformal import scores_of_classes, scores_of_numbers
from extras.after.downstream.finetuning import FineTuning
from extras.after.downstream.labels import Example, TaskSpec, contradictions, label_items, read_examples
from extras.after.downstream.metrics import about_intervals, shown, with_intervals
from extras.after.downstream.outputs import Manifest, Output, claimed, writing
from extras.after.downstream.results import RESULTS
from extras.after.downstream.splits import SPLITS
from extras.after.downstream.stock_model import config_for_proteins
from extras.after.downstream.tuned_card import card_of
from extras.after.downstream.tuned_model import (
    CALIBRATION,
    MODEL,
    make_model,
    targets_of,
    write_calibration,
    write_whole,
)
from extras.after.downstream.tuning_flags import LORA, SIZES, TuningFlags
from extras.after.inference.exported import is_checkpoint
from extras.prepare.relatives import say_relatives

logger = logging.getLogger(__name__)
RESAMPLES = 200  # of the held-out proteins, for the intervals
STATE, PREDICTIONS = "state.pt", "predictions.csv"
WRITTEN = (STATE, PREDICTIONS, RESULTS, MODEL, CALIBRATION)
MADE_FROM = "made_from.json"  # of earlier versions
SCRIPT = "finetune.py"
Row = tuple[str, int | str, Any, Any]  # protein, residue or "", label, prediction


def evaluate(tuning: FineTuning, split: str) -> tuple[dict[str, Any], list[Row], np.ndarray]:
    """({"loss", metric: [value, low, high], "baseline": {metric: value}}, a row for each label, its logits [N, C]).

    The baseline predicts the mean, or the commonest class, of the training labels.
    """
    task = tuning.task
    loss, logits = tuning.predict(split)
    rows: list[Row] = []
    groups, of_rows = [], []
    for each, output in zip(tuning.split[split], logits, strict=True):
        outputs = output if task.of_residues else output[None]
        for place, (target, values) in enumerate(zip(np.atleast_1d(each.target), outputs, strict=True), 1):
            if (target < 0) if task.classes else math.isnan(target):
                continue
            label, guess = (
                (task.classes[target], task.classes[values.argmax()])
                if task.classes
                else (float(target), float(values[0]))
            )
            rows.append((each.name, place if task.of_residues else "", label, guess))
            groups.append(each.group)
            of_rows.append(values)
    labels, guesses = (np.array([row[n] for row in rows]) for n in (2, 3))
    trained = np.concatenate([each.labelled() for each in tuning.split["train"]])
    plain = task.classes[np.bincount(trained).argmax()] if task.classes else trained.mean()
    outputs = np.stack(of_rows)
    two = outputs[:, 1] - outputs[:, 0] if len(task.classes) == 2 else None
    found = with_intervals(labels, guesses, two, np.array(groups), RESAMPLES)
    baseline = with_intervals(labels, np.full(len(rows), plain), None, np.array(groups), 0)
    values = {name: value for name, (value, _, _) in baseline.items() if value is not None}
    return {"loss": loss, **found, "baseline": values}, rows, outputs


def calibrated(task: TaskSpec, validation: tuple, test: tuple) -> tuple[np.ndarray, float, dict[str, Any]]:
    """(how wrong each prediction of the test split is, as of conformal.py, the temperature of the validation split,
    {"calibration": ...} of classes for results.json). validation, test: of `evaluate`, rows and logits."""
    rows, logits = test
    if not task.classes:
        labels, guesses = (np.array([row[n] for row in rows]) for n in (2, 3))
        return scores_of_numbers(labels, guesses), 1.0, {}
    truth = [np.array([task.classes.index(row[2]) for row in of_split]) for of_split, _ in (validation, test)]
    temperature = temperature_of(validation[1], truth[0])
    found = {"temperature": temperature} | calibration(logits, truth[1], temperature)
    return scores_of_classes(probabilities_of(logits, temperature), truth[1]), temperature, {"calibration": found}


def write(
    tuning: FineTuning,
    args: TuningFlags,
    output: Output,
    results: dict[str, Any],
    rows: list[Row],
    scores: np.ndarray,
    temperature: float,
) -> None:
    """The model, the predictions and the results, then the manifest, which says that all is there. scores,
    temperature: of `calibrated`."""
    directory, model = output.directory, tuning.model
    family = encoder_family(str(args.model_name_or_path))
    with replace_directory(directory / MODEL) as partial:
        if args.full:
            write_whole(partial, str(args.model_name_or_path), model)
        else:
            model.save_pretrained(partial, save_embedding_layers=False)  # True: peft would ask the Hub for its size
            setattr(model.config, BASE_HASH, output.made_from["model"])
        model.config.save_pretrained(partial)  # with the classes' names; an adapter's own files have neither
        family.adapter.write_tokenizer(partial)
        lora_r = None if args.full else args.value("lora_r")
        (partial / "README.md").write_text(card_of(family, tuning.task, results, lora_r), encoding="utf-8")
    with replace_flushed(directory / PREDICTIONS) as path, path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("protein", "residue", "label", "prediction"), *rows])
    with replace_flushed(directory / CALIBRATION) as path:
        write_calibration(path, scores, temperature)
    write_json(directory / RESULTS, results)
    output.finish(*WRITTEN[1:])
    (directory / STATE).unlink(missing_ok=True)


def table_of(results: dict[str, Any]) -> str:
    lines = [f"{'':18}{'validation':>24}{'test':>24}{'baseline (test)':>24}"]
    baseline = results["test"]["baseline"]
    for name in results["test"]:
        if name not in ("loss", "baseline"):
            parts = (results[split].get(name) for split in SPLITS[1:])
            cells = [shown(part) for part in parts]
            cells.append(f"{baseline[name]:.3f}" if name in baseline else "-")
            lines.append(f"{name:18}" + "".join(f"{cell:>24}" for cell in cells))
    return "\n".join(lines)


def identity(args: TuningFlags) -> dict[str, Any]:
    """What decides the result: the flags, and the content of model and data."""
    files = ("dataset", "fasta", "cluster_table")
    free = {"output_dir", "overwrite", "use_cpu", "save_steps", "model_name_or_path", "count_relatives", *files}
    flags = {each.name: getattr(args, each.name) for each in fields(args) if each.name not in {"proteins", *free}}
    for name in ("cluster_column", "cluster", "split_column"):
        if flags[name] is None:
            del flags[name]  # as in the outputs of earlier versions
    flags |= {name: args.value(name) for name in (*SIZES, *LORA)}
    data = {name: content_hash(getattr(args, name)) for name in files if getattr(args, name)}
    flags |= {"script": SCRIPT, "target_modules": targets_of(args)}
    return flags | args.proteins.given | {"model": model_hash(str(args.model_name_or_path))} | data


def earlier_output(output: Path) -> Manifest | None:
    """What a version without manifests left there."""
    try:
        made_from = read_json(output / MADE_FROM)
    except (OSError, ValueError):
        return None
    there = {name: None for name in (MADE_FROM, *WRITTEN) if (output / name).exists()}
    return Manifest({"script": SCRIPT} | made_from, RESULTS in there, there)


def train(tuning: FineTuning, saved: Path) -> None:
    """To the end. SIGTERM and Ctrl-C save first; a second one does not wait for that."""
    stops: list[int] = []

    def stop(number: int, _: Any) -> None:
        stops.append(number)
        signal.signal(number, before[number])

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    finished = tuning.run(saved, lambda: bool(stops))
    for number, handler in before.items():
        signal.signal(number, handler)
    if not finished:
        logger.info("Saved after step %d of epoch %d", tuning.progress.step, tuning.progress.epoch + 1)
        raise StoppedBySignal if signal.SIGTERM in stops else KeyboardInterrupt


def main() -> None:
    args = parse_arguments(__doc__, TuningFlags)
    args.model_name_or_path = final_model_of(str(args.model_name_or_path))
    path = Path(name := args.model_name_or_path)
    if is_checkpoint(path) and not list(path.glob("model*.safetensors")):  # those of --save_hf
        raise UserError(f"--model_name_or_path {name}: export it first: python -m extras.export {name} OUT")
    config_for_proteins(name)
    task, examples = read_examples(
        str(args.dataset),
        args.fasta,
        args.label_column,
        args.problem_type,
        (args.value("validation_size"), args.value("test_size")),
        args.max_seq_length - 2,
        args.cluster_column,
        args.cluster_table,
        args.cluster,
        args.split_column,
        [f"--{name}" for name in SIZES if getattr(args, name) is not None],
        args.proteins,
    )
    contradicting = contradictions(label_items(task, examples), f"--dataset {args.dataset}")
    output = Path(str(args.output_dir))
    files = ("model_name_or_path", "dataset", "fasta", "cluster_table")
    inputs = {f"--{name}": getattr(args, name) for name in files}
    with claimed(output, inputs, identity(args), args.overwrite, earlier_output(output)) as claim:
        if claim is not None:
            tune(args, task, examples, contradicting, claim)


def tune(
    args: TuningFlags, task: TaskSpec, examples: list[Example], contradicting: dict[str, Any], output: Output
) -> None:
    """Train, evaluate and write, from where a stopped run of the same command was."""
    counts = {name: sum(each.split == name for each in examples) for name in SPLITS}
    classes = f" of {len(task.classes)} classes" if task.classes else ""
    shown = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    logger.info("%s%s (--problem_type): %s", task.name.replace("_", " "), classes, shown)
    sides = {name: [each.residues for each in examples if each.split == name] for name in SPLITS}
    related = say_relatives(sides["test"], sides["train"]) if args.count_relatives else None
    model = make_model(args, task)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
    with writing(output.directory):
        output.begin(*WRITTEN)
    tuning = FineTuning(
        model.to(device),
        task,
        examples,
        device,
        learning_rate=args.learning_rate or (1e-4 if args.full else 1e-3),
        epochs=args.num_train_epochs,
        batch_size=args.batch_size,
        tokens_per_batch=args.tokens_per_batch,
        weight_decay=args.weight_decay,
        warmup=args.warmup_ratio,
        max_grad_norm=args.max_grad_norm,
        patience=args.patience,
        seed=args.seed,
        bf16=args.bf16,
        save_steps=args.save_steps,
    )
    trained = sum(p.numel() for p in tuning.trained.values())
    logger.info("Training %s of %s weights", f"{trained:,}", f"{sum(p.numel() for p in model.parameters()):,}")
    state = output.directory / STATE
    if state.is_file():
        tuning.load(state)
    train(tuning, state)
    tuning.restore_unit()
    (validation, *validated), (test, *tested) = (evaluate(tuning, name) for name in ("validation", "test"))
    scores, temperature, more = calibrated(task, tuple(validated), tuple(tested))
    over = "clusters" if args.cluster_column or args.cluster_table or args.cluster else "proteins"
    groups = {name: len({each.group for each in tuning.split[name]}) for name in SPLITS[1:]}
    results = {
        "task": task.name,
        "classes": task.classes,
        "counts": counts,
        "intervals": {"over": over} | groups,
        "contradicting_labels": contradicting,
        "relatives": related,
        "best_epoch": tuning.progress.best_epoch,
        "validation": validation,
        "test": test,
        "history": tuning.progress.history,
        **more,
        "made_from": output.made_from,
    }
    with writing(output.directory):
        write(tuning, args, output, results, tested[0], scores, temperature)
    print(table_of(results))
    logger.info("Best after epoch %d; %s", tuning.progress.best_epoch, about_intervals(over, groups))
    logger.info("Written: %s", ", ".join(str(output.directory / name) for name in WRITTEN[1:]))


if __name__ == "__main__":
    run(main, resumable=True)
