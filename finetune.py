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
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.cli import StoppedBySignal, UserError, one_line, run
from common.files.content_hash import content_hash
from common.files.runs import final_model_of
from common.files.safe_files import read_json, replace_directory, replace_flushed, write_json
from common.flags import Flags, Missing, flag, parse_arguments
from common.models.family import NO_STOCK, encoder_family
from common.models.layers.hf_directory import dropout_of, local_directory, model_hash
from extras.after.downstream.finetuning import FineTuning
from extras.after.downstream.groups import Clustering
from extras.after.downstream.labels import TASKS, Example, TaskSpec, contradictions, label_items, read_examples
from extras.after.downstream.metrics import about_intervals, shown, with_intervals
from extras.after.downstream.outputs import Manifest, Output, claimed, writing
from extras.after.downstream.results import RESULTS
from extras.after.downstream.splits import SPLITS
from extras.after.downstream.stock_model import config_for_proteins
from extras.after.downstream.tuned_card import card_of
from extras.after.inference.exported import is_checkpoint
from extras.prepare.relatives import HELP, say_relatives
from extras.prepare.sources.proteins import ProteinFlags

logger = logging.getLogger(__name__)
RESAMPLES = 200  # of the held-out proteins, for the intervals
STATE, PREDICTIONS, MODEL = "state.pt", "predictions.csv", "model"
WRITTEN = (STATE, PREDICTIONS, RESULTS, MODEL)
MADE_FROM = "made_from.json"  # of earlier versions
SCRIPT = "finetune.py"
# Flags that are None unless given, since they are refused where they have no effect.
SIZES = {"validation_size": 0.1, "test_size": 0.2}
LORA = {"lora_r": 8, "lora_alpha": 16.0, "lora_dropout": 0.0}


