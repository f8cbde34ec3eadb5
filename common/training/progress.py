"""How far a run is, and what it has settled on: the state a checkpoint keeps, and the numbers of metrics.jsonl."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from common.cli import UserError, one_line
from common.data.loader import TrainStep
from common.data.packing import Position
from common.data.training_data import TrainingData
from common.distributed.world import World
from common.files.json_files import LARGEST_INT, check_type, shorten
from common.models.esm2.model import count_parameters
from common.training.arguments import RunArguments
from common.training.run_logger import peak_memory_gb
from common.training.step import StepResult
from common.training.task import BuiltModel, StepCounts

# Which weights a run starts from, for its log, and a warning where a directory's weights are not among them.

PATTERNS = ("model*.safetensors", "pytorch_model*.bin", "*.distcp")  # of transformers, and of a checkpoint


def describe_weights(args: RunArguments, step: int) -> str:
    """step: of the checkpoint that the run resumes from; 0: it starts anew."""
    if step:
        return f"from checkpoint-{step}"
    if not args.model.model_name_or_path:
        return f"random, seed {args.data.seed}"
    files = weight_files(args.model.model_name_or_path)
    return f"from {args.model.model_name_or_path}" + (f" ({files})" if files else "")


def warn_of_unused_weights(args: RunArguments) -> str | None:
    """The warning for --config_name, or --model, of a directory that has weights: they are not loaded."""
    if args.model.model_name_or_path or not args.model_named or not (files := weight_files(args.model_named)):
        return None
    return (
        f"{args.model_named} has weights ({files}), which are not loaded: training starts from random ones; to start "
        f"from them give --model_name_or_path {args.model_named}"
    )


def weight_files(directory: str) -> str:
    """The name of a local directory's weight file, or of the first and how many there are; "" if there is none."""
    names = next((found for pattern in PATTERNS if (found := sorted(Path(directory).glob(pattern)))), [])
    if not names:
        return ""
    return names[0].name + (f" and {len(names) - 1} more" if len(names) > 1 else "")


logger = logging.getLogger(__name__)

# May change between a run and its continuation without a word.
HARMLESS = {"resume_from_checkpoint", "overwrite_output_dir", "stop_at_step", "disable_tqdm"}


# What is used of the dicts of a checkpoint's state; the rest is compared and shown.
_SAVED = {
    "arguments": {
        "max_steps": "int",
        "num_train_epochs": "int | float",
        "model_name_or_path": "str | None",
        "stop_at_step": "int | None",
    },
    "resolved": {"total_steps": "int | None", "last_step": "int | None", "formats": "dict"},
}
_OF_A_LINE = {"total_steps", "learning_rate", "step_seconds", "data_wait_seconds"}  # that a row with a loss has


@dataclass(frozen=True)
class Resolved:
    """What flags leave open, as a run has settled it; log, results and checkpoint show it.

    formats: of the layers, where some are quantised; total_steps: of the whole run, which the schedule spans;
    last_step: that this start ends with, None where the data end; eval_every, save_every: in steps, 0 for never.
    """

    backend: str
    gelu: str
    formats: dict[str, str]
    packs_per_step: int
    accumulation: int
    total_steps: int
    last_step: int | None
    eval_every: int
    save_every: int


