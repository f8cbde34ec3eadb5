"""The flags of a training run: each room's own, and those of the run as a whole.

Names and meanings are those of transformers' run_mlm.py and TrainingArguments wherever the two have the flag; what
cannot be honoured is not here, and an unknown flag is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.batches.flags import DataFlags
from common.cli import UserError, flag
from common.model.backend import ModelFlags
from common.precision.stats_plan import StatsFlags
from common.ranks.run import ProcessFlags
from common.training.checkpoint import CheckpointFlags
from common.training.logbook import LogFlags
from common.training.optim import OptimizerFlags


@dataclass
class TrainArguments(LogFlags, CheckpointFlags, ProcessFlags, StatsFlags, OptimizerFlags, DataFlags, ModelFlags):
    do_train: bool = flag(True, "Train.")
    do_eval: bool = flag(False, "Evaluate on the validation split, and at the end on the test split too.")
    eval_steps: float | None = flag(None, "Evaluate every N steps (below 1: a fraction of the run), with --do_eval.")
    eval_on_start: bool = flag(False, "Evaluate before the first step, with --do_eval.")
    stop_at_step: int | None = flag(None, "Save and end after this step; the schedule still spans the whole run.")
    save_final_model: bool | None = flag(
        None,
        "Export final_model/ for transformers. Default: once all steps are done; True: at any end of the run.",
    )

    def check(self) -> None:
        if (self.eval_steps or self.eval_on_start) and not self.do_eval:
            raise UserError("--eval_steps and --eval_on_start need --do_eval")
        self.require_at_least(1, "stop_at_step")
        self.require_above(0, "eval_steps")
