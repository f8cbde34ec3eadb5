"""The flags of text: which documents, and how they become the contexts that a decoder is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.cli import UserError
from common.data.flags import SourceFlags
from common.flags import Missing, flag
from extras.families.text.tokenizers import BYTES
from extras.prepare.sources.compression import LONGEST_DOCUMENT

PUBLISHED = "model"  # value of --tokenizer


@dataclass(frozen=True)
class TextFlags(SourceFlags):
    required = ("dataset",)
    advanced = ("document_masks",)
    unlisted = ("streaming", "text_column", "train_split", "val_split", "validation_batches")

    changed = {
        "dataset_dir": flag(
            None, "For prepared text: what 1.tokenize_text.py wrote, .../text, with train and validation."
        ),
        "dataset": flag(
            None,
            "Instead of --dataset_dir, for documents as they are: a file, directory or glob of parquet, JSON lines, "
            "CSV or plain text (.txt: empty lines separate documents), or a Hub dataset. Needs --max_steps.",
            "dataset_path",
        ),
        "streaming": flag(True, "Read a Hub --dataset in place; False: download it first."),
        "max_record_length": flag(LONGEST_DOCUMENT, ""),
    }

    dataset_config_name: str | None = flag(
        None, "For a --dataset with several configurations, the one to read (`en` of allenai/c4)."
    )
    text_column: str = flag("text", "The column, or JSON field, of --dataset that holds the documents.")
    train_split: str = flag("train", "The split to train on.")
    val_split: str = flag("validation", "The split to evaluate on.")
    tokenizer: str = flag(
        BYTES,
        "Change it for fewer tokens a text, or to use a published model's: `bytes` (built in: one token per byte), "
        "`residues` (of proteins, with flags of its own), a directory or Hub name that transformers' AutoTokenizer "
        f"opens, or `{PUBLISHED}`: the one that --model was published with.",
    )
    document_masks: bool = flag(
        False,
        "To keep the documents of a context apart (block-causal attention): they do not see each other, positions "
        "restart with each.",
    )
    validation_batches: int = flag(
        10, "Evaluate on the first N batches of --per_device_eval_batch_size contexts, whatever the number of ranks."
    )

    @property
    def held_out_contexts(self) -> int:
        """Number of contexts of an evaluation."""
        return self.validation_batches * self.per_device_eval_batch_size

    overrides = {
        "dataset_dir": ("dataset", "dataset_config_name", "streaming", "text_column"),
        "dataset": ("dataset_dir",),
    }
    last_wins = ("dataset_dir", "dataset")
    belongs_to = {"dataset_config_name": "dataset"}

    def missing(self) -> Iterator[Missing]:
        if not self.dataset and self.dataset_config_name:
            yield Missing("--dataset", "--dataset_config_name goes with it", "allenai/c4")
        elif not self.dataset and not self.dataset_dir:
            yield Missing("--dataset", "text; or --dataset_dir, what 1.tokenize_text.py wrote", "texts.jsonl")

    def check(self) -> None:
        for name in ("train_split", "val_split"):
            if "[" in getattr(self, name):
                raise UserError(f"--{name} {getattr(self, name)}: slices are not read: name a split, or files")
        self.require_at_least(2, "max_seq_length")
        self.require_at_least(1, "validation_batches")
