"""Fine-tuning of a stock ESM-2 for labels of proteins or residues: batches, loss and one resumable loop.

Batches are padded, of sequences sorted by length: stock transformers has no attention over packed sequences, its head
reads the first token of each row, and a mask between the sequences of one row would cost S x S scores a pack.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cli import UserError, one_line
from common.files.safe_files import replace_flushed
from common.models.esm2.alphabet import PAD
from extras.after.downstream.labels import IGNORE, Example, TaskSpec
from extras.after.downstream.splits import SPLITS

logger = logging.getLogger(__name__)


def padded(examples: Sequence[Example], task: TaskSpec, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs of the model [B, S], targets [B] or [B, S], NaN or IGNORE where there is none)."""
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


def loss_sum(task: TaskSpec, logits: Tensor, targets: Tensor) -> Tensor:
    """Summed over the labelled items: cross-entropy in nats, or the squared error."""
    if task.classes:
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    labelled = targets.isfinite()
    return F.mse_loss(logits.float()[..., 0][labelled], targets[labelled], reduction="sum")


def check_finite(loss: float, what: str) -> None:
    if not math.isfinite(loss):
        raise UserError(f"{what} is {loss}: --overwrite with a lower --learning_rate")


def labels_in(examples: Sequence[Example]) -> int:
    return sum(len(each.labelled()) for each in examples)


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
    loss_sum: float = 0.0  # of the steps of the epoch
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
        self.split = {name: [e for e in self.examples if e.split == name] for name in SPLITS}
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        decayed, others = ([p for p in self.trained.values() if (p.dim() > 1) is large] for large in (True, False))
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.learning_rate)
        self.progress, self.best_weights = Progress(), self.weights()
        # A regression is trained on labels of mean 0 and deviation 1, whatever their unit; see `restore_unit`.
        self.mean, self.deviation = 0.0, 1.0
        if not self.task.classes:
            labels = np.concatenate([each.labelled() for each in self.split["train"]])
            self.mean, self.deviation = float(labels.mean()), float(labels.std()) or 1.0

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

    def batches(self, epoch: int) -> list[list[Example]]:
        """The steps' examples: an order of its own in each epoch."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.split["train"]))
        return [
            [self.split["train"][n] for n in order[start : start + self.batch_size]]
            for start in range(0, len(order), self.batch_size)
        ]

    def forward(self, batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
        """(logits [B, outputs] or [B, S, outputs], summed loss)."""
        inputs, targets = padded(batch, self.task, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(**inputs).logits.float()
        if not self.task.classes:
            targets = (targets - self.mean) / self.deviation
        return logits, loss_sum(self.task, logits, targets)

    def step(self, batch: Sequence[Example]) -> float:
        """One step of the optimiser; returns the mean loss. UserError if it is not finite."""
        progress, number = self.progress, self.progress.epoch * self.steps_per_epoch + self.progress.step
        torch.manual_seed(self.seed + number)  # of dropout: a resumed run draws the same
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        total, count = 0.0, max(1, labels_in(batch))
        for part in by_length(batch, self.tokens_per_batch):
            _, loss = self.forward(part)
            (loss / count).backward()
            total += loss.item() / count
        check_finite(total, f"the loss of step {number + 1}")
        if self.max_grad_norm:
            nn.utils.clip_grad_norm_(list(self.trained.values()), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.step += 1
        progress.loss_sum += total
        return total

    @torch.inference_mode()
    def predict(self, split: str) -> tuple[float, list[np.ndarray]]:
        """(mean loss, logits [outputs] or [L, outputs] of each example)."""
        self.model.eval()
        examples, total = self.split[split], 0.0
        predictions: dict[int, np.ndarray] = {}
        for part in by_length(examples, self.tokens_per_batch):
            logits, loss = self.forward(part)
            total += loss.item()
            for each, row in zip(part, logits.cpu().numpy(), strict=True):
                predictions[id(each)] = row[1 : len(each.ids) - 1] if self.task.of_residues else row
        self.model.train()
        return total / max(1, labels_in(examples)), [predictions[id(each)] for each in examples]

    @torch.no_grad()
    def restore_unit(self) -> None:
        """Have the head's last layer give the labels' own unit, so that a stock model does."""
        head = [p for n, p in self.trained.items() if ("classifier" in n or ".score." in f".{n}") and "lora_" not in n]
        weight, bias = head[-2:]
        weight *= self.deviation
        bias *= self.deviation
        bias += self.mean
        self.mean, self.deviation = 0.0, 1.0

    def run(self, saved: Path, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Train to the end, or until validation has not improved for `patience` epochs; False if stopped before.

        The model then has the weights of the best epoch. saved: the file that it resumes from, written every
        `save_steps` steps and after each epoch.
        """
        self.model.train()
        progress = self.progress
        while progress.epoch < self.epochs and progress.waited < self.patience:
            for batch in self.batches(progress.epoch)[progress.step :]:
                self.step(batch)
                if stopped():
                    self.save(saved)
                    return False
                if progress.step % self.save_steps == 0:
                    self.save(saved)
            validation, _ = self.predict("validation")
            check_finite(validation, "the validation loss")
            progress.epoch, progress.waited = progress.epoch + 1, progress.waited + 1
            if validation < progress.best:
                progress.best, progress.best_epoch, progress.waited = validation, progress.epoch, 0
                self.best_weights = self.weights()
            losses = {"train_loss": progress.loss_sum / progress.step, "validation_loss": validation}
            progress.history.append({"epoch": progress.epoch, **losses})
            logger.info("Epoch %d: training loss %.4f, validation loss %.4f", progress.epoch, *losses.values())
            progress.step, progress.loss_sum = 0, 0.0
            self.save(saved)
        self.set_weights(self.best_weights)
        return True

    def save(self, path: Path) -> None:
        """UserError where there is no room; an earlier file stays."""
        state = {"weights": self.weights(), "best": self.best_weights, "optimizer": self.optimizer.state_dict()}
        try:
            with replace_flushed(path) as partial:
                torch.save(state | {"progress": vars(self.progress)}, partial)
        except (OSError, RuntimeError) as error:  # torch raises the latter, and says neither the file nor why
            why = getattr(error, "strerror", None) or "the disk is full, or `ulimit -f` too small"
            raise UserError(f"{path}: cannot be written: {why}: make room: the same command resumes") from error

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
