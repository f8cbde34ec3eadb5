"""The flags of a training run: each room's own, and those of the run as a whole.

Names and meanings are those of transformers' run_mlm.py and TrainingArguments wherever the two have the flag; what
cannot be honoured is not here, and an unknown flag is an error.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.batches.flags import DataFlags
from common.cli import Missing, flag, parse_arguments
from common.model.backend import ModelFlags
from common.precision.stats_plan import StatsFlags
from common.ranks.run import ProcessFlags
from common.training.checkpoint import CheckpointFlags
from common.training.logbook import LogFlags
from common.training.optim import OptimizerFlags

logger = logging.getLogger(__name__)
SANITY = Path(__file__).parents[2] / "configs" / "sanity.yaml"


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

    def missing(self) -> Iterator[Missing]:
        if (self.eval_steps or self.eval_on_start) and not self.do_eval:
            yield Missing("--do_eval", "--eval_steps and --eval_on_start need it")

    def check(self) -> None:
        self.require_at_least(1, "stop_at_step")
        self.require_above(0, "eval_steps")


def parse_run(description: str | None, kind: type[TrainArguments], argv: list[str] | None = None) -> TrainArguments:
    """The flags of a train script, one instance of its `kind`. No flags stand for configs/sanity.yaml."""
    argv = sys.argv[1:] if argv is None else argv
    (args,) = parse_arguments(description, kind, argv=argv or [str(SANITY)])
    if not argv and os.environ.get("RANK", "0") == "0":
        script, file = os.path.basename(sys.argv[0]), os.path.relpath(SANITY)
        logger.info(
            f"No flags given, so those of {file}: {args.max_steps} short steps of {args.config_name} on generated "
            f"proteins, into {args.output_dir}. On your own: {script} {file} --dataset my.fasta --output_dir out/mine"
        )
    return args
