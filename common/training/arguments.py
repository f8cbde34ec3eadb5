"""The flags of a training run of any task: one dataclass per concern, nested in `RunArguments`.

Names and meanings are those of transformers' run_mlm.py and TrainingArguments wherever the two have the flag. Flags
of theirs that cannot be honoured do not exist here: an unknown flag is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from common.checkpoint.checkpointer import CheckpointFlags
from common.cli import UserError
from common.data.flags import BatchFlags
from common.distributed.process_group import ProcessFlags
from common.distributed.strategy import StrategyFlags
from common.flags import Flags, Missing, flag
from common.hooks import extra
from common.models.family import Family
from common.models.layers.backend import BackendFlags
from common.precision import PrecisionFlags
from common.training.optim import OptimizerFlags
from common.training.run_logger import LogFlags


@dataclass(frozen=True)
class DryRunFlags(Flags):
    """What a run would need on so many ranks, estimated without a GPU and without data."""

    group = "dry run"
    advanced = ("world_size", "device_memory")
    unlisted = ("gpu", "price_per_gpu_hour")
    file_only = ("device_reserve",)

    dry_run: bool = flag(
        False,
        "To see what a run needs: train nothing, print the memory of each of --world_size ranks, and days of "
        "ESM-2, without GPUs or data.",
    )
    world_size: int | None = flag(None, "With --dry_run, to plan for several GPUs: ranks. Default: 1.")
    device_memory: float | None = flag(
        None, "With --dry_run, GiB of a device (H100: 80), to see whether it fits and how large a pack would."
    )
    device_reserve: float = flag(
        5.0, "GiB of --device_memory that are left to the CUDA context, NCCL and the allocator's gaps."
    )

    gpu: str | None = flag(
        None,
        "With --dry_run: the GPUs of the estimated time. Default: H100.",
        choices=("A100", "H100", "H200", "B200"),
    )
    price_per_gpu_hour: float | None = flag(None, "With --dry_run: of one GPU, in any currency, for the run's price.")

    @property
    def device_bytes(self) -> int | None:
        return int(self.device_memory * (1 << 30)) if self.device_memory else None

    def missing(self) -> Iterator[Missing]:
        if not self.dry_run and (self.world_size or self.device_memory):
            yield Missing("--dry_run", "--world_size and --device_memory go with it: torchrun starts real ranks")
        if not self.dry_run and (self.gpu or self.price_per_gpu_hour is not None):
            yield Missing("--dry_run", "--gpu and --price_per_gpu_hour go with it")

    def check(self) -> None:
        self.require_at_least(1, "world_size")
        self.require_above(0, "device_memory")
        self.require_at_least(0, "device_reserve", "price_per_gpu_hour")


@dataclass(frozen=True)
class LearningRateFlags(Flags):
    """Flags of the search for a learning rate (extras/plan/find_learning_rate/)."""

    group = "optimiser"
    advanced = ("find_learning_rate",)
    unlisted = ("find_steps", "find_minutes")

    find_learning_rate: bool = flag(
        False, "To choose --learning_rate: train nothing, compare short runs at rates around it, and recommend one."
    )
    find_steps: int | None = flag(None, "With --find_learning_rate: steps of each short run. Default: 100.")
    find_minutes: float | None = flag(
        None, "With --find_learning_rate: start no further short run after so many minutes. Default: 10."
    )

    def missing(self) -> Iterator[Missing]:
        if not self.find_learning_rate and (self.find_steps or self.find_minutes):
            yield Missing("--find_learning_rate", "--find_steps and --find_minutes go with it")

    def check(self) -> None:
        self.require_at_least(1, "find_steps")
        self.require_above(0, "find_minutes")


@dataclass(frozen=True)
class DownstreamFlags(Flags):
    """Flags of evaluations beside the held-out loss (extras/after/downstream/)."""

    group = "training and evaluation"
    unlisted = ("eval_contacts", "eval_mutations", "eval_probe", "eval_downstream_steps")

    eval_contacts: str | None = flag(
        None,
        "With --do_eval: a directory of PDB or mmCIF files. Fit a contact head on 20 of their chains, evaluate it on "
        "the others, and export it with final_model.",
    )
    eval_mutations: list[str] | None = flag(
        None,
        "With --do_eval: CSV files with ProteinGym's columns. Evaluate the correlation of scores of mutations with "
        "what was measured.",
    )
    eval_probe: list[str] | None = flag(
        None,
        "With --do_eval: CSV files with the columns sequence and label, and possibly split. Fit a linear probe from "
        "embeddings to the labels, evaluate it on held-out proteins.",
    )
    eval_downstream_steps: float | None = flag(
        None, "Do so every N steps (below 1: a fraction of the run). Default: only at the end."
    )

    @property
    def given(self) -> list[str]:
        """The evaluations that are asked for."""
        names = ("eval_contacts", "eval_mutations", "eval_probe")
        return [f"--{name}" for name in names if getattr(self, name)]

    def missing(self) -> Iterator[Missing]:
        if self.eval_downstream_steps and not self.given:
            yield Missing("--eval_contacts", "--eval_downstream_steps says when", "structures")

    def check(self) -> None:
        self.require_above(0, "eval_downstream_steps")


@dataclass(frozen=True)
class BestFlags(Flags):
    group = "training and evaluation"
    unlisted = ("metric_for_best_model", "early_stopping_patience")

    load_best_model_at_end: bool = flag(
        False,
        "If the held-out loss may rise again: save at each best evaluation; at the end load that model, which "
        "results and final_model/ are then of.",
    )
    metric_for_best_model: str | None = flag(
        None, "A result of evaluations. Default: eval_loss_masked; of a decoder eval_loss."
    )
    early_stopping_patience: int | None = flag(None, "End after so many evaluations in a row that are no better.")

    @property
    def given(self) -> str | None:
        """The flag for which evaluations are compared, if any."""
        names = ("load_best_model_at_end", "early_stopping_patience")
        return next((f"--{name}" for name in names if getattr(self, name)), None)

    def missing(self) -> Iterator[Missing]:
        if self.metric_for_best_model is not None and not self.given:
            what = "--metric_for_best_model is for it, or for --early_stopping_patience"
            yield Missing("--load_best_model_at_end", what)

    def check(self) -> None:
        self.require_at_least(1, "early_stopping_patience")


@dataclass(frozen=True)
class RunArguments(Flags, ABC):
    """Flags of a run of any task. A task narrows `model`, `data` and `optimizer`; the script brings its `strategy`."""

    group = "training and evaluation"
    unlisted = ("eval_on_start", "stop_after_minutes", "save_final_model", "hub_model_id", "yes")

    model: BackendFlags = field(default_factory=BackendFlags)
    data: BatchFlags = field(default_factory=BatchFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    precision: PrecisionFlags = field(default_factory=PrecisionFlags)
    process: ProcessFlags = field(default_factory=ProcessFlags)
    checkpoint: CheckpointFlags = field(default_factory=CheckpointFlags)
    log: LogFlags = field(default_factory=LogFlags)
    dry_run: DryRunFlags = field(default_factory=DryRunFlags)
    find: LearningRateFlags = field(default_factory=LearningRateFlags)
    downstream: DownstreamFlags = field(default_factory=DownstreamFlags)
    best: BestFlags = field(default_factory=BestFlags)
    strategy: StrategyFlags = field(default_factory=StrategyFlags)

    task: str = flag(
        "mlm",
        "Masked language modelling (ESM-2), or causal for a decoder (docs/decoders.md). Default: clm with --model, "
        "--model_type or a decoder's weights.",
        choices=("mlm", "clm"),
    )
    do_train: bool = flag(True, "Train; False: to evaluate given weights only, with --do_eval.")
    do_eval: bool = flag(
        False, "To measure unseen proteins: evaluate on the validation split, and at the end on the test split too."
    )
    eval_steps: float | None = flag(
        None, "To follow the held-out loss: evaluate every N steps (below 1: a fraction of the run), with --do_eval."
    )
    eval_on_start: bool = flag(False, "Evaluate before the first step, with --do_eval.")
    stop_at_step: int | None = flag(
        None, "To do a run in parts: save and end after this step; the schedule still spans the whole run."
    )
    stop_after_minutes: float | None = flag(
        None,
        "Save, evaluate and end after so many minutes of this start; the schedule still spans the whole run. 0: no "
        "limit.",
    )
    save_final_model: bool | None = flag(
        None, "Export final_model/ for transformers. Default: once all steps are done; True: at any end of the run."
    )
    hub_model_id: str | None = flag(
        None,
        "OWNER/NAME: upload final_model/ to the Hub after it is exported, with HF_TOKEN; a new repository is private.",
    )
    yes: bool = flag(False, "Begin, on a terminal, a run that takes more than a day by the time of its first steps.")

    @property
    def optional(self) -> tuple[str, ...]:
        return ("--dataset_dir", "--dataset", "--max_steps", "--output_dir") if self.dry_run.dry_run else ()

    @property
    def model_named(self) -> str | None:
        """What the flags call the model."""
        return self.model.model_name_or_path

    @property
    @abstractmethod
    def family(self) -> Family:
        """The family of the model."""

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a pack."""
        return self.data.pack_tokens

    def with_pack(self, build: Any) -> Self:
        """A copy in which the size of a pack is a number. build: the script's (common.training.task.Build)."""
        return extra().largest_pack(self, build) if getattr(self.data, "tokens_per_pack", None) == "auto" else self

    @property
    def batch(self) -> tuple[int, str]:
        """The size of a pack, and its unit."""
        data = self.data
        return (self.pack_tokens, "tokens") if data.packing else (data.per_device_train_batch_size, "sequences")

    def missing(self) -> Iterator[Missing]:
        if self.process.cp_size == 1 and (
            self.data.cp_layout != "dual_chunk" or self.data.pad_sequences_to_be_divisible_by
        ):
            yield Missing("--cp_size", "--cp_layout and --pad_sequences_to_be_divisible_by go with it", "2")
        if (self.eval_steps or self.eval_on_start) and not self.do_eval:
            yield Missing("--do_eval", "--eval_steps and --eval_on_start need it")
        if self.best.given and not self.eval_steps:
            yield Missing("--eval_steps", f"{self.best.given} compares evaluations", "100")
        if self.downstream.given and not self.do_eval:
            yield Missing("--do_eval", f"{self.downstream.given[0]} needs it")
        yield from self.strategy.missing_in(self)

    def check(self) -> None:
        self.require_at_least(1, "stop_at_step")
        self.require_at_least(0, "stop_after_minutes")
        self.require_above(0, "eval_steps")
        cp_size, layout = self.process.cp_size, self.data.cp_layout
        multiple = self.data.pad_sequences_to_be_divisible_by
        if multiple is not None and layout == "contiguous":
            raise UserError(
                "--pad_sequences_to_be_divisible_by: --cp_layout contiguous pads nothing: drop one of them"
            )
        if multiple is not None and (multiple < 1 or multiple % (2 * cp_size)):
            raise UserError(
                f"--pad_sequences_to_be_divisible_by {multiple}: a sequence is cut into 2 x --cp_size chunks: give a "
                f"multiple of {2 * cp_size}"
            )
        if any(getattr(self.model, name) != getattr(BackendFlags, name) for name in BackendFlags.adapters):
            extra().lora().check_run(self)
        if self.hub_model_id is not None:
            extra().check_push(self.hub_model_id)
        if self.find.find_learning_rate and self.dry_run.dry_run:
            raise UserError("--find_learning_rate and --dry_run exclude each other")
        if cp_size > 1 and self.precision.fp8_params:
            raise UserError("--fp8_params with --cp_size: not tested on any GPU yet: drop one of the two")
        self.strategy.check_in(self)
