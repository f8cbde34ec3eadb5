#!/usr/bin/env python3
r"""Fine-tune a model for your labels, of proteins or of their residues: LoRA adapters by peft, or all weights.

python finetune.py --model_name_or_path out/final_model --dataset labels.csv --output_dir tuned

labels.csv has columns `sequence` and `label`: a number or a class a protein; or a label a residue, as a string of
letters or numbers separated by blanks (`.`: none). A column `split` (train, validation, test) is honoured. TUNED/model
is a stock adapter (or model), results.json and predictions.csv are of held-out proteins. docs/after.md has more.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import csv
import json
import logging
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import UserError, one_line, run
from common.files.json_files import content_hash, read_json, replace_flushed, sync_tree
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.esm2.config import load_config
from common.models.esm2.convert import write_tokenizer
from common.models.layers.hf_directory import local_directory, model_hash
from extras.downstream.finetuning import TASKS, Example, FineTuning, TaskSpec, example_of, task_of
from extras.downstream.probes import is_held_out, with_intervals

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
STATE, MADE_FROM, RESULTS, MODEL = "state.pt", "made_from.json", "results.json", "model"
STOPPED = 75  # exit status: the same command goes on


@dataclass
class Arguments(Flags):
    required = ("model_name_or_path", "dataset", "output_dir")

    model_name_or_path: str | None = flag(None, "A final_model/, any other directory of an ESM-2, or its name.")
    dataset: str | None = flag(None, "A CSV file with the columns sequence and label, and possibly split.")
    output_dir: str | None = flag(None, "Where the model and the results go.")
    problem_type: str | None = flag(None, f"{', '.join(TASKS)}. Default: by the labels.")
    full: bool = flag(False, "Train all weights, not LoRA's.")
    lora_r: int = flag(8, "Rank of LoRA's matrices.")
    lora_alpha: float = flag(16.0, "LoRA's scale times its rank.")
    lora_dropout: float = flag(0.0, "Of LoRA's inputs.")
    target_modules: str = flag("query,key,value", "Matrices that get LoRA's: names in the stock model.")
    learning_rate: float | None = flag(None, "Peak. Default: 1e-3 with LoRA, 1e-4 with --full.")
    num_train_epochs: int = flag(20, "At most so many.")
    patience: int = flag(3, "End after so many epochs without a lower validation loss.")
    batch_size: int = flag(16, "Sequences of a step.")
    tokens_per_batch: int = flag(4096, "Tokens of a forward pass, padding included: more need more memory.")
    max_seq_length: int = flag(1024, "Tokens, <cls> and <eos> included; longer sequences are refused.")
    weight_decay: float = flag(0.01, "Of AdamW.")
    warmup_ratio: float = flag(0.1, "Part of the steps in which the learning rate rises.")
    max_grad_norm: float = flag(1.0, "Largest gradient norm; 0: any.")
    save_steps: int = flag(50, "Steps between saves; also after every epoch.")
    seed: int = flag(42, "Of the new head, LoRA's matrices and the order of the data.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    overwrite: bool = flag(False, "Start anew in OUTPUT_DIR.")

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out/final_model")
        if not self.dataset:
            yield Missing("--dataset", "a CSV file of sequences and labels", "labels.csv")
        if not self.output_dir:
            yield Missing("--output_dir", "where the model goes", "tuned")

    def check(self) -> None:
        self.require_choice("problem_type", (None, *TASKS))
        counts = ("lora_r", "num_train_epochs", "patience", "batch_size", "tokens_per_batch", "save_steps")
        self.require_at_least(1, *counts)
        self.require_above(0, "learning_rate", "lora_alpha")
        self.require_at_least(0, "lora_dropout", "weight_decay", "warmup_ratio", "max_grad_norm", "seed")
        self.require_at_least(8, "max_seq_length")
        if not Path(str(self.dataset)).is_file():
            raise UserError(f"--dataset {self.dataset}: no such file")
        if not self.full and find_spec("peft") is None:
            raise UserError("LoRA needs peft: ./install.sh --finetune; or train all weights with --full")


def split_of(sequence: str) -> str:
    """Where there is no column: a fifth is held out by a hash, so that equal sequences stay together."""
    if not is_held_out(sequence):
        return "train"
    return "test" if is_held_out(f"{sequence} again") or ord(sequence[0]) % 2 else "validation"


def read_examples(args: Arguments) -> tuple[TaskSpec, list[Example]]:
    """UserError for what is no CSV with the columns, a label that does not fit, or a split without labels."""
    where = f"--dataset {args.dataset}"
    try:
        with open(str(args.dataset), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if (row.get("sequence") or "").strip() and (row.get("label") or "").strip()]
            names = list(reader.fieldnames or ())
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a CSV file: {one_line(error)}") from error
    for name in ("sequence", "label"):
        if name not in names:
            raise UserError(f"{where}: no column {name!r}, only {', '.join(map(repr, names))}"[:300])
    sequences, labels = ([row[name].strip() for row in rows] for name in ("sequence", "label"))
    if longer := next((s for s in sequences if len(s) + 2 > args.max_seq_length), None):
        raise UserError(f"{where}: a sequence of {len(longer):,} residues: raise --max_seq_length, or cut it")
    task = task_of(sequences, labels, args.problem_type)
    examples = []
    for number, (row, sequence, label) in enumerate(zip(rows, sequences, labels, strict=True), 2):
        split = row["split"].strip().lower() if "split" in names else split_of(sequence)
        if split not in SPLITS:
            raise UserError(f"{where}, row {number}: split is {split[:40]!r}: expected {', '.join(SPLITS)}")
        examples.append(example_of(task, sequence, label, split, f"{where}, row {number}"))
    for name in SPLITS:
        if not any(each.split == name for each in examples):
            raise UserError(f"{where}: no row of the {name} split: add some, or leave the column out")
    if task.classes:
        known = {c for e in examples if e.split == "train" for c in np.unique(e.target).tolist()}
        held_out = {c for e in examples if e.split != "train" for c in np.unique(e.target).tolist()}
        if new := sorted(held_out - known - {-100}):
            raise UserError(f"{where}: the class {task.classes[new[0]][:40]!r} is in no row of the train split")
    return task, examples


def make_model(args: Arguments, task: TaskSpec) -> Any:
    """Stock transformers' model with a new head, wrapped by peft unless --full."""
    from transformers import EsmForSequenceClassification, EsmForTokenClassification
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    load_config(str(args.model_name_or_path))  # for its error messages
    disable_progress_bar()
    set_verbosity_error()  # that the head is new
    torch.manual_seed(args.seed)
    kind: Any = EsmForTokenClassification if task.of_residues else EsmForSequenceClassification
    labels = dict(enumerate(task.classes or ("value",)))
    model = kind.from_pretrained(
        local_directory(str(args.model_name_or_path)),
        id2label=labels,
        label2id={name: number for number, name in labels.items()},
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
    )
    if args.full:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "contact_head" not in name and "position_embeddings" not in name
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.TOKEN_CLS if task.of_residues else TaskType.SEQ_CLS,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.target_modules.split(","),
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"--target_modules {args.target_modules}: {one_line(error)[:160]}") from error


