"""The flags of a decoder's run: the house's names, with the FSDP guides' names and defaults beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar

from common.cli import Flags, UserError, flag
from common.training.arguments import RunArguments
from common.training.optim import OptimizerFlags, warmup_steps
from extras.decoders.config import PRESETS
from extras.decoders.flags import DecoderFlags
from extras.text.flags import TextFlags

# The learning rates of a decoder's run, under the guides' names for them.

STYLES = ("constant", "linear", "cosine", "exponential", "plateau")


@dataclass
class DecayFlags(OptimizerFlags):
    group = "optimiser"
    rarely = ("lr_decay_iters", "plateau")

    learning_rate: float = flag(1e-4, "Peak learning rate.", "lr")
    lr_scheduler_type: str = flag(
        "cosine",
        "constant, or how the rate falls to --min_lr: linear, cosine, exponential, plateau (--plateau of the run at "
        "the peak, then linear).",
        "lr_decay_style",
    )
    warmup_steps: float | None = flag(0.0032, "Steps up to the peak, or a fraction of the run below 1.", "warmup")
    lr_decay_iters: int | None = flag(None, "The step at which --min_lr is reached. Default: the last.")
    min_lr: float = flag(1e-5, "What the rate falls to.")
    plateau: float = flag(0.0, "With --lr_decay_style plateau: the fraction of the run at the peak.")
    weight_decay: float = flag(0.2, "On matrices and embeddings; never on norms.")
    adam_beta1: float = flag(0.9, "AdamW's first moment.", "beta1")
    adam_beta2: float = flag(0.95, "AdamW's second moment.", "beta2")
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this; 0: don't.", "grad_clip")

    def check(self) -> None:
        self.require_choice("lr_scheduler_type", STYLES)
        self.require_at_least(1, "lr_decay_iters")
        if not 0 <= self.min_lr <= self.learning_rate:
            raise UserError(f"--min_lr {self.min_lr}: must lie between 0 and --lr {self.learning_rate}")
        if self.lr_scheduler_type == "exponential" and self.min_lr == 0:
            raise UserError("--min_lr 0: --lr_decay_style exponential falls by factors, and never to 0: give another")
        if not 0 <= self.plateau < 1:
            raise UserError(f"--plateau {self.plateau}: a fraction of the run, at least 0 and below 1")
        if self.plateau and self.lr_scheduler_type != "plateau":
            raise UserError(
                f"--plateau {self.plateau}: goes with --lr_decay_style plateau, not {self.lr_scheduler_type}: drop one"
            )

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        """The peak comes with the last step of the warm-up, --min_lr with step --lr_decay_iters and stays."""
        peak, low, style = self.learning_rate, self.min_lr, self.lr_scheduler_type
        warm = warmup_steps(self, total_steps)
        begin = warm + math.ceil(self.plateau * total_steps)
        span = max(1, (self.lr_decay_iters or total_steps) - begin)

        def rate(step: int) -> float:
            if step < warm:
                return peak * (step + 1) / warm
            progress = min(1.0, max(0.0, (step + 1 - begin) / span))
            if style == "constant":
                return peak
            if style == "exponential":
                return peak * (low / peak) ** progress
            fallen = (1 - math.cos(math.pi * progress)) / 2 if style == "cosine" else progress
            return peak - (peak - low) * fallen

        return rate


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
