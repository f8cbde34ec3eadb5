"""The best evaluation of a run: which it was, when to stop for lack of a better one, and its model at the end.

Flags and meanings are those of transformers' TrainingArguments and EarlyStoppingCallback, but for the default of
--metric_for_best_model, and that a checkpoint is saved at each best evaluation, whatever --save_steps says.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from common.cli import UserError
from common.flags import Flags, Missing, flag

if TYPE_CHECKING:
    from common.distributed.strategy import Strategy
    from common.training.checkpoint import Checkpointer
    from common.training.progress import RunPlan, TrainerState
    from common.training.task import BuiltModel

logger = logging.getLogger(__name__)

DOWNSTREAM = re.compile(r"eval_(contacts|mutations|probe)_.+")
LOSSES = re.compile(r".*(loss|perplexity).*")  # less is better


@dataclass(frozen=True)
class BestFlags(Flags):
    group = "training and evaluation"
    unlisted = (
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("early_stopping_patience", "early_stopping_threshold"),
    )

    load_best_model_at_end: bool = flag(
        False, "Save at each best evaluation; at the end load that model, which results and final_model/ are then of."
    )
    metric_for_best_model: str | None = flag(
        None, "A result of evaluations. Default: eval_loss_masked; of a decoder eval_loss."
    )
    greater_is_better: bool | None = flag(None, "Of that result. Default: unless it is a loss or a perplexity.")
    early_stopping_patience: int | None = flag(None, "End after so many evaluations in a row that are no better.")
    early_stopping_threshold: float = flag(0.0, "By how much one must be better, for --early_stopping_patience.")

    @property
    def given(self) -> str | None:
        """The flag for which evaluations are compared, if any."""
        names = ("load_best_model_at_end", "early_stopping_patience")
        return next((f"--{name}" for name in names if getattr(self, name)), None)

    def missing(self) -> Iterator[Missing]:
        depend = ("metric_for_best_model", "greater_is_better")
        alone = next((name for name in depend if getattr(self, name) is not None), None)
        if alone and not self.given:
            yield Missing("--load_best_model_at_end", f"--{alone} is for it, or for --early_stopping_patience")
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            yield Missing("--early_stopping_patience", "--early_stopping_threshold goes with it", "3")

    def check(self) -> None:
        self.require_at_least(1, "early_stopping_patience")
        self.require_at_least(0, "early_stopping_threshold")


class Best:
    """Compares the evaluations of a run; what it has seen is in the TrainerState.

    known: the results that an evaluation may have, the default metric first.
    """

    def __init__(self, flags: BestFlags, known: list[str]):
        name = flags.metric_for_best_model or known[0]
        self.flags, self.metric = flags, name if name in known or name.startswith("eval_") else f"eval_{name}"
        if flags.given and self.metric not in known and not DOWNSTREAM.fullmatch(self.metric):
            raise UserError(f"--metric_for_best_model {name}: no result of this run's evaluations: {', '.join(known)}")
        greater = flags.greater_is_better
        self.sign = 1 if (not LOSSES.fullmatch(self.metric) if greater is None else greater) else -1

    def observe(self, state: TrainerState, results: Mapping[str, Any]) -> bool:
        """Whether these results, after `state.step` steps, are the best so far. Those before the first step do not
        count, and neither do those of weights that skipped steps may have spoilt."""
        value = results.get(self.metric)
        if value is None or math.isnan(value) or not state.step or state.skipped_lately:
            return False
        better_by = math.inf if state.best_metric is None else self.sign * (value - state.best_metric)
        state.evaluations_without_gain += 1
        if better_by > self.flags.early_stopping_threshold:
            state.evaluations_without_gain = 0
        if better_by > 0:
            state.best_metric, state.best_global_step = value, state.step
        return better_by > 0

    def ends(self, state: TrainerState) -> bool:
        """Whether the run is over by --early_stopping_patience."""
        patience = self.flags.early_stopping_patience
        return patience is not None and state.evaluations_without_gain >= patience

    def ended(self, plan: RunPlan, state: TrainerState) -> RunPlan:
        """The plan, which ends here if the run is over."""
        if not self.ends(state):
            return plan
        logger.info(
            *("Ending at step %d: %d evaluations in a row without a better %s", state.step),
            *(state.evaluations_without_gain, self.metric),
        )
        return replace(plan, last_step=state.step)

    def load(
        self, state: TrainerState, checkpointer: Checkpointer, strategy: Strategy, built: BuiltModel
    ) -> TrainerState:
        """Load the checkpoint of the best evaluation, and return its state; all ranks together. A damaged one is left
        with a warning: the last model stays."""
        from common.training.resume import damage_of, read_state

        step, world = state.best_global_step, checkpointer.world
        if step is None or step == state.step:
            return state
        path = checkpointer.output_dir / f"checkpoint-{step}"
        if damage := damage_of(path, world):
            logger.warning("%s, of the best %s: %s: the last model stays", path, self.metric, damage)
            return state
        checkpointer.load(path)
        built.precision.attach_restored(1.0)
        strategy.sync_model_weights()
        logger.info("Best: step %d of %d, %s %.4f", step, state.step, self.metric, state.best_metric)
        with world.raise_together():
            return read_state(path)