@dataclass
class Arguments(Flags):
    required = ("model_name_or_path", "dataset", "output_dir")

    model_name_or_path: str | None = flag(None, "A run's directory, or a directory or Hub name of an ESM-2 or ESM C.")
    dataset: str | None = flag(None, "A CSV file with the columns sequence and label, and possibly split.")
    output_dir: str | None = flag(None, "Where the model and the results go.")
    fasta: str | None = flag(None, "The sequences, where the CSV file has ids: its column id.")
    label_column: str = flag("label", "The column of the labels; rows without one are left out.")
    split_column: str | None = flag(
        None,
        "A column with train, validation or test. Default: split, or FLIP's set and validation, if there is one.",
    )
    cluster_column: str | None = flag(None, "A column with clusters of related proteins, each in one split whole.")
    cluster_table: str | None = flag(None, "Or a table of clusters and their members' ids, as for step 1.")
    cluster: float | None = flag(None, "Or cluster the labelled proteins by MMseqs2 at this identity, 0.5 say.")
    validation_size: float | None = flag(
        None, "Part of the proteins, by a hash of the sequence or cluster, where no split is given. Default: 0.1."
    )
    test_size: float | None = flag(None, "Likewise. Default: 0.2.")
    problem_type: str | None = flag(None, "What the labels are. Default: by the labels.", choices=TASKS)
    full: bool = flag(False, "Train all weights, not LoRA's.")
    lora_r: int | None = flag(None, "Rank of LoRA's matrices. Default: 8.")
    lora_alpha: float | None = flag(None, "LoRA's scale times its rank. Default: 16.")
    lora_dropout: float | None = flag(None, "Of LoRA's inputs. Default: 0.")
    target_modules: str | None = flag(
        None, "Matrices that get LoRA's: names in the stock model. Default: of queries, keys and values."
    )
    learning_rate: float | None = flag(None, "Peak. Default: 1e-3 with LoRA, 1e-4 with --full.")
    num_train_epochs: int = flag(20, "At most so many.")
    patience: int = flag(3, "End after so many epochs without a lower validation loss.")
    batch_size: int = flag(16, "Sequences of a step.")
    tokens_per_batch: int = flag(1024, "Tokens of a forward pass, padding included: more need more memory.")
    max_seq_length: int = flag(1024, "Tokens, <cls> and <eos> included; longer sequences are refused.")
    weight_decay: float = flag(0.01, "Of AdamW.")
    warmup_ratio: float = flag(0.1, "Part of the steps in which the learning rate rises.")
    max_grad_norm: float = flag(1.0, "Largest gradient norm; 0: any.")
    save_steps: int = flag(50, "Steps between saves; also after every epoch.")
    seed: int = flag(42, "Of the new head, LoRA's matrices and the order of the data.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    overwrite: bool = flag(False, "Start anew in OUTPUT_DIR.")
    count_relatives: bool = flag(True, HELP)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def value(self, name: str) -> Any:
        """Of a flag of `SIZES` or `LORA`."""
        given = getattr(self, name)
        return (SIZES | LORA)[name] if given is None else given

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out/final_model")
        if not self.dataset:
            yield Missing("--dataset", "a CSV file of sequences and labels", "labels.csv")
        if not self.output_dir:
            yield Missing("--output_dir", "where the model goes", "tuned")

    def check(self) -> None:
        counts = ("lora_r", "num_train_epochs", "patience", "batch_size", "tokens_per_batch", "save_steps")
        self.require_at_least(1, *counts)
        self.require_above(0, "learning_rate", "lora_alpha")
        self.require_at_least(0, "lora_dropout", "weight_decay", "warmup_ratio", "max_grad_norm", "seed")
        self.require_at_least(8, "max_seq_length")
        self.require_above(0, "validation_size", "test_size")
        if not self.value("validation_size") + self.value("test_size") < 1:
            raise UserError("--validation_size and --test_size leave nothing to train on: give less than 1 together")
        if not self.value("lora_dropout") < 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be below 1")
        idle = [f"--{name}" for name in (*LORA, "target_modules") if self.full and getattr(self, name) is not None]
        if idle:
            raise UserError(f"{' and '.join(idle)}: no effect, as --full trains without LoRA: leave it out")
        Clustering(self.cluster_column, self.cluster_table, self.cluster).check()
        for name in ("dataset", "fasta"):
            if getattr(self, name) and not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")
        if not self.full and find_spec("peft") is None:
            raise UserError("LoRA needs peft: ./install.sh --finetune; or train all weights with --full")


def targets_of(args: Arguments) -> str:
    """--target_modules, by default the family's."""
    return args.target_modules or encoder_family(str(args.model_name_or_path)).lora_targets


def make_model(args: Arguments, task: TaskSpec) -> Any:
    """Stock transformers' model with a new head, wrapped by peft unless --full. UserError as StateDictAdapter.read."""
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    name = str(args.model_name_or_path)
    family = encoder_family(name)
    if not family.stock:
        raise UserError(f"--model_name_or_path {name}: {NO_STOCK}")
    config = family.load_config(name)
    for _ in family.adapter.read(name, config)[0]:
        pass  # it checks vocabulary and weights
    if dropout := dropout_of(config):
        logger.info("Trained with the dropout of config.json: %s", ", ".join(f"{n} {p}" for n, p in dropout.items()))
    disable_progress_bar()
    set_verbosity_error()  # that the head is new
    torch.manual_seed(args.seed)
    head = "ForTokenClassification" if task.of_residues else "ForSequenceClassification"
    kind: Any = getattr(transformers, family.stock + head)
    labels = dict(enumerate(task.classes or ("value",)))
    model, loading = kind.from_pretrained(
        local_directory(name),
        id2label=labels,
        label2id={label: number for number, label in labels.items()},
        problem_type="single_label_classification" if task.classes else "regression",
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    if lacking := sorted(
        key for key in loading["missing_keys"] if not key.startswith(("classifier.", "score.", "esm.contact_"))
    ):
        raise UserError(f"--model_name_or_path {name}: transformers does not find {lacking[0]} there: export it anew")
    if args.full:
        for key, parameter in model.named_parameters():
            parameter.requires_grad = "contact_head" not in key and "position_embeddings" not in key
        return model
    from peft import LoraConfig, TaskType, get_peft_model

    lora = LoraConfig(
        task_type=TaskType.TOKEN_CLS if task.of_residues else TaskType.SEQ_CLS,
        r=args.value("lora_r"),
        lora_alpha=args.value("lora_alpha"),
        lora_dropout=args.value("lora_dropout"),
        target_modules=targets_of(args).split(","),
    )
    try:
        wrapped: Any = get_peft_model(model, lora)
    except ValueError as error:
        raise UserError(f"--target_modules {args.target_modules}: {one_line(error)[:160]}") from error
    config = wrapped.active_peft_config
    config.base_model_name_or_path = name  # not its place in the Hub's cache
    # Sets, whose order in adapter_config.json would differ from process to process.
    config.target_modules, config.modules_to_save = sorted(config.target_modules), sorted(config.modules_to_save)
    model.config.architectures = [type(model).__name__]  # as `save_pretrained` of a whole model sets it
    return wrapped


def evaluate(tuning: FineTuning, split: str) -> tuple[dict[str, Any], list[tuple[str, int | str, Any, Any]]]:
    """({"loss", metric: [value, low, high], "baseline": {metric: value}}, a row for each label).

    A row: protein, residue or "", label, prediction.
    The baseline predicts the mean, or the commonest class, of the training labels.
    """
    task = tuning.task
    loss, logits = tuning.predict(split)
    rows: list[tuple[str, int | str, Any, Any]] = []
    groups, scores = [], []
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
            scores.append(values[-1] - values[0])
    labels, guesses = (np.array([row[n] for row in rows]) for n in (2, 3))
    trained = np.concatenate([each.labelled() for each in tuning.split["train"]])
    plain = task.classes[np.bincount(trained).argmax()] if task.classes else trained.mean()
    two = np.array(scores) if len(task.classes) == 2 else None
    found = with_intervals(labels, guesses, two, np.array(groups), RESAMPLES)
    baseline = with_intervals(labels, np.full(len(rows), plain), None, np.array(groups), 0)
    values = {name: value for name, (value, _, _) in baseline.items() if value is not None}
    return {"loss": loss, **found, "baseline": values}, rows


def write(tuning: FineTuning, args: Arguments, output: Output, results: dict[str, Any], rows: list[tuple]) -> None:
    """The model, the predictions and the results, then the manifest, which says that all is there."""
    directory, model = output.directory, tuning.model
    family = encoder_family(str(args.model_name_or_path))
    with replace_directory(directory / MODEL) as partial:
        # peft would ask the Hub whether the vocabulary has grown.
        model.save_pretrained(partial, **({} if args.full else {"save_embedding_layers": False}))
        if not args.full:
            model.config.save_pretrained(partial)  # the classes' names, which an adapter's own files lack
        family.adapter.write_tokenizer(partial)
        lora_r = None if args.full else args.value("lora_r")
        (partial / "README.md").write_text(card_of(family, tuning.task, results, lora_r), encoding="utf-8")
    with replace_flushed(directory / PREDICTIONS) as path, path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("protein", "residue", "label", "prediction"), *rows])
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


def identity(args: Arguments) -> dict[str, Any]:
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
    args = parse_arguments(__doc__, Arguments)
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
    inputs = {f"--{name}": getattr(args, name) for name in ("model_name_or_path", "dataset", "fasta", "cluster_table")}
    with claimed(output, inputs, identity(args), args.overwrite, earlier_output(output)) as claim:
        if claim is not None:
            tune(args, task, examples, contradicting, claim)


def tune(
    args: Arguments, task: TaskSpec, examples: list[Example], contradicting: dict[str, Any], output: Output
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
    (validation, _), (test, rows) = (evaluate(tuning, name) for name in ("validation", "test"))
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
        "made_from": output.made_from,
    }
    with writing(output.directory):
        write(tuning, args, output, results, rows)
    print(table_of(results))
    logger.info("Best after epoch %d; %s", tuning.progress.best_epoch, about_intervals(over, groups))
    logger.info("Written: %s", ", ".join(str(output.directory / name) for name in WRITTEN[1:]))


if __name__ == "__main__":
    run(main, resumable=True)
