"""Fine-tuning of a stock ESM-2 for labels of sequences or residues: tasks, batches, loss and one resumable loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cli import UserError, one_line
from common.files.json_files import replace_flushed
from common.models.esm2.alphabet import PAD, encode

logger = logging.getLogger(__name__)
TASKS = ("regression", "classification", "token_regression", "token_classification")
UNLABELLED = {"", ".", "-", "nan"}  # a residue without a label
IGNORE = -100


@dataclass(frozen=True)
class Example:
    """ids: uint8 [L + 2]; target: float or class index; of residues float64 [L] or int64 [L], NaN or IGNORE where a
    label is absent; split: train, validation or test."""

    ids: np.ndarray
    target: Any
    split: str


@dataclass(frozen=True)
class TaskSpec:
    """name: of `TASKS`; classes: their names, () for a regression."""

    name: str
    classes: tuple[str, ...] = ()

    @property
    def of_residues(self) -> bool:
        return self.name.startswith("token_")

    @property
    def outputs(self) -> int:
        return len(self.classes) or 1


def words_of(label: str) -> list[str]:
    """The labels of residues: separated by blanks or commas, else a letter each."""
    separated = label.replace(",", " ").split()
    return separated if len(separated) > 1 else list(label)


def task_of(sequences: Sequence[str], labels: Sequence[str], asked: str | None) -> TaskSpec:
    """Labels of residues if each has as many words as its sequence has residues; a regression if all are numbers."""
    of_residues = all(len(words_of(label)) == len(s) for s, label in zip(sequences, labels, strict=True))
    if asked:
        of_residues = asked.startswith("token_")
    words = {
        w for label in labels for w in (words_of(label) if of_residues else [label]) if w.lower() not in UNLABELLED
    }
    is_regression = asked.endswith("regression") if asked else not words <= {"0", "1"} and all(map(is_number, words))
    if is_regression and (wrong := next((w for w in sorted(words) if not is_number(w)), None)):
        raise UserError(f"--problem_type {asked}: the label {wrong[:40]!r} is not a number")
    name = ("token_" if of_residues else "") + ("regression" if is_regression else "classification")
    return TaskSpec(name, () if is_regression else tuple(sorted(words)))


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def example_of(task: TaskSpec, sequence: str, label: str, split: str, where: str) -> Example:
    """UserError, which begins with `where`, if the label does not fit the sequence."""
    if not task.of_residues:
        return Example(encode(sequence), task.classes.index(label) if task.classes else float(label), split)
    words = words_of(label)
    if len(words) != len(sequence):
        raise UserError(f"{where}: {len(words)} labels for {len(sequence)} residues")
    absent = [word.lower() in UNLABELLED for word in words]
    if task.classes:
        target = [IGNORE if no else task.classes.index(w) for w, no in zip(words, absent, strict=True)]
        return Example(encode(sequence), np.array(target), split)
    values = [math.nan if no else float(w) for w, no in zip(words, absent, strict=True)]
    return Example(encode(sequence), np.array(values), split)


def padded(examples: Sequence[Example], task: TaskSpec, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs of the model [B, S], targets [B] or [B, S])."""
    longest = max(len(e.ids) for e in examples)
    ids = torch.full((len(examples), longest), PAD)
    empty, kind = (IGNORE, torch.int64) if task.classes else (math.nan, torch.float32)
    targets = torch.full((len(examples), longest) if task.of_residues else (len(examples),), empty, dtype=kind)
    for row, each in enumerate(examples):
        ids[row, : len(each.ids)] = torch.from_numpy(each.ids.astype(np.int64))
        if task.of_residues:
            targets[row, 1 : len(each.ids) - 1] = torch.from_numpy(each.target).to(kind)
        else:
            targets[row] = each.target
    return {"input_ids": ids.to(device), "attention_mask": (ids != PAD).long().to(device)}, targets.to(device)


