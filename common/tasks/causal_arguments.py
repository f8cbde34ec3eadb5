"""The flags of a decoder's run: the house's names, with the FSDP guides' names and defaults beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from common.cli import Flags, UserError, flag
from common.decoders.flags import DecoderFlags
from common.decoders.presets import PRESETS
from common.tasks.arguments import RunArguments
from common.tasks.decay import DecayFlags
from common.text.flags import TextFlags

PUBLISHED = "model"  # a --tokenizer


@dataclass
class IdleFlags(Flags):
    """Flags of the guides that change nothing here; why not is said when one is given."""

    group = "accepted, without effect"
    same_seed: str | None = flag(None, "Nothing: weights and data follow from --seed, on any number of ranks.")
    tensorboard_dir: str | None = flag(None, "Nothing: --report_to tensorboard writes into --output_dir.")
    resid_pdrop: str | None = flag(None, "Nothing: these models have no dropout.")
    embd_pdrop: str | None = flag(None, "Nothing: these models have no dropout.")
    attn_pdrop: str | None = flag(None, "Nothing: these models have no dropout.")
    summary_first_pdrop: str | None = flag(None, "Nothing: these models have no dropout.")
    activation_loading_horizon: str | None = flag(None, "Nothing: activations come back layer by layer.")
    limit_all_gathers: str | None = flag(None, "Nothing: FSDP2 gathers --forward_prefetch layers ahead, no more.")
    rotary_pct: str | None = flag(None, "Nothing: these models rotate whole heads (GPT-NeoX a part).")

    def remarks(self) -> Iterator[str]:
        """A line for each that is given."""
        for name, field in IdleFlags.__dataclass_fields__.items():
            if (value := getattr(self, name)) is not None:
                yield f"--{name} {value} does {field.metadata['help'][0].lower()}{field.metadata['help'][1:]}"


IdleFlags.rarely = tuple(each.name for each in fields(IdleFlags))


@dataclass
class CausalArguments(DecayFlags, RunArguments, TextFlags, IdleFlags, DecoderFlags):
    """Of causal language modelling with a decoder.

    strategy_defaults: of flags that a script declares, where a decoder's are others.
    """

    strategy_defaults: ClassVar[dict] = {"activation_checkpointing": "full"}

    dataset: str | None = flag(
        None,
        TextFlags.__dataclass_fields__["dataset"].metadata["help"],
        "dataset_path",
    )
    tokenizer: str = flag(
        TextFlags.__dataclass_fields__["tokenizer"].default,
        TextFlags.__dataclass_fields__["tokenizer"].metadata["help"][:-1]
        + f"; `{PUBLISHED}`: the one that --model was published with.",
    )
    max_seq_length: int = flag(2048, "Tokens in a context: documents end to end, cut.", "max_context_width")
    seed: int = flag(12345, "Everything random follows from it: weights, order.")
    num_train_epochs: float | None = flag(None, "Passes over --dataset_dir, without --max_steps.", "epochs")
    max_steps: int | None = flag(
        None,
        "Optimiser steps. Default: what --num_train_epochs makes with --dataset_dir, else 5000.",
        "max_training_steps",
    )
    per_device_train_batch_size: int = flag(2, "Contexts in a batch.", "train_batch_size")
    per_device_eval_batch_size: int = flag(4, "The same for evaluation.", "val_batch_size")
    bf16: bool = flag(True, "Compute in bfloat16; weights, gradients and optimiser stay fp32.")
    logging_steps: int = flag(1, "Steps between log lines and rows of metrics.jsonl.", "logging_freq")
    output_dir: str | None = flag(
        None, "Where checkpoints, metrics and final_model/ go. Default: out/MODEL.", "checkpoint_dir"
    )
    save_steps: float = flag(1000, "Steps between checkpoints (below 1: a fraction of the run).", "checkpoint_freq")
    eval_steps: float | None = flag(
        None, "Evaluate every N steps (below 1: a fraction of the run); switches --do_eval on.", "validation_freq"
    )

    @property
    def pack_tokens(self) -> int:
        """How long a pack is."""
        return self.per_device_train_batch_size * self.max_seq_length

    @property
    def model_named(self) -> str | None:
        return self.model or self.model_name_or_path or self.model_type

    @property
    def batch(self) -> tuple[int, str]:
        """How much a pack is, and of what."""
        return self.per_device_train_batch_size, f"contexts of {self.max_seq_length} tokens"

    def __post_init__(self) -> None:
        published = self.model or self.model_name_or_path
        if self.tokenizer == PUBLISHED:
            if not published:
                raise UserError(f"--tokenizer {PUBLISHED}: is that of --model: name a --model, or the tokenizer")
            self.tokenizer = PRESETS[published].hub if published in PRESETS else published
        if not self.output_dir and self.model_named:
            self.output_dir = f"out/{self.model_named.rstrip('/').rpartition('/')[2]}"
        if self.max_steps is None:
            self.max_steps = -1 if self.num_train_epochs is not None and self.dataset_dir else 5000
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0  # for --max_steps -1
        self.do_eval = self.do_eval or self.eval_steps is not None
        super().__post_init__()