@dataclass
class TrainerState:
    """With the weights and the optimiser, all there is to go on from."""

    step: int = 0
    position: dict = field(default_factory=dict)  # in the data, where the next step begins
    packs_per_step: int | None = None
    epoch: float = 0.0
    tokens: int = 0  # real ones: no padding
    sequences: int = 0
    unknown: int = 0  # tokens that stand for characters that are no residues
    total_flos: float = 0.0
    loss_total: float = 0.0  # sum of the losses of the steps not skipped
    row_loss: float = 0.0  # the same since the last row of metrics.jsonl
    row_steps: int = 0  # not skipped since then
    skipped_steps: int = 0  # whose loss or gradient norm was no number: counted in `step`
    skipped_lately: list[str] = field(default_factory=list)  # what those in a row up to now looked like
    seconds: float = 0.0  # spent in steps, over all restarts
    gradient_factor: int | None = None  # how many times those of the global batch the gradients of a rank were
    unfinished_row: dict | None = None  # of metrics.jsonl: its evaluation was broken off by a signal
    data: dict = field(default_factory=dict)  # identity of the batch plan
    arguments: dict = field(default_factory=dict)
    resolved: dict = field(default_factory=dict)

    @classmethod
    def read(cls, saved: dict, where: str) -> TrainerState:
        """That of a checkpoint, which somebody else may have made. UserError unless all is of the type it must be."""
        types = {f.name: f.type for f in fields(cls)}
        try:
            for name, value in saved.items():
                if name not in types:
                    raise ValueError(f"{shorten(name)} is unknown: of a later version?")
                check_type(name, value, types[name])
            state = cls(**saved)
            if min(state.step, state.packs_per_step or 0, state.gradient_factor or 0) < 0:
                raise ValueError("a count is below 0")
            _check_position(state.position)
            for part, expected in _SAVED.items():
                for name, value in (getattr(state, part) or {}).items():
                    check_type(f"{part}: {name}", value, expected.get(name, "int | float | bool | str | None"))
                    _check_text(name, value)
            _check_text("skipped_lately", *state.skipped_lately)
            if state.unfinished_row is not None:
                _check_row(state.unfinished_row)
        except ValueError as error:
            raise UserError(f"{where}: refused: {one_line(error)}") from error
        return state

    def advance(self, share: TrainStep, counts: StepCounts, flops: float, result: StepResult, seconds: float) -> None:
        """One step further."""
        self.step += 1
        self.position, self.epoch = share.position, share.epoch
        self.tokens += counts.num_tokens  # read and computed, learned from or not
        self.sequences += counts.num_sequences
        if counts.num_unknown and not self.unknown:
            logger.warning("Step %d: characters that are no residues: <unk>; they are counted", self.step)
        self.unknown += counts.num_unknown
        self.total_flos += flops
        self.seconds += seconds
        if result.skipped:
            self.skipped_steps += 1
            seen = f"step {self.step}: loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}"
            self.skipped_lately = [*self.skipped_lately, seen]
            logger.warning("Skipped %s", seen)
        else:
            self.loss_total += result.loss
            self.row_loss += result.loss
            self.row_steps += 1
            self.skipped_lately = []

    def loss_of_row(self) -> dict:
        """`loss`, the mean over the steps since the last row, and `train_perplexity`; {} where all were skipped.

        The next row's begins here. It is part of the state: a run that was killed between two rows writes the second
        as if it had not been.
        """
        steps, total = self.row_steps, self.row_loss
        self.row_steps, self.row_loss = 0, 0.0
        return {"loss": total / steps, "train_perplexity": math.exp(min(total / steps, 700))} if steps else {}

    def check_divergence(self, most: int) -> None:
        """UserError when so many steps in a row were skipped."""
        if len(self.skipped_lately) >= most:
            seen = "; ".join(self.skipped_lately[-10:])
            raise UserError(
                f"the run has diverged: --max_skipped_steps {most} skipped in a row ({seen}); nothing is saved of "
                "them: go on from an earlier checkpoint with a lower --learning_rate or --max_grad_norm"
            )

    def steps_begun(self, flags: RunArguments, packs_per_step: int) -> tuple[int | None, int | None]:
        """Of the run that these flags go on with: its total_steps, so that its schedule stays, and where an earlier
        version of this program would have ended it, which counted steps, not records. None where there is none."""
        before = (self.arguments.get("num_train_epochs"), self.packs_per_step)
        counted_in_epochs = flags.data.max_steps <= 0 and self.arguments.get("max_steps", 0) <= 0
        if not counted_in_epochs or before != (flags.data.num_train_epochs, packs_per_step):
            return None, None
        stopped = self.arguments.get("stop_at_step") is not None
        return self.resolved.get("total_steps"), None if stopped else self.resolved.get("last_step")

    def check_same_start(self, flags: RunArguments) -> None:
        """UserError for given weights that would not be trained: the run that is there began from others."""
        given = flags.model.model_name_or_path
        before = self.arguments.get("model_name_or_path", given)
        if given and (before is None or os.path.abspath(given) != os.path.abspath(before)):
            raise UserError(
                f"--output_dir {flags.checkpoint.output_dir}: the run there began from {before or 'random weights'} "
                f"and goes on with its own, not with those of --model_name_or_path {given}: choose another "
                "--output_dir, or begin anew there with --overwrite_output_dir"
            )

    def go_on(self, identity: dict, arguments: dict, resolved: Resolved) -> None:
        """Take over what this start of the run has settled, and say which flags are others than before."""
        # Not refused (a user may well want another --save_steps), but said.
        arguments = {k: v for k, v in arguments.items() if isinstance(v, str | int | float | bool | None)}
        arguments |= {"backend": resolved.backend, "gelu": resolved.gelu}
        saved = self.arguments
        changed = [
            f"{k} {saved[k]} -> {v}" for k, v in arguments.items() if k not in HARMLESS and saved.get(k, v) != v
        ]
        if changed:
            logger.warning("Flags differ from those of the checkpoint: %s", ", ".join(changed))
        self.data, self.arguments, self.resolved = identity, arguments, asdict(resolved)
        self.packs_per_step = resolved.packs_per_step


