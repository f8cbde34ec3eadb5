"""The best evaluation of a run: which it was, when to stop for lack of a better one, and its model at the end.

Flags and meanings are those of transformers' TrainingArguments and EarlyStoppingCallback, but for the default of
--metric_for_best_model, and that a checkpoint is saved at each best evaluation, whatever --save_steps says.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.files import damage_of
from common.cli import UserError
from common.data.training_data import TrainingData
from common.distributed.strategy import Strategy
from common.training.arguments import BestFlags
from common.training.resume import read_state
from common.training.task import BuiltModel
from common.training.trainer_state import RunPlan, TrainerState

logger = logging.getLogger(__name__)

DOWNSTREAM = re.compile(r"eval_(contacts|mutations|probe)_.+")
LOSSES = re.compile(r"(.*_)?(loss|perplexity|nelbo)(_(masked|kept|random)(_with_homologs)?)?")  # less is better


class Best:
    """Compares the evaluations of a run; what it has seen is in the TrainerState.

    known: the results that an evaluation may have, the default metric first; downstream: `DownstreamFlags.given`, of
    which the user names the results.
    """

    def __init__(self, flags: BestFlags, known: list[str], downstream: Sequence[str] = ()):
        name = flags.metric_for_best_model or known[0]
        self.flags, self.metric = flags, name if name in known or name.startswith("eval_") else f"eval_{name}"
        evaluation = DOWNSTREAM.fullmatch(self.metric)
        is_known = self.metric in known or (evaluation is not None and f"--eval_{evaluation[1]}" in downstream)
        if flags.given and not is_known:
            raise UserError(f"--metric_for_best_model {name}: no result of this run's evaluations: {', '.join(known)}")
        self.sign = -1 if LOSSES.fullmatch(self.metric) else 1

    def observe(self, state: TrainerState, results: Mapping[str, Any]) -> bool:
        """Whether these results, after `state.step` steps, are the best so far. Those before the first step do not
        count, and neither do those of weights that skipped steps may have spoilt."""
        value = results.get(self.metric)
        if value is None or not state.step or state.skipped_lately:
            return False
        state.evaluations_without_gain += 1
        if math.isnan(value):
            return False
        better_by = math.inf if state.best_metric is None else self.sign * (value - state.best_metric)
        if better_by > 0:
            state.evaluations_without_gain = 0
            state.best_metric, state.best_global_step = value, state.step
        return better_by > 0

    def evaluates_last(self, data: TrainingData, state: TrainerState) -> bool:
        """Whether the run ends here, at a step that may have the best model."""
        return self.flags.load_best_model_at_end and data.finished(state.step, state.position)

    def saves(self, state: TrainerState) -> bool:
        """Whether this step is the best so far, and its model is needed at the end."""
        return self.flags.load_best_model_at_end and state.best_global_step == state.step

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
        step, world = state.best_global_step, checkpointer.world
        if step is None:
            logger.warning("No evaluation has compared %s: the last model stays", self.metric)
        if step in (None, state.step):
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
