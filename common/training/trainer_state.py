"""The trainer state in a checkpoint: how far a run is; and the steps that flags and data resolve to (`RunPlan`)."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from common.cli import UserError, one_line
from common.data.flags import BatchFlags
from common.data.loader import StepCounts
from common.data.packing import Position
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import TrainingData, packs_per_step
from common.distributed.world import World
from common.files.safe_files import LARGEST_INT, check_type, shorten
from common.models.layers.backend import KEPT_ON_RESUME
from common.training.arguments import RunArguments
from common.training.log_row import StepResult, check_row, check_sums
from common.training.same_run import COMPARED_BY, changed_flags
from common.training.schedule import default_warmup_steps

logger = logging.getLogger(__name__)

# Types of the saved values that are used; others are only compared and shown.
_SAVED = {
    "arguments": {
        "max_steps": "int",
        "num_train_epochs": "int | float",
        "model_name_or_path": "str | None",
        "stop_at_step": "int | None",
    },
    "resolved": {
        "total_steps": "int | None",
        "last_step": "int | None",
        "warmup_steps": "int | float",
        "formats": "dict",
    },
}


@dataclass(frozen=True)
class RunPlan:
    """What the flags leave open, resolved once; the log, results and checkpoints show it.

    accumulation: packs of a rank; total_steps: of the whole run, which the schedule spans; warmup_steps: the flag, or
    its default in steps; last_step: where this start ends, None for the end of the data; eval_every, save_every: in
    steps, 0 for never.
    """

    packs_per_step: PacksPerStep
    accumulation: PacksPerStep
    total_steps: int
    warmup_steps: float
    last_step: int | None
    eval_every: int
    downstream_every: int
    save_every: int

    def to_json(self) -> dict[str, Any]:
        """The values as a checkpoint keeps them."""
        return asdict(self) | {"packs_per_step": self.packs_per_step.plain, "accumulation": self.accumulation.plain}

    def finished(self, data: TrainingData, step: int, position: dict) -> bool:
        """Whether no step is left after `step`, by the flags or because the data end."""
        return (self.last_step is not None and step >= self.last_step) or data.finished(step, position)

    def evaluates_downstream(self, step: int) -> bool:
        return bool(self.downstream_every) and step % self.downstream_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether the step is evaluated, whatever the run asks at its end."""
        return bool(self.eval_every) and step % self.eval_every == 0 or self.evaluates_downstream(step)

    def first_row(self, data: TrainingData, state: TrainerState) -> int | None:
        """The step of the first row of metrics.jsonl to be written; None if nothing is left to train."""
        if state.unfinished_row is not None:
            return state.step
        if self.finished(data, state.step, state.position):
            return None
        return state.step + 1 if state.step else 0


