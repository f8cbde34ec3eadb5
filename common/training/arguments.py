"""The flags of a training run: each room's own, and those of the run as a whole; ESM-2's are `TrainArguments`.

Names and meanings are those of transformers' run_mlm.py and TrainingArguments wherever the two have the flag; what
cannot be honoured is not here, and an unknown flag is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.cli import Flags, Missing, UserError, flag
from common.data.flags import DataFlags, StepFlags
from common.distributed.context_parallel import LAYOUTS
from common.distributed.run import ProcessFlags
from common.models.esm2.family import ModelFlags
from common.training.checkpoint import CheckpointFlags
from common.training.optim import OptimizerFlags
from common.training.run_logger import LogFlags
from extras.quant_stats.stats_plan import StatsFlags

# The flags of a dry run: what a run on so many ranks would hold, without a GPU and without data.


@dataclass
class DryRunFlags(Flags):
    group = "dry run"
    rarely = ("device_reserve",)

    dry_run: bool = flag(
        False, "Train nothing: print what each of --world_size ranks would hold in memory, without GPUs or data."
    )
    world_size: int | None = flag(None, "With --dry_run: the number of ranks. Default: 1.")
    device_memory: float | None = flag(
        None, "With --dry_run: GiB of memory of a device (H100: 80). Does it fit, and how large a pack would?"
    )
    device_reserve: float = flag(
        5.0, "GiB of --device_memory that are left to the CUDA context, NCCL and the allocator's gaps."
    )

    @property
    def does_without(self) -> tuple[str, ...]:
        return ("--dataset_dir", "--dataset", "--max_steps", "--output_dir") if self.dry_run else ()

    @property
    def state_on_host(self) -> bool:
        """Whether weights, gradients and moments are kept in host memory: a strategy's flags may say so."""
        return False

    def missing(self) -> Iterator[Missing]:
        if not self.dry_run and (self.world_size or self.device_memory):
            yield Missing("--dry_run", "--world_size and --device_memory go with it: torchrun starts real ranks")

    def check(self) -> None:
        self.require_at_least(1, "world_size")
        self.require_above(0, "device_memory")
        self.require_at_least(0, "device_reserve")


@dataclass
class RunArguments(DryRunFlags, LogFlags, CheckpointFlags, ProcessFlags, StatsFlags, OptimizerFlags, StepFlags):
    """Of a run of any task."""

    group = "training and evaluation"

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
        if self.cp_size == 1 and (self.cp_layout != "dual_chunk" or self.pad_sequences_to_be_divisible_by):
            yield Missing("--cp_size", "--cp_layout and --pad_sequences_to_be_divisible_by go with it", "2")
        if (self.eval_steps or self.eval_on_start) and not self.do_eval:
            yield Missing("--do_eval", "--eval_steps and --eval_on_start need it")

    def check(self) -> None:
        self.require_at_least(1, "stop_at_step")
        self.require_above(0, "eval_steps")
        self.require_choice("cp_layout", LAYOUTS)
        multiple = self.pad_sequences_to_be_divisible_by
        if multiple is not None and self.cp_layout == "contiguous":
            raise UserError(
                "--pad_sequences_to_be_divisible_by: --cp_layout contiguous pads nothing: drop one of them"
            )
        if multiple is not None and (multiple < 1 or multiple % (2 * self.cp_size)):
            raise UserError(
                f"--pad_sequences_to_be_divisible_by {multiple}: a sequence is cut into 2 x --cp_size chunks: give a "
                f"multiple of {2 * self.cp_size}"
            )
        if self.cp_size > 1 and self.fp8_params:
            raise UserError("--fp8_params with --cp_size: not tried on any GPU yet: drop one of the two")


@dataclass
class TrainArguments(RunArguments, DataFlags, ModelFlags):
    """Of masked language modelling with ESM-2."""

    @property
    def model_named(self) -> str:
        return self.config_name or self.model_name_or_path

    @property
    def pack_tokens(self) -> int:
        """How long a pack may be."""
        return self.tokens_per_pack or self.per_device_train_batch_size * self.max_seq_length

    @property
    def batch(self) -> tuple[int, str]:
        """How much a pack is, and of what."""
        return (self.tokens_per_pack, "tokens") if self.packing else (self.per_device_train_batch_size, "sequences")
