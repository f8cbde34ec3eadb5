"""The flags of a training run, one dataclass a concern. Names and meanings are those of transformers' run_mlm.py and
TrainingArguments wherever the two have the flag; what cannot be honoured is not here, and an unknown flag is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec

from common.cli import UserError, flag
from common.model.backend import BACKENDS
from common.precision.plan import FP8_RECIPES, recipes
from common.precision.stats_plan import check_flags
from common.training.optim import lr_schedule
from common.training.profiling import parse_steps


@dataclass
class ModelArguments:
    config_name: str | None = flag(
        None, "Train from random weights: facebook/esm2_* (built in), a directory with config.json, a Hub name."
    )
    model_name_or_path: str | None = flag(
        None, "Start from these weights: a directory (say final_model/) or a Hub name."
    )
    config_overrides: str | None = flag(
        None, "Change the configuration of --config_name: num_hidden_layers=2,hidden_size=64,..."
    )
    tokenizer_name: str | None = flag(
        None, "Accepted for the guides' sake: the vocabulary is ESM-2's, and a directory with another one is refused."
    )
    backend: str = flag(
        "auto",
        "Encoder layers by te (Transformer Engine; NVIDIA GPUs) or torch (any device). auto: te if it is there.",
    )
    gelu: str | None = flag(
        None, "exact (ESM-2's own) or tanh (an approximation, Transformer Engine's only one). Default: the backend's."
    )


@dataclass
class DataArguments:
    dataset_dir: str | None = flag(None, "The directory step 1 wrote: .../processed/arrow, with train and validation.")
    dataset: str | None = flag(
        None,
        "Instead of --dataset_dir, proteins as they are: a file, directory or glob of parquet, JSON lines, CSV or "
        "FASTA (column sequence or text), or a Hub dataset. Needs --max_steps.",
    )
    streaming: bool = flag(False, "Read a Hub --dataset in place, instead of downloading it first.")
    eval_dataset: str | None = flag(None, "Held-out proteins for --do_eval, where --dataset has no validation files.")
    sample_clusters: bool = flag(
        False, "Draw UniRef50 clusters, then a member of each, as ESM-2 was trained (step 1's --cluster_table)."
    )
    max_seq_length: int = flag(1024, "Tokens, <cls> and <eos> included; longer proteins are cropped at random.")
    sequence_packing: bool | None = flag(
        None, "Lay sequences end to end, no padding. Default: on, unless --pad_to_max_length."
    )
    tokens_per_pack: int | None = flag(
        None, "Tokens in a pack. Default: --per_device_train_batch_size x --max_seq_length."
    )
    pad_to_max_length: bool = flag(False, "Padded batches of --max_seq_length (without packing: of the longest).")
    mlm_probability: float = flag(0.15, "Fraction of residues to predict; 80 % become <mask>, 10 % another residue.")
    max_train_samples: int | None = flag(None, "Train on the first N proteins only.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N proteins only.")
    do_preprocess: bool = flag(False, "Accepted for the guides' sake; preprocessing is 1.tokenize_uniref_csv.py.")
    dataloader_num_workers: int = flag(1, "Processes that prepare batches; the batches do not depend on it.")
    dataloader_prefetch_factor: int = flag(4, "Steps that each worker prepares ahead.")
    dataloader_pin_memory: bool = flag(True, "Pinned host memory for faster copies to the GPU.")

    @property
    def packing(self) -> bool:
        return not self.pad_to_max_length if self.sequence_packing is None else self.sequence_packing


@dataclass
class PrecisionArguments:
    fp8: bool = flag(False, "Compute encoder layers in FP8 (docs/precision.md).")
    fp8_recipe: str = flag("delayed", f"Where FP8's scales come from: {', '.join(FP8_RECIPES)}.")
    fp8_format: str | None = flag(
        None, "hybrid (E4M3, gradients E5M2) or e4m3. Default: hybrid; e4m3 for block and mxfp8."
    )
    fp8_layers: str | None = flag(None, "Layers in FP8, counted from 1: 1-3,6. Default: all that --fp4 leaves.")
    fp8_recipe_kwargs: str | None = flag(None, 'Arguments of the recipe as JSON: {"amax_history_len": 16}.')
    fp8_params: bool = flag(False, "Keep the weights of those layers in FP8 on the GPU, beside fp32 masters.")
    fp4: bool = flag(False, "Compute encoder layers in NVFP4.")
    fp4_format: str = flag("e2m1", "FP4's only format.")
    fp4_layers: str | None = flag(None, "Layers in NVFP4, counted from 1. Default: all that --fp8 leaves.")
    fp4_recipe_kwargs: str | None = flag(None, 'Arguments of the recipe as JSON: {"disable_rht": true}.')
    emulate_precision: bool = flag(False, "Round as those formats do, in plain PyTorch, on any device.")
    quant_stats: bool = flag(False, "Log statistics of the quantised tensors: underflow, scales, error, norms.")
    quant_stats_freq: int | None = flag(None, "Every so many steps. Default: as the file says, 10 without one.")
    quant_stats_dir: str | None = flag(None, "Where quant_stats.jsonl goes. Default: --output_dir.")
    quant_stats_file: str | None = flag(
        None, "Which layers, tensors and statistics: YAML as Transformer Engine's debug configuration."
    )


@dataclass
class TrainArguments(ModelArguments, DataArguments, PrecisionArguments):
    output_dir: str | None = flag(None, "Where checkpoints, metrics and final_model/ go.")
    overwrite_output_dir: bool = flag(
        False, "Remove an earlier run's files there and start at step 0 (a restart of this very job still resumes)."
    )
    do_train: bool = flag(True, "Train.")
    do_eval: bool = flag(False, "Evaluate on the validation split, and at the end on the test split too.")
    seed: int = flag(42, "Everything random follows from it: weights, order, crops, masks.")

    num_train_epochs: float = flag(3.0, "Passes over the training split.")
    max_steps: int = flag(-1, "Optimiser steps; overrides --num_train_epochs.")
    stop_at_step: int | None = flag(None, "Save and end after this step; the schedule still spans the whole run.")
    per_device_train_batch_size: int = flag(8, "Sequences in a padded batch; scales a pack when packing.")
    per_device_eval_batch_size: int = flag(8, "The same for evaluation.")
    gradient_accumulation_steps: int = flag(1, "Packs (batches) a rank adds up before an optimiser step.")
    packs_per_step: int | None = flag(
        None, "Packs (batches) in a global step. Default: ranks x --gradient_accumulation_steps. Kept on resume."
    )

    learning_rate: float = flag(4e-4, "Peak learning rate (ESM-2: 4e-4; 15B: 1.6e-4).")
    lr_scheduler_type: str = flag(
        "esm2", "esm2 (linear to a tenth at 90 % of the run), linear, cosine, constant, constant_with_warmup, ..."
    )
    warmup_steps: float | None = flag(None, "Steps, or a fraction of the run below 1. Default: 2000, at most 5 %.")
    weight_decay: float = flag(0.01, "On matrices and embeddings; never on biases and norms.")
    adam_beta1: float = flag(0.9, "AdamW's first moment.")
    adam_beta2: float = flag(0.98, "AdamW's second moment.")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this; 0: don't.")

    max_skipped_steps: int = flag(
        5, "A step whose loss or gradient norm is no number is skipped; after this many in a row the run stops."
    )

    bf16: bool = flag(False, "Compute in bfloat16; weights, gradients and optimiser stay fp32.")
    tf32: bool | None = flag(None, "Allow TF32 for fp32 matrix products (NVIDIA Ampere and later).")
    torch_compile: bool = flag(False, "Compile the layers (needs a C++ compiler on a CPU).")
    use_cpu: bool = flag(False, "Train on the CPU even where there is a GPU.")
    ddp_timeout: int = flag(1800, "Seconds after which a rank that hangs ends the run, and is named.")

    logging_steps: int = flag(10, "Steps between log lines and rows of metrics.jsonl.")
    eval_steps: float | None = flag(None, "Evaluate every N steps (below 1: a fraction of the run), with --do_eval.")
    eval_on_start: bool = flag(False, "Evaluate before the first step, with --do_eval.")
    save_steps: float = flag(500, "Steps between checkpoints (below 1: a fraction of the run).")
    save_minutes: float | None = flag(None, "Save also when so many minutes have passed since the last checkpoint.")
    save_total_limit: int | None = flag(None, "Keep the newest N checkpoints.")
    save_final_model: bool | None = flag(
        None,
        "Export final_model/ for transformers. Default: once all steps are done; True: at any end of the run.",
    )
    async_save: bool = flag(True, "Write checkpoints in the background.")
    resume_from_checkpoint: str | None = flag(
        None, "A checkpoint directory; `false`: none. Default: the newest complete one of --output_dir."
    )
    straggler_every: int = flag(100, "Steps between comparisons of the ranks' own work; the slowest is named. 0: off.")
    profile_steps: str | None = flag(None, "Write a torch profiler trace of the steps A-B under output_dir/profile/.")
    report_to: str = flag("none", "none, tensorboard or wandb (each must be installed).")
    run_name: str | None = flag(None, "Name of the run for --report_to.")
    disable_tqdm: bool = flag(False, "No progress bar.")

    def __post_init__(self) -> None:
        self._require("output_dir", self.output_dir, "where the results go")
        if not self.dataset:
            self._require("dataset_dir", self.dataset_dir, "the processed/arrow that 1.tokenize_uniref_csv.py wrote")
        if self.dataset and self.dataset_dir:
            raise UserError("--dataset (files as they are) excludes --dataset_dir (the output of step 1)")
        if (self.streaming or self.eval_dataset) and not self.dataset:
            raise UserError("--streaming and --eval_dataset go with --dataset")
        if self.dataset and self.sample_clusters:
            raise UserError("--sample_clusters needs --dataset_dir, tokenised with --cluster_table")
        if self.dataset and self.max_train_samples:
            raise UserError("--max_train_samples needs --dataset_dir: a --dataset is not counted; use --max_steps")
        if self.config_name and self.model_name_or_path:
            raise UserError("--config_name (random weights) excludes --model_name_or_path (given weights)")
        if not self.config_name and not self.model_name_or_path:
            raise UserError("--config_name is missing: the model to train, say facebook/esm2_t6_8M_UR50D")
        if self.config_overrides and not self.config_name:
            raise UserError("--config_overrides changes --config_name; it cannot change --model_name_or_path")
        if self.do_preprocess:
            raise UserError("--do_preprocess: run 1.tokenize_uniref_csv.py first and pass its output as --dataset_dir")
        if self.pad_to_max_length and self.sequence_packing:
            raise UserError("--pad_to_max_length and --sequence_packing exclude each other")
        if self.tokens_per_pack is not None and not self.packing:
            raise UserError("--tokens_per_pack needs packing: drop --pad_to_max_length or --sequence_packing False")
        if self.packing and self.tokens_per_pack is None:
            self.tokens_per_pack = self.per_device_train_batch_size * self.max_seq_length
        if self.packing and self.tokens_per_pack < self.max_seq_length:
            raise UserError(
                f"--tokens_per_pack {self.tokens_per_pack} is less than one sequence of --max_seq_length "
                f"{self.max_seq_length}: raise the one or lower the other"
            )
        if (self.eval_steps or self.eval_on_start) and not self.do_eval:
            raise UserError("--eval_steps and --eval_on_start need --do_eval")
        for name, least in (
            ("max_seq_length", 3),
            ("per_device_train_batch_size", 1),
            ("per_device_eval_batch_size", 1),
            ("gradient_accumulation_steps", 1),
            ("logging_steps", 1),
            ("dataloader_num_workers", 0),
            ("dataloader_prefetch_factor", 1),
            ("ddp_timeout", 1),
            ("max_skipped_steps", 1),
            ("straggler_every", 0),
        ):
            if getattr(self, name) < least:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least {least}")
        for name in ("max_train_samples", "max_eval_samples", "packs_per_step", "stop_at_step", "save_total_limit"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 1")
        for name in ("save_steps", "save_minutes", "eval_steps"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise UserError(f"--{name} {getattr(self, name)}: must be above 0")
        if not 0 < self.mlm_probability < 1:
            raise UserError(f"--mlm_probability {self.mlm_probability}: must be between 0 and 1")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise UserError("nothing to train: --max_steps and --num_train_epochs are both zero or below")
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 0 and below 1")
        recipes(self)
        if self.profile_steps:
            parse_steps(self.profile_steps)
        check_flags(self)
        lr_schedule(self, total_steps=1000)  # an unknown --lr_scheduler_type is a UserError
        for name, choices in (("backend", BACKENDS), ("gelu", (None, "exact", "tanh"))):
            if getattr(self, name) not in choices:
                raise UserError(f"--{name} {getattr(self, name)}: choose {', '.join(c for c in choices if c)}")
        if self.report_to not in ("none", "tensorboard", "wandb"):
            raise UserError(f"--report_to {self.report_to}: must be none, tensorboard or wandb")
        if self.report_to != "none" and find_spec(self.report_to) is None:
            raise UserError(f"--report_to {self.report_to}: not installed: pip install {self.report_to}")

    @staticmethod
    def _require(name: str, value: str | None, what: str) -> None:
        if not value:
            raise UserError(f"--{name} is missing: {what}")