@dataclass
class TrainerState:
    """With weights and optimiser state, all that a run resumes from."""

    step: int = 0
    position: dict = field(default_factory=dict)  # in the data, where the next step begins
    packs_per_step: int | str | None = None  # a number, or a schedule (PacksPerStep.plain)
    epoch: float = 0.0
    tokens: int = 0  # without padding
    sequences: int = 0
    unknown: int = 0  # <unk> tokens: characters that are not residues
    total_flos: float = 0.0
    loss_total: float = 0.0  # sum of the losses of the steps that have one: not skipped, with a target
    row_sums: dict = field(default_factory=dict)  # since the last row of metrics.jsonl (log_row.RowWindow)
    steps_without_target: int = 0
    skipped_steps: int = 0  # steps with a loss or gradient norm that is not finite; counted in `step`
    skipped_lately: list[str] = field(default_factory=list)  # messages of the steps skipped in a row up to now
    best_metric: float | None = None  # of the best evaluation (common.training.best), and its step
    best_global_step: int | None = None
    evaluations_without_gain: int = 0  # in a row
    seconds: float = 0.0  # spent in steps, over all restarts
    gradient_factor: int | None = None  # Strategy.grad_scale of the run that wrote this
    unfinished_row: dict | None = None  # of metrics.jsonl, if a signal interrupted its evaluation
    data: dict = field(default_factory=dict)  # identity of the batch plan
    arguments: dict = field(default_factory=dict)
    resolved: dict = field(default_factory=dict)  # BuiltModel.implementation and the RunPlan

    @classmethod
    def read(cls, saved: dict, where: str) -> TrainerState:
        """From a checkpoint, which may be untrusted: UserError unless every value has its type."""
        types = {f.name: str(f.type) for f in fields(cls)}
        if "row_steps" in saved:  # of version 0.4, which kept the loss of a row and no other sum
            loss = [saved.get("row_loss"), saved["row_steps"]]
            others = {name: value for name, value in saved.items() if name not in ("row_loss", "row_steps")}
            saved = others | {"row_sums": {"loss": loss, "train_perplexity": loss} if saved["row_steps"] else {}}
        try:
            for name, value in saved.items():
                if name not in types:
                    raise ValueError(f"{shorten(name)} is unknown: of a later version?")
                check_type(name, value, types[name])
            state = cls(**saved)
            _check_position(state.position)
            for part, expected in _SAVED.items():
                for name, value in (getattr(state, part) or {}).items():
                    check_type(f"{part}: {name}", value, expected.get(name, "int | float | bool | str | None"))
                    _check_printable(name, value)
            packs = PacksPerStep.of(state.packs_per_step or 0).most
            if min(state.step, packs, state.gradient_factor or 0) < 0:
                raise ValueError("a count is below 0")
            if not 0 <= state.resolved.get("warmup_steps", 0) < math.inf:
                raise ValueError(f"resolved: warmup_steps is {state.resolved['warmup_steps']}")
            _check_printable("skipped_lately", *state.skipped_lately)
            check_sums(state.row_sums)
            if state.unfinished_row is not None:
                check_row(state.unfinished_row)
        except ValueError as error:
            raise UserError(f"{where}: refused: {one_line(error)}") from error
        return state

    def start(
        self, plan: RunPlan, implementation: dict[str, Any], identity: dict, arguments: dict, grad_scale: int
    ) -> None:
        """Record what this start of the run resolved, and warn of flags that differ from the checkpoint's.

        implementation: `BuiltModel.implementation`.
        """
        arguments = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in arguments.items()}
        arguments = {k: v for k, v in arguments.items() if isinstance(v, str | int | float | bool | None)}
        arguments |= {name: implementation[name] for name in KEPT_ON_RESUME if name in implementation}
        if changed := changed_flags(self.arguments, arguments):  # not refused: another --save_steps is fine
            logger.warning("Flags differ from those of the checkpoint: %s", ", ".join(changed.values()))
        if self.best_metric is not None and changed.keys() & COMPARED_BY:
            logger.info("The best evaluation so far, of step %s, is forgotten", self.best_global_step)
            self.best_metric, self.best_global_step, self.evaluations_without_gain = None, None, 0
        self.data, self.arguments, self.resolved = identity, arguments, implementation | plan.to_json()
        self.packs_per_step, self.gradient_factor = plan.packs_per_step.plain, grad_scale

    def enter_extended(self, data: TrainingData) -> None:
        """If `data` extend the checkpoint's, whose positions they do not have, begin their next epoch."""
        if self.data.get("dataset") not in data.extends:
            return
        at = Position(**self.position)
        self.position = asdict(Position(at.epoch + (at > Position(at.epoch))))
        replaced = {"dataset", "sample_clusters"} & self.data.keys() & data.identity.keys()
        self.data = self.data | {name: data.identity[name] for name in replaced}
        self.resolved |= {"total_steps": None, "last_step": None}
        logger.info("Extended data: their epoch %d begins at step %d", self.position["epoch"] + 1, self.step + 1)

    def advance(
        self, position: dict, epoch: float, counts: StepCounts, flops: float, seconds: float, result: StepResult
    ) -> None:
        """Count a step, skipped or not. position, epoch: after it."""
        self.step += 1
        self.position, self.epoch = position, epoch
        self.tokens += counts.num_tokens
        self.sequences += counts.num_sequences
        if counts.num_unknown and not self.unknown:
            logger.warning("Step %d: characters that are no residues: <unk>; they are counted", self.step)
        self.unknown += counts.num_unknown
        self.total_flos += flops
        self.seconds += seconds
        if result.skipped:
            self.skipped_steps += 1
            message = f"step {self.step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
            self.skipped_lately = [*self.skipped_lately, message]
            logger.warning("Skipped %s", message)
        else:
            if counts.num_targets:
                self.loss_total += result.loss
            else:
                self.steps_without_target += 1
            self.skipped_lately = []

    def keep_row(self, row: dict | None) -> None:
        """Remember a row of metrics.jsonl whose evaluation is not complete; None once it is."""
        self.unfinished_row = row

    def check_divergence(self, most: int) -> None:
        """UserError if `most` steps in a row were skipped."""
        if len(self.skipped_lately) >= most:
            steps = "; ".join(self.skipped_lately[-10:])
            raise UserError(
                f"the run has diverged: --max_skipped_steps {most} skipped in a row ({steps}); nothing is saved of "
                "them: resume from an earlier checkpoint with a lower --learning_rate or --max_grad_norm"
            )

    def saved_steps(self, flags: BatchFlags, packs: PacksPerStep) -> tuple[int | None, int | None]:
        """(total_steps, last_step) of the run that is resumed, (None, None) if its length is computed anew.

        A run of epochs keeps its total_steps, and with it the schedule. last_step is of versions that ended a run
        after a number of steps, not of records.
        """
        before = (self.arguments.get("num_train_epochs"), self.packs_per_step)
        counted_in_epochs = flags.max_steps <= 0 and self.arguments.get("max_steps", 0) <= 0
        if not counted_in_epochs or before != (flags.num_train_epochs, packs.plain):
            return None, None
        stopped = self.arguments.get("stop_at_step") is not None
        return self.resolved.get("total_steps"), None if stopped else self.resolved.get("last_step")

    def warmup_steps(self, given: float | None, total_steps: int) -> float:
        """--warmup_steps, or its default: that which the run began with."""
        if given is not None:
            return given
        default = default_warmup_steps(total_steps)
        if not self.step or self.arguments.get("warmup_steps") is not None:
            return default
        return self.resolved.get("warmup_steps", default)


