"""Causal language modelling with a decoder.

The loss is the cross-entropy in nats a predicted token, of the global batch. Mixtral's router adds its load-balancing
loss, weighted: of each pack by itself, in proportion to its predicted tokens. A pack is the same on any number of
ranks, and so is the sum; evaluations have no router loss.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor, nn

from common.data.collators import Batch, Collator, Counts, to_device
from common.data.crops import Pack
from common.data.loader import StepCounts
from common.data.packs_per_step import PacksPerStep
from common.models.layers.initialise import count_parameters
from common.training.curves import PlotLabels
from common.training.evaluation import held_out_results
from common.training.log_row import step_line
from common.training.protein_losses import Evaluation
from common.training.task import Task
from extras.families.decoders.causal_arguments import CausalArguments
from extras.families.decoders.config import TRAINED_CONTEXT
from extras.families.text.contexts import causal_batches
from extras.families.text.data import TextData, held_out_contexts, open_text
from extras.families.text.tokenizers import check_vocabulary, open_tokenizer

logger = logging.getLogger(__name__)

GUIDE_LINE_KEYS = ("loss", "step_loss", "learning_rate")


class CausalLM(Task[CausalArguments, TextData]):
    """Causal language modelling of text."""

    metrics = ("loss", "accuracy")
    terminal_every = 10  # the guides' default is to log every step
    labels = PlotLabels("Causal-language-modelling loss", "nats per token", "held-out text", training="training")

    def open(self, evaluates: bool) -> None:
        parameters = count_parameters(self.built.model)
        logger.info("Created model with total parameters: %d (%.2f B)", parameters, parameters / 1e9)
        self.tokenizer = open_tokenizer(self.flags.data.tokenizer, self.world)
        with self.world.raise_together():
            check_vocabulary(self.tokenizer, self.built.config.vocab_size)
        # transformers' generate() stops there.
        self.built.config.others |= {"bos_token_id": None, "eos_token_id": self.tokenizer.eos_id}
        self._record_context(self.built.config.others)
        self.open_data(evaluates)

    def open_data(self, evaluates: bool) -> None:
        self.data = open_text(self.flags.data, self.world, evaluates, self.tokenizer)

    def _record_context(self, others: dict) -> None:
        """Record the longest context trained on, by this run or its starting weights before; nothing for a published
        model, of which that is unknown."""
        context = self.flags.data.max_seq_length
        if self.flags.model.model_name_or_path:
            before = others.pop(TRAINED_CONTEXT, None)
            if type(before) is not int:
                return
            context = max(context, before)
        others[TRAINED_CONTEXT] = context

    def example(self, tokens: int) -> Batch:
        """This rank's batch of a pack of so many random tokens, a document each context."""
        pack = Pack.of_length(tokens, self.flags.data.max_seq_length)
        ids = np.random.default_rng(self.flags.data.seed).integers(self.built.config.vocab_size, size=tokens)
        return causal_batches(self.flags.data, self.world.mesh)(pack, ids)

    def collator(self, total_steps: int) -> Collator:
        return causal_batches(self.flags.data, self.world.mesh, self._filled_to(self.flags.pack_tokens))

    def _filled_to(self, tokens: int) -> int:
        return tokens if self.built.static_shape else 0

    @staticmethod
    def counts(micro_batches: list[Batch]) -> StepCounts:
        computed = sum(len(batch["input_ids"]) for batch in micro_batches)
        return StepCounts(*Counts.of(micro_batches), computed)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy in nats, summed over a batch's targets, plus the router's loss; fp32 scalar. Of a pack that
        ranks share, this rank's part of both."""
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.flags.precision.bf16):
            output = model(**to_device(batch, self.world.device))
        if output.router is None:
            return output.loss_sum
        targets = batch.get("cp_targets", batch["num_targets"])
        return output.loss_sum + self.built.config.router_aux_loss_coef * targets * output.router

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> Evaluation:
        """`{prefix}_{loss,accuracy,perplexity,...}` of --validation_batches batches. Beside none: of text, a unigram
        predictor is too weak a baseline."""
        store = self.data.held_out(split)
        flags = self.flags.data
        collator = causal_batches(flags, self.world.mesh, self._filled_to(flags.held_out_tokens))
        batches, contexts = held_out_contexts(flags, store, collator, self.world)
        sequences = None if self.flags.log.disable_tqdm else contexts
        bf16 = self.flags.precision.bf16
        return held_out_results(model, batches, self.world, prefix, step, bf16, "tokens", sequences=sequences)

    @staticmethod
    def summary(results: dict, prefix: str = "eval") -> str:
        if "eval_loss" not in results:
            return f"Nothing to predict in {results['eval_samples']} held-out sequences: no loss"
        return (
            f"Held-out loss {results['eval_loss']:.4f}, perplexity {results['perplexity']:.3f}, "
            f"accuracy {results['eval_accuracy']:.4f} ({results['eval_tokens']} predicted tokens)"
        )

    def line(self, row: dict, packs_per_step: PacksPerStep) -> str:
        """A row of metrics.jsonl in the guides' shape."""
        packs = packs_per_step.at(max(row["step"] - 1, 0))
        return guide_line(row, packs * self.flags.data.per_device_train_batch_size)


def guide_line(row: dict, samples: int) -> str:
    """`step_line` in the format of the FSDP guides, which their users' scripts parse, with more fields appended.

    samples: sequences per step over all ranks; the speed includes the wait for data.
    """
    loss = row.get("step_loss", float("nan"))  # missing where the last step was skipped
    speed = samples / max(row["step_seconds"], 1e-9)
    guide_fields = (
        f"Batch {row['step'] - 1} Loss: {loss:.5f}, Speed: {speed:.2f} samples/sec, lr: {row['learning_rate']:.6f}"
    )
    return f"{guide_fields}, {step_line({k: v for k, v in row.items() if k not in GUIDE_LINE_KEYS})}"
