"""Flags of finetune.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.cli import UserError
from common.flags import Flags, Missing, flag
from common.models.layers.backend import BackendFlags
from extras.after.downstream.groups import Clustering
from extras.after.downstream.labels import TASKS
from extras.prepare.relatives import HELP
from extras.prepare.sources.proteins import ProteinFlags

# Flags that are None unless given, since they are refused where they have no effect.
SIZES = {"validation_size": 0.1, "test_size": 0.2}
LORA = {"lora_r": BackendFlags.lora_r, "lora_alpha": BackendFlags.lora_alpha, "lora_dropout": 0.0}


@dataclass
class TuningFlags(Flags):
    required = ("model_name_or_path", "dataset", "output_dir")

    model_name_or_path: str | None = flag(None, "A run's directory, or a directory or Hub name of an ESM-2 or ESM C.")
    dataset: str | None = flag(None, "A CSV file with the columns sequence and label, and possibly split.")
    output_dir: str | None = flag(None, "Where the model and the results go.")
    fasta: str | None = flag(None, "The sequences, where the CSV file has ids: its column id.")
    label_column: str = flag("label", "The column of the labels; rows without one are left out.")
    split_column: str | None = flag(
        None,
        "A column with train, validation or test. Default: split, or FLIP's set and validation, if there is one.",
    )
    cluster_column: str | None = flag(None, "A column with clusters of related proteins, each in one split whole.")
    cluster_table: str | None = flag(None, "Or a table of clusters and their members' ids, as for step 1.")
    cluster: float | None = flag(None, "Or cluster the labelled proteins by MMseqs2 at this identity, 0.5 say.")
    validation_size: float | None = flag(
        None, "Part of the proteins, by a hash of the sequence or cluster, where no split is given. Default: 0.1."
    )
    test_size: float | None = flag(None, "Likewise. Default: 0.2.")
    problem_type: str | None = flag(None, "What the labels are. Default: by the labels.", choices=TASKS)
    full: bool = flag(False, "Train all weights, not LoRA's.")
    lora_r: int | None = flag(None, "Rank of LoRA's matrices. Default: 8.")
    lora_alpha: float | None = flag(None, "LoRA's scale times its rank. Default: 16.")
    lora_dropout: float | None = flag(None, "Of LoRA's inputs. Default: 0.")
    target_modules: str | None = flag(
        None, "Matrices that get LoRA's: names in the stock model. Default: of queries, keys and values."
    )
    learning_rate: float | None = flag(None, "Peak. Default: 1e-3 with LoRA, 1e-4 with --full.")
    num_train_epochs: int = flag(20, "At most so many.")
    patience: int = flag(3, "End after so many epochs without a lower validation loss.")
    batch_size: int = flag(16, "Sequences of a step.")
    tokens_per_batch: int = flag(1024, "Tokens of a forward pass, padding included: more need more memory.")
    max_seq_length: int = flag(1024, "Tokens, <cls> and <eos> included; longer sequences are refused.")
    weight_decay: float = flag(0.01, "Of AdamW.")
    warmup_ratio: float = flag(0.1, "Part of the steps in which the learning rate rises.")
    max_grad_norm: float = flag(1.0, "Largest gradient norm; 0: any.")
    save_steps: int = flag(50, "Steps between saves; also after every epoch.")
    seed: int = flag(42, "Of the new head, LoRA's matrices and the order of the data.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    use_cpu: bool = flag(False, "Compute on the CPU even where there is a GPU.")
    overwrite: bool = flag(False, "Start anew in OUTPUT_DIR.")
    count_relatives: bool = flag(True, HELP)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def value(self, name: str) -> Any:
        """Of a flag of `SIZES` or `LORA`."""
        given = getattr(self, name)
        return (SIZES | LORA)[name] if given is None else given

    def missing(self) -> Iterator[Missing]:
        if not self.model_name_or_path:
            yield Missing("--model_name_or_path", "the model", "out/final_model")
        if not self.dataset:
            yield Missing("--dataset", "a CSV file of sequences and labels", "labels.csv")
        if not self.output_dir:
            yield Missing("--output_dir", "where the model goes", "tuned")

    def check(self) -> None:
        counts = ("lora_r", "num_train_epochs", "patience", "batch_size", "tokens_per_batch", "save_steps")
        self.require_at_least(1, *counts)
        self.require_above(0, "learning_rate", "lora_alpha")
        self.require_at_least(0, "lora_dropout", "weight_decay", "warmup_ratio", "max_grad_norm", "seed")
        self.require_at_least(8, "max_seq_length")
        self.require_above(0, "validation_size", "test_size")
        if not self.value("validation_size") + self.value("test_size") < 1:
            raise UserError("--validation_size and --test_size leave nothing to train on: give less than 1 together")
        if not self.value("lora_dropout") < 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be below 1")
        idle = [f"--{name}" for name in (*LORA, "target_modules") if self.full and getattr(self, name) is not None]
        if idle:
            raise UserError(f"{' and '.join(idle)}: no effect, as --full trains without LoRA: leave it out")
        Clustering(self.cluster_column, self.cluster_table, self.cluster).check()
        for name in ("dataset", "fasta"):
            if getattr(self, name) and not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")
        if not self.full and find_spec("peft") is None:
            raise UserError("LoRA needs peft: ./install.sh --finetune; or train all weights with --full")
