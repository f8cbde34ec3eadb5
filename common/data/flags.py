"""The flags of the data: which proteins to train on, and how data of any kind become batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from common.cli import UserError
from common.data import GAPS_HELP, LONGEST_PROTEIN, Gaps, Policy, check_record_length
from common.data.packs_per_step import PacksPerStep
from common.flags import Flags, Missing, flag, with_flags

if TYPE_CHECKING:  # the scripts that prepare data read --max_record_length, and need no torch
    from common.distributed.world import World

NAMED = re.compile(r"[A-Za-z]\w*=")  # of a held-out set
# First words of an evaluation's results, which the name of a held-out set may not be.
RESULTS = {
    *("accuracy", "below", "clusters", "contacts", "homologs", "kept", "loss", "masked", "mutations", "neighbours"),
    *("perplexity", "predecessors", "probe", "random", "runtime", "samples", "selected", "steps", "test", "tokens"),
    *("nelbo", "train", "unigram"),
}
STEPS_AHEAD = 4  # that each worker prepares


@dataclass(frozen=True)
class BatchFlags(Flags):
    """How data of any kind become steps: batch sizes, number of steps, workers."""

    group = "batches"
    advanced = ("dataloader_num_workers",)
    unlisted = ("pad_sequences_to_be_divisible_by", "per_device_eval_batch_size", "packs_per_step")
    file_only = ("cp_layout", "packs_per_step_schedule")

    cp_layout: str = flag(
        "dual_chunk",
        "With --cp_size: each rank has two chunks of a sequence, or one run of it, without padding (contiguous; torch "
        "backend).",
        choices=("dual_chunk", "contiguous"),
    )
    pad_sequences_to_be_divisible_by: int | None = flag(
        None, "With dual_chunk: pad each sequence to a multiple of this. Default: 2 x --cp_size."
    )
    dataloader_num_workers: int = flag(
        1, "Processes that prepare batches, also of evaluations, which do not depend on it. Raise it if the GPU waits."
    )
    max_seq_length: int = flag(
        1024, "Tokens, <cls> and <eos> included; longer proteins are cropped at random. Lower it to save memory."
    )
    seed: int = flag(
        42, "Everything random follows from it. Change it for a repeat with other weights, order, crops, masks."
    )
    num_train_epochs: float = flag(3.0, "Passes over the training split. Raise it for a small one.")
    max_steps: int = flag(-1, "For a run of so many optimiser steps; overrides --num_train_epochs.")
    per_device_train_batch_size: int = flag(8, "Sequences in a batch; scales a pack. Lower it if memory runs out.")
    per_device_eval_batch_size: int = flag(8, "The same for evaluation.")
    gradient_accumulation_steps: int = flag(1, "For larger steps: packs (batches) a rank adds up before its step.")
    packs_per_step: int | None = flag(
        None, "Packs (batches) in a global step. Default: ranks x --gradient_accumulation_steps. Kept on resume."
    )

    packs_per_step_schedule: str | None = flag(
        None,
        "In place of --packs_per_step, a batch ramp of step:packs pairs: 0:8,1000:16 takes 16 packs a step once "
        "1000 steps are done. --learning_rate is not scaled. Kept on resume.",
    )
    tokens_per_step: int | None = flag(
        None,
        "For steps of one size on any number of GPUs: tokens in a global step, in place of "
        "--gradient_accumulation_steps: as many packs as come nearest and divide among the ranks. Kept on resume.",
    )

    overrides = {
        "num_train_epochs": ("max_steps",),
        "gradient_accumulation_steps": ("tokens_per_step", "packs_per_step_schedule"),
        "packs_per_step": ("tokens_per_step", "packs_per_step_schedule"),
        "tokens_per_step": ("packs_per_step", "gradient_accumulation_steps", "packs_per_step_schedule"),
    }
    last_wins = ("gradient_accumulation_steps", "packs_per_step", "tokens_per_step")

    @property
    def packing(self) -> bool:
        """Whether packs are filled up to a number of tokens, not of sequences."""
        return True

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a pack."""
        return self.per_device_train_batch_size * self.max_seq_length

    @property
    def held_out_tokens(self) -> int:
        """Most tokens of an evaluation's pack."""
        return self.per_device_eval_batch_size * self.max_seq_length

    def loading(self, world: World) -> dict[str, Any]:
        """The data loader's worker settings in this process."""
        return {
            "num_workers": self.dataloader_num_workers,
            "prefetch_factor": STEPS_AHEAD,
            "pin_memory": world.device.type == "cuda",
            "stop": world.stop,
        }

    def check(self) -> None:
        self.require_at_least(0, "dataloader_num_workers")
        self.require_at_least(
            1,
            *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("packs_per_step", "tokens_per_step"),
        )
        sizes = ("packs_per_step", "packs_per_step_schedule", "tokens_per_step")
        flags_given = [name for name in sizes if getattr(self, name) is not None]
        if self.packs_per_step_schedule is not None:
            flags_given += ["gradient_accumulation_steps"] * (self.gradient_accumulation_steps > 1)
            try:
                PacksPerStep.of(self.packs_per_step_schedule)
            except ValueError as error:
                raise UserError(f"--packs_per_step_schedule {error}") from error
        if len(flags_given) > 1:
            raise UserError(f"--{flags_given[0]} and --{flags_given[1]} exclude each other")
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise UserError("nothing to train: --max_steps and --num_train_epochs are both zero or below")