def _check_position(position: dict) -> None:
    """ValueError unless this is a place in a batch plan ({"epoch": n, ...}) or in streams ({"0": [n, ...], ...})."""
    if position.keys() == {f.name for f in fields(Position)}:
        for name, value in position.items():
            check_type(f"position: {name}", value, "int")
        return
    for stream, at in position.items():
        plain = stream.isascii() and stream.isdigit() and isinstance(at, list) and 0 < len(at) <= 5
        if not plain or not all(isinstance(n, int) and 0 <= n <= LARGEST_INT for n in at):
            raise ValueError(f"position: {shorten({stream: at})} is none")


def _check_text(name: str, *values: Any) -> None:
    """ValueError for a text that would rule the terminal it is logged to."""
    for value in (name, *values):
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"{shorten(name)} is {shorten(value)}: unprintable")


def _check_row(row: dict) -> None:
    """ValueError unless this can be a row of metrics.jsonl."""
    for name, value in row.items():
        check_type(f"unfinished_row: {name}", value, "str" if name == "slowest_host" else "int | float")
    if "step" not in row or ("loss" in row and not row.keys() >= _OF_A_LINE):
        raise ValueError("unfinished_row is no row of metrics")


def check_same_data(saved: dict, now: dict, earlier: Callable[[], dict] = dict) -> None:
    """UserError naming what differs, unless a position in the one batch plan is valid in the other.

    earlier: gives {name: value} where checkpoints of earlier versions have another one for the same data.
    """
    if saved != now:
        saved = saved | {
            name: now[name] for name, value in earlier().items() if name in now and saved.get(name) == value
        }
    if "dataset" in saved and saved["dataset"] != now["dataset"]:
        before, after = _short(saved["dataset"]), _short(now["dataset"])
        raise UserError(
            f"the data have changed since the checkpoint (their hash was {before}; now {after}): give those it was "
            "trained on, or start a new run from its final_model/ with --model_name_or_path and another --output_dir"
        )
    differing = [f"{k} {saved.get(k)!r} (now {v!r})" for k, v in now.items() if saved.get(k) != v]
    differing += [f"{k} {v!r} (now not used)" for k, v in saved.items() if k not in now]
    if differing:
        raise UserError(
            f"the checkpoint stands in another order of batches: {', '.join(differing)}; give the same flags, or "
            "start a new run from its final_model/ with --model_name_or_path and another --output_dir"
        )


def _short(identity: str) -> str:
    """The beginning of a hash, and the number of records that may follow it."""
    digest, _, records = str(identity).partition("-")
    return f"{digest[:12]}, {records} records" if records else digest[:12]