def evaluate(tuning: FineTuning, split: str) -> tuple[dict[str, Any], list[tuple[int, int, Any, Any]]]:
    """({"loss", metric: [value, low, high], "baseline": {...}}, (example, residue or -1, label, prediction))."""
    task = tuning.task
    loss, logits = tuning.predict(split)
    rows: list[tuple[int, int, Any, Any]] = []
    for number, (each, output) in enumerate(zip(tuning.split[split], logits, strict=True)):
        outputs = output if task.of_residues else output[None]
        targets = np.atleast_1d(np.array(each.target))
        for place, (target, values) in enumerate(zip(targets, outputs, strict=True)):
            if (target == -100) if task.classes else not np.isfinite(target):
                continue
            label = task.classes[int(target)] if task.classes else float(target)
            guess = task.classes[int(values.argmax())] if task.classes else float(values[0])
            rows.append((number, place + 1 if task.of_residues else -1, label, guess))
    labels, guesses, groups = (np.array([row[n] for row in rows]) for n in (2, 3, 0))
    train = np.concatenate([np.atleast_1d(np.array(e.target, dtype=float)) for e in tuning.split["train"]])
    if task.classes:
        counts = np.bincount(train[train >= 0].astype(int), minlength=len(task.classes))
        plain = np.array([task.classes[int(counts.argmax())]] * len(rows))
    else:
        plain = np.full(len(rows), np.nanmean(train))
    found = with_intervals(labels, guesses, None, groups) | {"loss": loss}
    return found | {"baseline": with_intervals(labels, plain, None, groups)}, rows