def _check_position(position: dict) -> None:
    """ValueError unless this is a position in a batch plan ({"epoch": n, ...}) or streams ({"0": [n, ...], ...})."""
    if position.keys() == {f.name for f in fields(Position)}:
        for name, value in position.items():
            check_type(f"position: {name}", value, "int")
        return
    for stream, numbers in position.items():
        plain = stream.isascii() and stream.isdigit() and isinstance(numbers, list) and 0 < len(numbers) <= 5
        if not plain or not all(isinstance(n, int) and 0 <= n <= LARGEST_INT for n in numbers):
            raise ValueError(f"position: {shorten({stream: numbers})} is none")


def _check_printable(name: str, *values: Any) -> None:
    """ValueError for text with control characters, which would reach the terminal through the log."""
    for value in (name, *values):
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{shorten(name)} is {shorten(value)}: unprintable")


def plan_run(args: RunArguments, data: TrainingData, state: TrainerState, world: World) -> RunPlan:
    """Resolve packs per step, accumulation and the number of steps; all ranks together."""
    with world.raise_together():
        # A resumed run keeps its packs, on any number of ranks, unless another --tokens_per_step is given.
        keeps_packs = args.data.tokens_per_step in (None, state.arguments.get("tokens_per_step"))
        packs = packs_per_step(args.data, world.mesh, args.pack_tokens, state.packs_per_step if keeps_packs else None)
        data.check_packs(PacksPerStep.of(state.packs_per_step or packs), packs)
        total_steps, last_step = state.saved_steps(args.data, packs)
        if total_steps is None:
            total_steps = data.total_steps(packs, state.step, state.position)
    world.assert_same({"total_steps": total_steps, "packs_per_step": packs.plain})
    plan = RunPlan(
        packs_per_step=packs,
        accumulation=packs.map(lambda n: -(-n // world.mesh.dp_size)),
        total_steps=total_steps,
        warmup_steps=state.warmup_steps(args.optimizer.warmup_steps, total_steps),
        last_step=min((n for n in (args.data.max_steps, args.stop_at_step, last_step) if n and n > 0), default=None),
        eval_every=_in_steps(args.eval_steps, total_steps),
        downstream_every=_in_steps(args.downstream.eval_downstream_steps, total_steps),
        save_every=_in_steps(args.checkpoint.save_steps, total_steps),
    )
    with world.raise_together():
        if args.do_train and not plan.finished(data, state.step, state.position):
            data.check_ranks(packs, world.mesh.dp_size)
    return plan


def _in_steps(every: float | None, total: int) -> int:
    """--eval_steps and --save_steps: a number of steps, or below 1 a fraction of the run; 0 if unset."""
    if every is None:
        return 0
    return max(1, int(every * total)) if every < 1 else int(every)