def announce(
    args: RunArguments, built: BuiltModel, data: TrainingData, resolved: Resolved, state: TrainerState, world: World
) -> None:
    """How a run begins, for the log."""
    per_rank, unit = args.batch
    in_all = per_rank * resolved.packs_per_step
    logger.info("***** Running training *****" if args.do_train else "***** No training *****")
    for name, value in (
        ("Num examples", data.num_examples or "not counted: they are streamed"),
        ("Num Epochs", _epochs(args.data.num_train_epochs, data)),
        (f"Instantaneous batch size per device ({unit})", per_rank),
        (f"Total train batch size (w. parallel, distributed & accumulation; {unit})", in_all),
        ("Gradient Accumulation steps", resolved.accumulation),
        ("Total optimization steps", resolved.total_steps),
        ("Number of trainable parameters", count_parameters(built.model)),
    ):
        logger.info("  %s = %s", name, f"{value:,}" if isinstance(value, int) else value)
    logger.info("  Weights: %s", describe_weights(args, state.step))
    if not state.step and (warning := warn_of_unused_weights(args)):
        logger.warning("%s", warning)
    for line in built.remarks:
        logger.info("  %s", line)
    precision = "bfloat16, fp32 master weights" if args.precision.bf16 else "fp32"
    logger.info("  Device = %s x %d, computing in %s", world.device.type, world.size, precision)
    if world.cp_size > 1:
        logger.info(
            "  Each pack is shared by %d ranks (%s, %s)", world.cp_size, args.model.cp_comm_type, args.data.cp_layout
        )
    if state.step:
        logger.info("Resuming after step %d (epoch %.2f)", state.step, state.epoch)
    if resolved.accumulation != args.data.gradient_accumulation_steps:
        logger.info("Accumulation is %d, to keep %d packs a step", resolved.accumulation, resolved.packs_per_step)


def about_run(args: RunArguments, built: BuiltModel, words: tuple[str, ...], world: World) -> dict:
    """What stands above its curves."""
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type
    return {
        "model": f"{args.model_named or built.config.model_type} ({count_parameters(built.model):,} parameters)",
        "data": str(args.data.dataset_dir or args.data.dataset),
        "device": f"{device} x {world.size}, {'bf16' if args.precision.bf16 else 'fp32'}",
        "words": list(words),
    }


def _epochs(wanted: float, data: TrainingData) -> int | str:
    if (end := data.end) is None:
        return "as --max_steps says"
    found = data.plan.epochs_before(end)
    return int(wanted) if wanted == found else f"{wanted:g}: to the nearest pack, {found:.6g}"


@dataclass
class Interval:
    """Sums since the last row of metrics, or since this start of the run."""

    tokens: int = 0
    computed: int = 0  # tokens that the layers ran on
    flops: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    forward_backward: float = 0.0
    optimizer: float = 0.0
    checkpoints: float = 0.0  # seconds that training stood still for them
    steps: int = 0
    ranks: dict = field(default_factory=dict)  # the last comparison of the ranks, extras/monitor/stragglers.py

    def add(self, counts: StepCounts, flops: float, seconds: float, waited: float, result: StepResult) -> None:
        self.tokens += counts.num_tokens
        self.computed += counts.num_computed
        self.flops += flops
        self.seconds += seconds
        self.waited += waited
        self.forward_backward += result.forward_backward
        self.optimizer += result.optimizer
        self.steps += 1

    def row(
        self, state: TrainerState, total_steps: int, lr: float, result: StepResult, world: World, peak: float | None
    ) -> dict:
        """The row of metrics.jsonl after the step just taken; without that one's loss and norm if it was skipped.

        The next row's mean loss begins here, with the caller's next interval.
        peak: the device's, in FLOP/s, None where it is not known.
        """
        seconds = max(self.seconds, 1e-9)
        flops = self.flops / seconds / world.size
        row = {
            "step": state.step,
            "total_steps": max(total_steps, state.step),
            "epoch": state.epoch,
            **state.loss_of_row(),
            **({} if result.skipped else {"step_loss": result.loss, "grad_norm": result.grad_norm}),
            "learning_rate": lr,
            "tokens": state.tokens,
            "unknown_characters": state.unknown,
            "tokens_per_second": self.tokens / seconds,
            "tokens_per_second_per_gpu": self.computed / seconds / world.size,
            "unpadded_tokens_per_second_per_gpu": self.tokens / seconds / world.size,
            "step_seconds": seconds / self.steps,
            "data_wait_seconds": self.waited / self.steps,
            "forward_backward_seconds": self.forward_backward / self.steps,
            "optimizer_seconds": self.optimizer / self.steps,
            "checkpoint_seconds": self.checkpoints,
            "skipped_steps": state.skipped_steps,
            "tflops_per_device": flops / 1e12,
            "peak_memory_gb": peak_memory_gb(world.device),
        }
        return row | self.ranks | ({"mfu": flops / peak} if peak else {})