def write(tuning: FineTuning, args: Arguments, results: dict[str, Any], rows: list[tuple[int, int, Any, Any]]) -> None:
    """The model, then the predictions, then the results, whose file says that all is there."""
    output = Path(str(args.output_dir))
    partial = output / f"{MODEL}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model: Any = tuning.model
    model.save_pretrained(partial)
    write_tokenizer(partial)
    what = "a PEFT adapter (LoRA)" if not args.full else "a model for transformers' from_pretrained"
    (partial / "README.md").write_text(
        f"---\nlibrary_name: {'transformers' if args.full else 'peft'}\nlicense: unknown\ntags:\n- protein\n---\n\n"
        f"# ESM-2, fine-tuned: {tuning.task.name.replace('_', ' ')}\n\nThis directory is {what}.\n"
    )
    sync_tree(partial)
    shutil.rmtree(output / MODEL, ignore_errors=True)
    partial.rename(output / MODEL)
    with replace_flushed(output / "predictions.csv") as path, path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sequence", "residue", "label", "prediction"])
        writer.writerows((number, "" if place < 0 else place, label, guess) for number, place, label, guess in rows)
    with replace_flushed(output / RESULTS) as path:
        path.write_text(json.dumps(results, indent=2) + "\n")
    (output / STATE).unlink(missing_ok=True)


def table_of(results: dict[str, Any]) -> str:
    lines = [f"{'':18}{'validation':>26}{'test':>26}{'baseline (test)':>26}"]
    parts = (results["validation"], results["test"], results["test"]["baseline"])
    for name, value in results["test"].items():
        if isinstance(value, list):
            cells = [f"{part[name][0]:.3f} ({part[name][1]:.3f}, {part[name][2]:.3f})" for part in parts]
            lines.append(f"{name:18}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def identity(args: Arguments) -> dict[str, Any]:
    """What decides the result: the flags, and the content of model and data."""
    free = {"output_dir", "overwrite", "use_cpu", "save_steps", "model_name_or_path", "dataset"}
    flags = {each.name: getattr(args, each.name) for each in fields(args) if each.name not in free}
    return flags | {"model": model_hash(str(args.model_name_or_path)), "data": content_hash(str(args.dataset))}


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    task, examples = read_examples(args)
    output, made_from = Path(str(args.output_dir)), identity(args)
    if output.exists():
        if not (output / MADE_FROM).is_file():
            raise UserError(f"--output_dir {output}: exists and is not of this script: choose another")
        if args.overwrite:
            shutil.rmtree(output)
        elif read_json(output / MADE_FROM) != made_from:
            raise UserError(f"--output_dir {output}: of other flags, model or data: --overwrite it, or choose another")
        elif (output / RESULTS).is_file():
            logger.info("%s was made by the same command: nothing to do", output)
            return
    counts = {name: sum(each.split == name for each in examples) for name in SPLITS}
    classes = f" of {len(task.classes)} classes" if task.classes else ""
    shown = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    logger.info("%s%s: %s", task.name.replace("_", " "), classes, shown)
    model = make_model(args, task)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.use_cpu else "cpu")
    output.mkdir(parents=True, exist_ok=True)
    with replace_flushed(output / MADE_FROM) as path:
        path.write_text(json.dumps(made_from))
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
    if (output / STATE).is_file():
        tuning.load(output / STATE)
    stops: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda received, _: stops.append(received))
    if not tuning.run(output / STATE, lambda: bool(stops)):
        logger.info("Stopped and saved: the same command goes on")
        raise SystemExit(STOPPED)
    (validation, _), (test, rows) = (evaluate(tuning, name) for name in ("validation", "test"))
    results = {
        "task": task.name,
        "classes": task.classes,
        "counts": counts,
        "best_epoch": tuning.progress.best_epoch,
        "validation": validation,
        "test": test,
        "history": tuning.progress.history,
    }
    write(tuning, args, results, rows)
    print(table_of(results))
    logger.info("Best after epoch %d: %s", tuning.progress.best_epoch, output / MODEL)


if __name__ == "__main__":
    run(main)