def loss_sum(task: TaskSpec, logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """(the loss, summed over the labelled items, their number): cross-entropy in nats, or the squared error."""
    if task.classes:
        flat, kept = logits.float().flatten(0, -2), targets.flatten()
        return F.cross_entropy(flat, kept, ignore_index=IGNORE, reduction="sum"), int((kept != IGNORE).sum())
    labelled = targets.isfinite()
    return F.mse_loss(logits.float()[..., 0][labelled], targets[labelled], reduction="sum"), int(labelled.sum())


def by_length(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """Longest first, in padded batches of at most so many tokens."""
    batch: list[Example] = []
    for each in sorted(examples, key=lambda e: -len(e.ids)):
        if batch and len(batch[0].ids) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch


@dataclass
class Progress:
    """What a run resumes from, beside the weights and the optimiser's state. best: validation loss; waited: epochs
    without a better one."""

    epoch: int = 0
    step: int = 0  # of the epoch
    best: float = math.inf
    best_epoch: int = -1
    waited: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass
class FineTuning:
    """model: a stock model, or peft's around one; only parameters that require a gradient are trained and saved."""

    model: nn.Module
    task: TaskSpec
    examples: list[Example]
    device: torch.device
    learning_rate: float
    epochs: int
    batch_size: int
    tokens_per_batch: int
    weight_decay: float
    warmup: float
    max_grad_norm: float
    patience: int
    seed: int
    bf16: bool
    save_steps: int

    def __post_init__(self) -> None:
        self.split = {name: [e for e in self.examples if e.split == name] for name in ("train", "validation", "test")}
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
        self.progress, self.best_weights = Progress(), self.weights()

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.trained.items()}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.split["train"]) / self.batch_size)

    def rate(self, step: int) -> float:
        """Linear warm-up, then linear to zero; as transformers' `get_linear_schedule_with_warmup`."""
        total = self.steps_per_epoch * self.epochs
        warm = math.ceil(self.warmup * total)
        if step < warm:
            return self.learning_rate * step / max(1, warm)
        return self.learning_rate * max(0.0, (total - step) / max(1, total - warm))

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def batches(self, epoch: int) -> list[list[Example]]:
        """The steps' examples: an order of its own in each epoch."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.split["train"]))
        return [
            [self.split["train"][n] for n in order[start : start + self.batch_size]]
            for start in range(0, len(order), self.batch_size)
        ]

    def step(self, batch: list[Example]) -> float:
        """One step of the optimiser; returns the mean loss."""
        progress, number = self.progress, self.progress.epoch * self.steps_per_epoch + self.progress.step
        torch.manual_seed(self.seed + number)  # of LoRA's dropout: a resumed run draws the same
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        total, count = 0.0, sum(loss_count(self.task, each) for each in batch)
        for part in by_length(batch, self.tokens_per_batch):
            inputs, targets = padded(part, self.task, self.device)
            with self.autocast():
                logits = self.model(**inputs).logits
            loss, _ = loss_sum(self.task, logits, targets)
            (loss / max(count, 1)).backward()
            total += float(loss.detach())
        if self.max_grad_norm:
            nn.utils.clip_grad_norm_(list(self.trained.values()), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step += 1
        return total / max(count, 1)

    @torch.inference_mode()
    def predict(self, split: str) -> tuple[float, list[np.ndarray]]:
        """(mean loss, logits [outputs] or [L, outputs] of each example)."""
        self.model.eval()
        examples, total, count = self.split[split], 0.0, 0
        found: dict[int, np.ndarray] = {}
        for part in by_length(examples, self.tokens_per_batch):
            inputs, targets = padded(part, self.task, self.device)
            with self.autocast():
                logits = self.model(**inputs).logits.float()
            loss, labelled = loss_sum(self.task, logits, targets)
            total, count = total + float(loss), count + labelled
            for each, row in zip(part, logits.cpu().numpy(), strict=True):
                found[id(each)] = row[1 : len(each.ids) - 1] if self.task.of_residues else row
        self.model.train()
        return total / max(count, 1), [found[id(each)] for each in examples]

    def run(self, saved: Path, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until validation has not improved for `patience` epochs; False if stopped before.

        saved: the file that it resumes from, written every `save_steps` steps and after each epoch.
        """
        self.model.train()
        progress = self.progress
        losses: list[float] = []
        while progress.epoch < self.epochs and progress.waited < self.patience:
            for batch in self.batches(progress.epoch)[progress.step :]:
                losses.append(self.step(batch))
                if progress.step % self.save_steps == 0 and progress.step < self.steps_per_epoch:
                    self.save(saved)
                if stopped():
                    self.save(saved)
                    return False
            validation, _ = self.predict("validation")
            row = {"epoch": progress.epoch + 1, "validation_loss": validation}
            if validation < progress.best:
                progress.best, progress.best_epoch, progress.waited = validation, progress.epoch + 1, 0
                self.best_weights = self.weights()
            else:
                progress.waited += 1
            progress.history.append(row)
            progress.epoch, progress.step = progress.epoch + 1, 0
            mean = sum(losses) / max(len(losses), 1)
            logger.info("Epoch %d: training loss %.4f, validation loss %.4f", progress.epoch, mean, validation)
            losses = []
            self.save(saved)
        self.set_weights(self.best_weights)
        return True

    def save(self, path: Path) -> None:
        state = {"weights": self.weights(), "best": self.best_weights, "optimizer": self.optimizer.state_dict()}
        with replace_flushed(path) as partial:
            torch.save(state | {"progress": vars(self.progress)}, partial)

    def load(self, path: Path) -> None:
        """UserError if the file is damaged or of another run."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.set_weights(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.best_weights, self.progress = state["best"], Progress(**state["progress"])
        except Exception as error:  # torch's are many
            raise UserError(
                f"{path}: cannot be resumed from: {one_line(error)[:120]}: --overwrite starts anew"
            ) from error
        logger.info("Resuming in epoch %d after %d steps of it", self.progress.epoch + 1, self.progress.step)


def loss_count(task: TaskSpec, example: Example) -> int:
    """The labelled items of an example."""
    if not task.of_residues:
        return 1
    return int((example.target != IGNORE).sum() if task.classes else np.isfinite(example.target).sum())
