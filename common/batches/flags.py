"""The flags about proteins: which ones, and how they become batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.batches.step_flags import StepFlags
from common.cli import Missing, UserError, flag
from common.sources import limits


@dataclass
class DataFlags(StepFlags):
    group = "data"
    needed = ("dataset_dir",)
    rarely = ("sequence_packing", "pad_to_max_length", "do_preprocess", "max_record_length")

    dataset_dir: str | None = flag(None, "The directory step 1 wrote: .../processed/arrow, with train and validation.")
    dataset: str | None = flag(
        None,
        "Instead of --dataset_dir, proteins as they are: a file, directory or glob of parquet, JSON lines, CSV or "
        "FASTA (column sequence or text), a Hub dataset, or `sample`: generated proteins. Needs --max_steps.",
    )
    streaming: bool = flag(False, "Read a Hub --dataset in place, instead of downloading it first.")
    eval_dataset: str | None = flag(
        None, "Proteins to evaluate on (as --dataset), in place of the validation split of --dataset_dir or --dataset."
    )
    sample_clusters: bool = flag(
        False,
        "Draw UniRef50 clusters, then a member of each, as ESM-2 was trained (step 1's --cluster_table or --cluster).",
    )
    max_seq_length: int = flag(1024, "Tokens, <cls> and <eos> included; longer proteins are cropped at random.")
    sequence_packing: bool | None = flag(
        None, "Fill packs up to a number of tokens, not of sequences. Default: on, unless --pad_to_max_length."
    )
    tokens_per_pack: int | None = flag(
        None, "Tokens in a pack. Default: --per_device_train_batch_size x --max_seq_length."
    )
    pad_to_max_length: bool = flag(
        False, "Batches of --per_device_train_batch_size sequences, as if padded; padding itself is never computed."
    )
    mlm_probability: float = flag(0.15, "Fraction of residues to predict; 80 % become <mask>, 10 % another residue.")
    max_train_samples: int | None = flag(None, "Train on the first N proteins only.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N proteins only.")
    max_record_length: int = flag(
        limits.LONGEST_PROTEIN, "Longest record of --dataset, in bytes; memory grows with it."
    )
    do_preprocess: bool = flag(False, "Accepted for the guides' sake; preprocessing is 1.tokenize_uniref_csv.py.")

    instead_of = {
        "dataset_dir": ("dataset", "streaming"),
        "dataset": ("dataset_dir", "sample_clusters", "max_train_samples"),
        "tokens_per_pack": ("pad_to_max_length", "sequence_packing"),
        "sequence_packing": ("pad_to_max_length", "tokens_per_pack"),
        "pad_to_max_length": ("tokens_per_pack", "sequence_packing"),
    }

    @property
    def packing(self) -> bool:
        return not self.pad_to_max_length if self.sequence_packing is None else self.sequence_packing

    @property
    def pack_size(self) -> dict[str, int]:
        """Of training, as BatchPlan and StreamPlan take it."""
        if not self.packing:
            return {"sequences_per_pack": self.per_device_train_batch_size}
        return {"tokens_per_pack": self.tokens_per_pack}

    def missing(self) -> Iterator[Missing]:
        if self.streaming and not self.dataset and not self.eval_dataset:
            yield Missing("--dataset", "--streaming goes with it", "proteins.fasta")
        elif not self.dataset and not self.dataset_dir:
            what = "what 1.tokenize_uniref_csv.py wrote; or --dataset and --max_steps"
            yield Missing("--dataset_dir", what, "processed/arrow")
        if self.dataset and self.max_steps < 0:
            yield Missing("--max_steps", "a --dataset has no length known beforehand", "1000")

    def check(self) -> None:
        if self.dataset and self.dataset_dir:
            raise UserError("--dataset (files as they are) excludes --dataset_dir (the output of step 1)")
        if self.dataset and self.sample_clusters:
            raise UserError("--sample_clusters needs --dataset_dir, tokenised with --cluster_table or --cluster")
        if self.dataset and self.max_train_samples:
            raise UserError("--max_train_samples needs --dataset_dir: a --dataset is not counted; use --max_steps")
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
        self.require_at_least(3, "max_seq_length")
        self.require_at_least(1, "max_train_samples", "max_eval_samples")
        limits.check_flag(self.max_record_length)
        if not 0 < self.mlm_probability < 1:
            raise UserError(f"--mlm_probability {self.mlm_probability}: must be between 0 and 1")
