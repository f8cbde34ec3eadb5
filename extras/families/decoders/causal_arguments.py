"""The flags of a decoder's run. The FSDP guides' names are aliases, their defaults are a table."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from common.cli import UserError
from common.files.runs import resolve_directory
from common.flags import Missing, flag, with_flags
from common.models.family import encoders
from common.models.layers.backend import HF_BACKENDS, BackendFlags
from common.training.arguments import RunArguments
from common.training.optim import OptimizerFlags
from common.training.schedule import Run, choices_of, phrases
from extras.families.decoders.config import (
    MODEL_TYPES,
    PRESETS,
    DecoderConfig,
    load_decoder_config,
    preset_like,
)
from extras.families.decoders.family import FAMILY, Decoders
from extras.families.text.flags import PUBLISHED, TextFlags

logger = logging.getLogger(__name__)

# Flags that replace the configuration's field of the same name and type.
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "initializer_range", "rope_theta"),
)
NEOX = (
    "--model_type gpt_neox: its layers (LayerNorm with biases, rotary embeddings of a quarter of each head) are not "
    "implemented: choose " + ", ".join(MODEL_TYPES)
)


@dataclass(frozen=True)
class DecoderFlags(BackendFlags):
    """A published model, or one of any size."""

    group = "model"
    required = ("model",)
    unlisted = ("intermediate_size", "num_key_value_heads", "initializer_range", "rope_theta", "vocab_size")

    model: str | None = flag(
        None,
        f"The decoder to train from random weights: {', '.join(PRESETS)}, a directory with config.json, a Hub name.",
    )
    model_type: str | None = flag(
        None,
        f"For a size of your own: a decoder of this family and of the sizes below: {', '.join(MODEL_TYPES)}. Sizes "
        "that are not given are those of the family's published model with these sizes, or of its first.",
    )
    hidden_size: int | None = flag(None, "For another size: hidden size. Default: the model's.", "hidden_width")
    intermediate_size: int | None = flag(None, "Of the feed-forward block. Default: the model's.")
    num_hidden_layers: int | None = flag(None, "For another size: layers. Default: the model's.", "num_layers")
    num_attention_heads: int | None = flag(
        None, "For another size: heads of queries. Default: the model's.", "num_heads"
    )
    num_key_value_heads: int | None = flag(
        None, "Heads of keys and values. Default: the model's; with another number of --num_attention_heads, as many."
    )
    vocab_size: int | None = flag(None, "Size of the vocabulary, at least the tokenizer's. Default: the model's.")
    initializer_range: float | None = flag(None, "Standard deviation of initial weights. Default: the model's, 0.02.")
    rope_theta: float | None = flag(
        None, "Base of the rotary embedding's wavelengths. Default: the model's.", "rotary_emb_base"
    )

    changed = {
        "model_name_or_path": flag(
            None,
            "In place of --model, to train given weights further: a run's output directory, its final_model/ or a "
            "checkpoint, or with --model_type a Hub name.",
        )
    }
    overrides = {"model": ("model_name_or_path",), "model_name_or_path": ("model",)}
    last_wins = ("model", "model_name_or_path")

    def missing(self) -> Iterator[Missing]:
        if not (self.model or self.model_type or self.model_name_or_path):
            yield Missing("--model", "the decoder to train", "llama3_2_1b")

    def check(self) -> None:
        if self.model_type == "gpt_neox":
            raise UserError(NEOX)
        if self.model_type not in (None, *MODEL_TYPES):
            raise UserError(
                f"--model_type {self.model_type}: choose {', '.join(MODEL_TYPES)} (decoders), {', '.join(encoders())}"
            )
        if self.backend in HF_BACKENDS:
            raise UserError(f"--backend {self.backend}: is of ESM-2 only: choose auto, te, torch")
        if self.model and self.model_name_or_path:
            raise UserError("--model (random weights) excludes --model_name_or_path (given weights)")
        self.require_at_least(1, *(name for name in SIZES if name not in ("initializer_range", "rope_theta")))
        self.require_above(0, "initializer_range", "rope_theta")

    def decoder_config(self, context: int) -> tuple[DecoderConfig, str | None]:
        """(configuration for contexts of so many tokens, remark for the log). UserError for an impossible one."""
        sizes = {name: value for name in SIZES if (value := getattr(self, name)) is not None}
        base = self.model or self.model_name_or_path or preset_like(self.model_type, sizes)
        config = load_decoder_config(base)
        if self.model_type and config.model_type != PRESETS[MODEL_TYPES[self.model_type][0]].config.model_type:
            raise UserError(f"--model_type {self.model_type}: {base} is a {config.model_type}: drop one of the two")
        changed = ", ".join(f"--{name}" for name, size in sizes.items() if size != getattr(config, name))
        if self.model_name_or_path and changed:
            raise UserError(f"{changed}: cannot change the weights of --model_name_or_path: drop one of the two")
        heads = sizes.get("num_attention_heads", config.num_attention_heads)
        if heads != config.num_attention_heads:
            sizes.setdefault("num_key_value_heads", heads)
        differing = [f"{k} {v}, not {getattr(config, k)}" for k, v in sizes.items() if v != getattr(config, k)]
        # A longer context than the model was published for is recorded; for a shorter one nothing changes.
        longest = max(config.max_position_embeddings, context)
        config = replace(config, **sizes, max_position_embeddings=longest)
        named = f"--model_type {self.model_type} (as {base})" if self.model_type else f"--model {base}"
        config.check(named)
        remark = f"Model: {base}" + (f", but for {'; '.join(differing)}" if differing else "")
        return config, remark


@dataclass(frozen=True)
class DecayFlags(OptimizerFlags):
    """Learning rate schedules of the guides: warm-up, then from the peak to --min_lr."""

    schedules = "clm"
    unlisted = ("lr_decay_iters", "plateau")

    lr_decay_iters: int | None = flag(None, "The step at which --min_lr is reached. Default: the last.")
    min_lr: float = flag(1e-5, "What the rate falls to. Raise it if another run is to go on from the end.")
    plateau: float = flag(0.0, "With --lr_decay_style plateau: the fraction of the run at the peak.")

    @property
    def lowest(self) -> float:
        """--min_lr, or --min_lr_rate of the peak in its place."""
        return self.min_lr if self.min_lr_rate is None else self.min_lr_rate * self.learning_rate

    def check(self) -> None:
        self.require_at_least(1, "lr_decay_iters")
        if not 0 <= self.lowest <= self.learning_rate:
            raise UserError(f"--min_lr {self.min_lr}: must lie between 0 and --lr {self.learning_rate}")
        if not 0 <= self.plateau < 1:
            raise UserError(f"--plateau {self.plateau}: a fraction of the run, at least 0 and below 1")

    def run(self, total_steps: int) -> Run:
        """The peak comes with the last step of the warm-up; --min_lr with step --lr_decay_iters, and stays.
        `annealing` differs in both."""
        plateau_steps = math.ceil(self.plateau * total_steps)
        return self.run_to(self.lr_decay_iters or total_steps, total_steps, self.lowest, plateau_steps)


@dataclass(frozen=True)
class CausalArguments(RunArguments):
    """Flags of causal language modelling with a decoder."""

    # The guides' defaults and names. num_train_epochs and max_steps are None until `resolve`.
    changed = {
        "task": flag("clm", ""),
        "sharding_strategy": flag("full", ""),  # the guides'
        "learning_rate": flag(1e-4, "Peak learning rate. Lower it if the loss jumps or diverges.", "lr"),
        "lr_scheduler_type": flag(
            "cosine",
            f"How the rate falls to --min_lr; change it to repeat another recipe. {phrases('clm')}.",
            "lr_decay_style",
            choices=choices_of("clm"),
        ),
        "warmup_steps": flag(
            0.0032,
            "Raise it if the loss jumps at the beginning: steps up to the peak, or a fraction of the run below 1.",
            "warmup",
        ),
        "weight_decay": flag(
            0.2,
            "On matrices and embeddings; never on norms. Raise it if the held-out loss rises while that of training "
            "falls.",
        ),
        "adam_beta1": flag(0.9, "", "beta1"),
        "adam_beta2": flag(0.95, "", "beta2"),
        "max_grad_norm": flag(1.0, "", "grad_clip"),
        "max_seq_length": flag(
            2048,
            "Tokens in a context: documents are concatenated and cut. Lower it to save memory.",
            "max_context_width",
        ),
        "seed": flag(
            12345, "Everything random follows from it. Change it for a repeat of the run with other weights and order."
        ),
        "num_train_epochs": flag(None, "For prepared text: passes over --dataset_dir, without --max_steps.", "epochs"),
        "max_steps": flag(
            None,
            "For a run of so many optimiser steps. Default: what --num_train_epochs makes with --dataset_dir, else "
            "5000.",
            "max_training_steps",
        ),
        "per_device_train_batch_size": flag(
            2, "Contexts in a batch. Lower it if memory runs out.", "train_batch_size"
        ),
        "per_device_eval_batch_size": flag(4, "", "val_batch_size"),
        "bf16": flag(True, ""),
        "logging_steps": flag(1, "", "logging_freq"),
        "output_dir": flag(
            "",
            "Where checkpoints, metrics and final_model/ go: a new one for each run. Default: out/MODEL.",
            "checkpoint_dir",
        ),
        "save_steps": flag(1000, "", "checkpoint_freq"),
        "eval_steps": flag(
            None,
            "To see the held-out loss fall: evaluate every N steps (below 1: a fraction of the run); switches "
            "--do_eval on.",
            "validation_freq",
        ),
        "activation_checkpointing": flag("full", ""),
    }
    # Flags of the guides that have no effect here.
    idle = {
        "same_seed": "weights and data follow from --seed, on any number of ranks.",
        "tensorboard_dir": "--report_to tensorboard writes into --output_dir.",
        "resid_pdrop": "these models have no dropout.",
        "embd_pdrop": "these models have no dropout.",
        "attn_pdrop": "these models have no dropout.",
        "summary_first_pdrop": "these models have no dropout.",
        "activation_loading_horizon": "activations are loaded layer by layer.",
        "limit_all_gathers": "FSDP2 gathers --forward_prefetch layers ahead, no more.",
        "rotary_pct": "these models rotate whole heads (GPT-NeoX a part).",
    }

    model: DecoderFlags = field(default_factory=DecoderFlags)
    data: TextFlags = field(default_factory=TextFlags)
    optimizer: DecayFlags = field(default_factory=DecayFlags)

    @property
    def model_named(self) -> str | None:
        return self.model.model or self.model.model_name_or_path or self.model.model_type

    @property
    def family(self) -> Decoders:
        return FAMILY

    @property
    def batch(self) -> tuple[int, str]:
        return self.data.per_device_train_batch_size, f"contexts of {self.data.max_seq_length} tokens"

    def resolve(self) -> CausalArguments:
        data, tokenizer, output_dir = self.data, self.data.tokenizer, self.checkpoint.output_dir
        published = self.model.model or self.model.model_name_or_path
        if tokenizer == PUBLISHED:
            if not published:
                raise UserError(f"--tokenizer {PUBLISHED}: is that of --model: name a --model, or the tokenizer")
            tokenizer = PRESETS[published].hub if published in PRESETS else str(resolve_directory(published))
        if not output_dir and self.model_named:
            output_dir = f"out/{self.model_named.rstrip('/').rpartition('/')[2]}"
        epochs, steps = data.num_train_epochs, data.max_steps
        if steps is None:
            steps = -1 if epochs is not None and data.dataset_dir else 5000
        return with_flags(
            self,
            tokenizer=tokenizer,
            output_dir=output_dir,
            max_steps=steps,
            num_train_epochs=3.0 if epochs is None else epochs,  # 3: for --max_steps -1
            do_eval=self.do_eval or self.eval_steps is not None,
        )


def without_comments(words: list[str]) -> list[str]:
    """Drop comments: a word that begins with #, up to the next flag. The guides' lists of flags contain one."""
    uncommented: list[str] = []
    comment: list[str] = []
    for word in [*words, "--"]:
        if word.lstrip().startswith("#") or (comment and not word.startswith("--")):
            comment.append(word.strip())
            continue
        if comment:
            logger.info("Not a flag, taken for a comment: %s", " ".join(comment))
            comment = []
        uncommented.append(word)
    return uncommented[:-1]