@dataclass(frozen=True)
class SourceFlags(BatchFlags):
    """Where the records of a run come from: what step 1 prepared, or files as they are."""

    group = "data"
    unlisted = ("max_record_length", "gaps", "on_bad_record")

    dataset_dir: str | None = flag(
        None, "For prepared proteins: what step 1 wrote, .../processed/arrow, with train and validation."
    )
    dataset: str | None = flag(
        None,
        "Instead of --dataset_dir, for proteins as they are: a file, directory or glob of parquet, Arrow, JSON "
        "lines, CSV or FASTA (column sequence or text), a Hub dataset, or `sample`: generated proteins. Needs "
        "--max_steps.",
    )
    streaming: bool = flag(False, "If a Hub --dataset is larger than the disk: read it in place.")
    max_record_length: int = flag(LONGEST_PROTEIN, "Longest record of --dataset, in bytes; memory grows with it.")
    gaps: Gaps | None = flag(None, f"With --dataset: {GAPS_HELP}.", choices=get_args(Gaps))
    on_bad_record: Policy = flag(
        "error", "With --dataset: stop at a record that is no protein, or skip it.", choices=get_args(Policy)
    )

    def missing(self) -> Iterator[Missing]:
        if self.dataset and self.max_steps < 0:
            yield Missing("--max_steps", "a --dataset has no length known beforehand", "1000")

    def check(self) -> None:
        if self.dataset and self.dataset_dir:
            raise UserError("--dataset (files as they are) excludes --dataset_dir (the output of step 1)")
        check_record_length(self.max_record_length)


