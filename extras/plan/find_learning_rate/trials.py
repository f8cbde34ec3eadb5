"""Trials of a search for a learning rate: which rate to try next, which to recommend, and their file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import UserError, one_line
from common.files.safe_files import read_json

MOST_TRIALS = 12
LAST_PART = 0.2  # of a trial's steps: its training loss is their mean
FLAT = 0.005  # nats: losses of two seeds differ by up to this much
SHARE = 0.1  # of what the best rate gains over the starting weights: where that is little, so is what is flat
DIVERGED_NATS, DIVERGED_STEPS = 0.5, 5  # above the first step's loss, as the mean of so many steps


@dataclass(frozen=True)
class Trial:
    """A short run. losses: of its steps that were not skipped; eval_loss: of the hidden residues of held-out proteins,
    or of a decoder's held-out text, None if diverged or without a validation split; tokens: that it was trained on."""

    learning_rate: float
    losses: list[float]
    eval_loss: float | None
    diverged: bool
    tokens: int

    @property
    def train_loss(self) -> float:
        """Mean over the last part, which are the same packs in every trial; inf if diverged."""
        last = self.losses[-last_part(len(self.losses)) :]
        return math.inf if self.diverged else sum(last) / len(last)

    @property
    def loss(self) -> float:
        """By which trials are compared."""
        return self.train_loss if self.eval_loss is None else self.eval_loss

    def check(self) -> None:
        """TypeError or ValueError for values that no trial has."""
        numbers = [self.learning_rate, *self.losses, *([] if self.eval_loss is None else [self.eval_loss])]
        if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
            raise ValueError("a number is missing")
        if self.learning_rate <= 0 or not isinstance(self.diverged, bool) or not isinstance(self.tokens, int):
            raise ValueError("a value is of another kind")
        if not self.losses and not self.diverged:
            raise ValueError("a trial has no losses")


def last_part(steps: int) -> int:
    return max(1, round(LAST_PART * steps))


def best_of(trials: list[Trial]) -> Trial | None:
    """The trial of the lowest loss; None if all diverged."""
    trained = [trial for trial in trials if not trial.diverged]
    return min(trained, key=lambda trial: trial.loss, default=None)


def flat_within(trials: list[Trial], start: float | None) -> float:
    """Nats above the best loss that count as none. start: held-out loss of the starting weights, if it is known."""
    best = best_of(trials)
    if best is None or start is None or best.eval_loss is None:
        return FLAT
    return min(FLAT, SHARE * max(0.0, start - best.loss))


def recommended(trials: list[Trial], start: float | None = None) -> Trial | None:
    """The lowest rate from which on, up to the best, all losses are as good as the best (`flat_within`); None if all
    diverged.

    Not the best itself: within the noise the lower rate is safer, since twice the best rate costs more than half of it
    (docs/training.md).
    """
    best, flat = best_of(trials), flat_within(trials, start)
    chosen = best
    for trial in sorted(trials, key=lambda trial: trial.learning_rate, reverse=True):
        if best and trial.learning_rate < best.learning_rate:
            if trial.loss > best.loss + flat:
                break
            chosen = trial
    return chosen


def next_rate(first: float, trials: list[Trial], start: float | None = None) -> float | None:
    """The rate to try next; None if the search is complete. start: as of `flat_within`."""
    if not trials:
        return first
    if len(trials) >= MOST_TRIALS:
        return None
    rates = sorted(trial.learning_rate for trial in trials)
    best, lowest_flat = best_of(trials), recommended(trials, start)
    if best and best.learning_rate == rates[-1]:
        return 2 * rates[-1]
    return rates[0] / 2 if lowest_flat is None or lowest_flat.learning_rate == rates[0] else None


def has_diverged(losses: list[float]) -> bool:
    """Whether the loss has risen far above that of the first step, and not for one batch."""
    last = losses[-DIVERGED_STEPS:]
    return len(losses) > DIVERGED_STEPS and sum(last) / len(last) > losses[0] + DIVERGED_NATS


def losses_file(directory: Path, rate: float) -> Path:
    """The file of the held-out proteins' losses after a trial; rate 0: of the starting weights."""
    return directory / f"losses-{rate:g}.parquet"


def read_results(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """{} if there are none yet. UserError for those of other settings, and for a file that holds anything else."""
    if not path.exists():
        return {}
    try:
        saved = read_json(path)
        for trial in saved["trials"]:
            Trial(**trial).check()
        before, _, _, _ = dict(saved["settings"]), dict(saved["data"]), int(saved["total_steps"]), saved["baseline"]
        _ = saved["start"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: not results of --find_learning_rate ({one_line(error)}): remove it") from error
    changed = [
        f"--{name} {before.get(name)} (now {value})" for name, value in settings.items() if before.get(name) != value
    ]
    if changed:
        raise UserError(f"{path.parent}: its trials had {', '.join(changed[:5])}: give the same flags, or remove it")
    return saved