@dataclass(frozen=True)
class ProteinFlags(SourceFlags):
    """Which proteins, and how large the packs of them are."""

    required = ("dataset_dir",)
    advanced = ("sample_clusters",)
    unlisted = ("dataset_mix", "sequence_packing", "pad_to_max_length", "max_train_samples", "max_eval_samples")
    file_only = ("dataset_mix_stages", "dataset_mix_exponent", "sample_clusters_exponent")
    set_tokens: ClassVar[str | None] = None  # a flag of DataFlags

    dataset_mix: list[str] | None = flag(
        None,
        "Instead of --dataset_dir, a mixture of what step 1 wrote: NAME=DIRECTORY:WEIGHT NAME=DIRECTORY:WEIGHT ..., "
        "weights being shares of the tokens. Needs --max_steps.",
    )
    dataset_mix_stages: list[str] | None = flag(
        None, "Other weights from a step on: STEP:NAME=WEIGHT,NAME=WEIGHT; sources that it does not name rest."
    )
    dataset_mix_exponent: float = flag(
        1.0, "Where no weights are given: a source's is its number of tokens to this power, 0 (all equal) to 1."
    )
    eval_dataset: list[str] | None = flag(
        None,
        "To evaluate on proteins of your own (as --dataset, or what step 1 wrote), in place of the validation split "
        "of --dataset_dir or --dataset. NAME=PROTEINS: beside it, with results eval_NAME_...; several may be given.",
    )
    sample_clusters: bool | Literal["auto"] | None = flag(
        None,
        "If large families dominate: draw UniRef50 clusters, then a member of each, as ESM-2 was trained (step 1's "
        "--cluster_table or --cluster, or a column ur50_id of --dataset); auto: where the data have them. Default: "
        "off, and on with --set_tokens.",
    )
    sample_clusters_exponent: float = flag(
        0.0, "Draw clusters by their size to this power: 0, each alike as ESM-2 did, to 1, each protein alike."
    )
    sequence_packing: bool | None = flag(
        None, "Fill packs up to a number of tokens, not of sequences. Default: on, unless --pad_to_max_length."
    )
    tokens_per_pack: int | Literal["auto"] | None = flag(
        None,
        "Lower it if memory runs out: tokens in a pack, or auto: as many as fit the GPU by the dry run's estimate "
        "and divide --tokens_per_step. Default: --per_device_train_batch_size x --max_seq_length.",
    )
    pad_to_max_length: bool = flag(
        False, "Batches of --per_device_train_batch_size sequences, as if padded; padding itself is never computed."
    )
    max_train_samples: int | None = flag(None, "For a quick trial: train on the first N proteins only.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N proteins only.")

    overrides = {
        "dataset_dir": ("dataset", "streaming", "dataset_mix", "dataset_mix_stages"),
        "dataset": ("dataset_dir", "max_train_samples", "dataset_mix", "dataset_mix_stages"),
        "dataset_mix": ("dataset", "dataset_dir", "max_train_samples"),
        "tokens_per_pack": ("pad_to_max_length", "sequence_packing"),
        "sequence_packing": ("pad_to_max_length", "tokens_per_pack"),
        "pad_to_max_length": ("tokens_per_pack", "sequence_packing"),
    }

    @property
    def eval_sets(self) -> dict[str, str]:
        """{name: proteins} of --eval_dataset; "validation" for those without a name. UserError for two of a name, and
        for names that results have."""
        sets: dict[str, str] = {}
        for text in self.eval_dataset or ():
            name, path = text.split("=", 1) if NAMED.match(text) else ("validation", text)
            if name in sets:
                raise UserError(f"--eval_dataset {text}: a second {name}: give each a name, as own=own.fasta")
            if name != "validation" and name.split("_")[0] in RESULTS:
                raise UserError(f"--eval_dataset {text}: {name} is the name of a result: choose another")
            sets[name] = path
        return sets

    @property
    def packing(self) -> bool:
        return not self.pad_to_max_length if self.sequence_packing is None else self.sequence_packing

    @property
    def pack_tokens(self) -> int:
        """Most tokens of a pack. `auto` is resolved before a run begins (`RunArguments.with_pack`)."""
        tokens_per_pack = None if self.tokens_per_pack == "auto" else self.tokens_per_pack
        return tokens_per_pack or self.per_device_train_batch_size * self.max_seq_length

    @property
    def pack_size(self) -> dict[str, Any]:
        """The size of a training pack, as BatchPlan and StreamPlan take it."""
        if not self.packing:
            return {"sequences_per_pack": self.per_device_train_batch_size}
        return {"tokens_per_pack": self.pack_tokens}

    def resolve(self) -> Self:
        is_open = self.packing and self.tokens_per_pack != "auto"
        tokens_per_pack = self.pack_tokens if is_open else self.tokens_per_pack
        sampled = self.set_tokens is not None if self.sample_clusters is None else self.sample_clusters
        return with_flags(self, tokens_per_pack=tokens_per_pack, sample_clusters=sampled)

    def missing(self) -> Iterator[Missing]:
        if self.streaming and not self.dataset and not self.eval_dataset:
            yield Missing("--dataset", "--streaming goes with it", "proteins.fasta")
        elif self.tokens_per_pack == "auto" and not self.tokens_per_step:
            yield Missing("--tokens_per_step", "the batch that --tokens_per_pack auto divides", "2097152")
        elif not self.dataset_mix and (self.dataset_mix_stages or self.dataset_mix_exponent != 1):
            yield Missing("--dataset_mix", "dataset_mix_stages and dataset_mix_exponent go with it", "a=a/arrow:1")
        elif self.sample_clusters_exponent and not self.sample_clusters:
            yield Missing("--sample_clusters", "sample_clusters_exponent goes with it", "auto")
        elif self.dataset_mix and self.max_steps < 0:
            yield Missing("--max_steps", "a --dataset_mix has no end", "1000")
        elif not self.dataset and not self.dataset_dir and not self.dataset_mix:
            what = "what 1.tokenize_uniref_csv.py wrote; or --dataset and --max_steps"
            yield Missing("--dataset_dir", what, "processed/arrow")

    def check(self) -> None:
        _ = self.eval_sets
        if self.dataset and self.max_train_samples:
            raise UserError("--max_train_samples needs --dataset_dir: a --dataset is not counted; use --max_steps")
        if self.sample_clusters_exponent and self.dataset:
            raise UserError("sample_clusters_exponent needs --dataset_dir: prepare the data by step 1")
        if self.dataset_mix and (other := self.dataset_dir or self.dataset or self.max_train_samples):
            raise UserError(f"--dataset_mix names all training data: drop {other}")
        if self.pad_to_max_length and self.sequence_packing:
            raise UserError("--pad_to_max_length and --sequence_packing exclude each other")
        if self.tokens_per_pack is not None and not self.packing:
            raise UserError("--tokens_per_pack needs packing: drop --pad_to_max_length or --sequence_packing False")
        if self.packing and self.pack_tokens < self.max_seq_length:
            raise UserError(
                f"--tokens_per_pack {self.pack_tokens} is less than one sequence of --max_seq_length "
                f"{self.max_seq_length}: raise the one or lower the other"
            )
        self.require_at_least(3, "max_seq_length")
        self.require_at_least(1, "max_train_samples", "max_eval_samples")


@dataclass(frozen=True)
class DataFlags(ProteinFlags):
    """Which proteins, and how masked language modelling makes batches of them."""

    advanced = ("objective", "set_tokens")
    unlisted = ("mlm_probability_end", "do_preprocess", "chains")
    file_only = (
        *("mask_replace_prob", "random_replace_prob", "eval_mlm_probability", "eval_mask_replace_prob"),
        *("diffusion_schedule", "eval_nelbo", "set_size"),
    )

    set_tokens: str | None = flag(  # pyrefly: ignore[bad-override]  # all proteins' is None
        None,
        "To train on sets of homologs: most tokens of a set, which has members of one cluster of --dataset_dir, each "
        "cluster once an epoch; or stages, epochs:tokens: 0:2048,0.5:8192. For families that read sets.",
    )
    set_size: int = flag(16, "With --set_tokens: most members of a set; the number drawn is log-uniform from 1.")
    chains: str | None = flag(
        None,
        "For records of several chains, A:B (step 1's --chains keep): what stands between chains, one token "
        "(separator) or 25 glycines that are never asked (linker). Kept with the model.",
        choices=("separator", "linker"),
    )
    objective: str = flag(
        "mlm",
        "mlm: masked language modelling; mdlm: masked diffusion, for a model that generates: each sequence is masked "
        "at a rate of its own.",
        choices=("mlm", "mdlm"),
    )
    diffusion_schedule: str = flag(
        "linear", "With --objective mdlm: how rates are drawn; cosine: more high ones.", choices=("linear", "cosine")
    )
    eval_nelbo: bool = flag(
        False, "Evaluations bound the log-likelihood of held-out proteins, too, as those of --objective mdlm do."
    )
    mlm_probability: float = flag(
        0.15,
        "Fraction of residues to predict: 80 % become <mask>, 10 % another residue. Raise it to try for faster "
        "learning.",
    )
    mlm_probability_end: float | None = flag(
        None, "What --mlm_probability falls to, linearly from the first step to the last. Default: it stays."
    )
    mask_replace_prob: float = flag(0.8, "Fraction of the residues to predict that become <mask>.")
    random_replace_prob: float = flag(0.1, "Fraction of them that become a random amino acid; what is left stays.")
    eval_mlm_probability: float = flag(0.15, "mlm_probability of evaluations.")
    eval_mask_replace_prob: float = flag(
        0.8, "mask_replace_prob of evaluations; half of the rest stays, the other half becomes another residue."
    )
    do_preprocess: bool = flag(False, "Refused: 1.tokenize_uniref_csv.py does the preprocessing.")

    def check(self) -> None:
        if self.do_preprocess:
            raise UserError("--do_preprocess: run 1.tokenize_uniref_csv.py first and pass its output as --dataset_dir")
        for name in ("mlm_probability", "eval_mlm_probability"):
            if not 0 < getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be between 0 and 1")
        end = self.mlm_probability_end
        if end is not None and not 0 < end <= self.mlm_probability:
            raise UserError(
                f"--mlm_probability_end {end}: must be above 0 and at most --mlm_probability {self.mlm_probability}, "
                "which falls to it"
            )
        for name in ("mask_replace_prob", "random_replace_prob", "eval_mask_replace_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"--{name} {getattr(self, name)}: a fraction, 0 to 1")
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise UserError(
                f"--mask_replace_prob {self.mask_replace_prob} and --random_replace_prob {self.random_replace_prob}: "
                "more than 1 in sum: lower one"
            )
