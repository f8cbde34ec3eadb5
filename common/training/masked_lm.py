"""Masked language modelling with an encoder. What differs between encoders is their family's (common.models.registry).

Held-out sums are over all masked residues of a split, on all ranks, and divided once: no mean of means. Masks depend
on the protein alone, so every evaluation, model and number of ranks predicts the same residues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.data import TokenSet
from common.data.collators import Batch, Collator, Counts, to_device
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.loader import StepCounts
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import ProteinData, evaluation_masks, held_out_batches, masked_batches, open_data
from common.distributed.world import World
from common.flags import Missing
from common.models.esm2.family import ModelFlags
from common.models.registry import Family, encoder_family
from common.shapes import filled_up
from common.training.arguments import RunArguments
from common.training.evaluation import Baseline, held_out_results
from common.training.run_logger import PlotLabels, step_line
from common.training.task import Build, BuiltModel, Task

UNIGRAM_SAMPLE = 200_000  # proteins, from all over the training split, that the unigram baseline is fitted on
UNIGRAM_RUN = 1000  # consecutive proteins that are read together


@dataclass(frozen=True)
class TrainArguments(RunArguments):
    """The flags of a run of masked language modelling."""

    model: ModelFlags = field(default_factory=ModelFlags)
    data: DataFlags = field(default_factory=DataFlags)

    @property
    def model_named(self) -> str | None:
        return self.model.config_name or self.model.model_name_or_path

    @property
    def family(self) -> Family:
        return encoder_family(str(self.model_named), self.model.model_type)

    @property
    def pack_tokens(self) -> int:
        return self.data.pack_tokens

    def with_pack(self, build: Build) -> TrainArguments:
        if self.data.tokens_per_pack != "auto":
            return self
        from extras.dry_run.auto_pack import largest_that_fits

        return largest_that_fits(self, build)

    @property
    def batch(self) -> tuple[int, str]:
        return (self.pack_tokens, "tokens") if self.data.packing else super().batch

    def missing(self) -> Iterator[Missing]:
        if self.model.bf16_residual and not self.precision.bf16:
            yield Missing("--bf16", "--bf16_residual needs bf16 layers")


class MaskedLM(Task[TrainArguments, ProteinData]):
    """Masked language modelling of proteins."""

    labels = PlotLabels()

    def __init__(self, built: BuiltModel, flags: TrainArguments, world: World):
        super().__init__(built, flags, world)
        self.bf16 = flags.precision.bf16
        self.baselines: dict[str, dict] = {}  # unigram results by split
        self._log_frequencies: np.ndarray | None = None

    def open(self, evaluates: bool) -> None:
        self.data = open_data(
            self.flags.data, self.family.tokens, self.world, evaluates, {"sample": self._make_sample}
        )

    def _make_sample(self) -> Path:
        """Generate proteins for --dataset sample."""
        from extras.prepare.sample import SAMPLE, make_sample

        return make_sample(Path(self.flags.checkpoint.output_dir) / SAMPLE)

    def example(self, tokens: int) -> Batch:
        pack = Pack.of_length(tokens, self.flags.data.max_seq_length)
        choices = np.array(self.family.tokens.replacements, dtype=np.uint8)
        ids = choices[np.random.default_rng(self.flags.data.seed).integers(len(choices), size=tokens)]
        return masked_batches(self.flags.data, self.family.tokens, self.world.mesh)(pack, ids)

    def collator(self, total_steps: int) -> Collator:
        return masked_batches(self.flags.data, self.family.tokens, self.world.mesh, total_steps, self.built.one_shape)

    @staticmethod
    def counts(micro_batches: list[Batch]) -> StepCounts:
        computed = sum(filled_up(len(batch["input_ids"])) for batch in micro_batches)
        return StepCounts(*Counts.of(micro_batches), computed)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16):
            return model(**to_device(batch, self.world.device)).loss_sum

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> dict:
        store = self.data.held_out(split)
        settings = self.bf16, self.built.one_shape
        compared = None
        if self.world.cp_size == 1:  # else a sequence is spread over ranks
            compared = below_unigram(torch.from_numpy(self.log_frequencies()))
        where, has_bar = (self.flags.data, self.world, prefix, step), not self.flags.log.disable_tqdm
        return evaluate(model, store, self.family.tokens, *where, *settings, compared, has_bar)

    def log_frequencies(self) -> np.ndarray:
        """Of the residues in training, as `residue_frequencies`; all ranks together."""
        if self._log_frequencies is None:
            with self.world.raise_together():
                self._log_frequencies = np.log(residue_frequencies(self.data.sample(), self.family.tokens))
        return self._log_frequencies

    @staticmethod
    def summary(results: dict) -> str:
        return (
            f"Held-out loss {results['eval_loss']:.4f} (residue frequencies alone: "
            f"{results['eval_unigram_loss']:.4f}), perplexity {results['perplexity']:.3f}, accuracy "
            f"{results['eval_accuracy']:.4f} ({results['eval_masked_tokens']} masked residues)"
        )

    def baseline(self, split: str, prefix: str) -> dict:
        if split not in self.baselines:
            held_out, tokens = self.data.held_out(split), self.family.tokens
            log_p = self.log_frequencies()
            self.baselines[split] = unigram(log_p, held_out, tokens, self.flags.data, self.world, prefix)
        return self.baselines[split]

    def line(self, row: dict, packs_per_step: PacksPerStep) -> str:
        return step_line(row)


def evaluate(
    model: nn.Module,
    store: Any,
    tokens: TokenSet,
    flags: DataFlags,
    world: World,
    prefix: str = "eval",
    step: int = 0,
    bf16: bool = False,
    one_shape: bool = False,
    baseline: Baseline | None = None,
    has_bar: bool = False,
) -> dict:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` on the proteins of a store; as `held_out_results`."""
    made = held_out_batches(flags, store, evaluation_masks(flags, tokens, world.mesh, one_shape), world)
    sequences = len(store) if has_bar else None
    return held_out_results(model, made, world, prefix, step, bf16, "masked_tokens", baseline, sequences)


def below_unigram(log_p: Tensor) -> Baseline:
    """How far the loss is below that of the unigram predictor. log_p: of the tokens, float64 [vocab_size]."""

    def compare(output: Any, batch: Batch) -> Tensor:
        if (losses := getattr(output, "token_losses", None)) is None:  # a family may do without
            return torch.zeros(2, 0, dtype=torch.float64)
        labels = batch["labels"]
        if isinstance(mask := batch.get("attention_mask"), Tensor):
            kept = mask.bool()
            labels, ends = labels[kept], kept.sum(1).cumsum(0)
        else:
            ends = batch["cu_seqlens"][1:].contiguous()
        asked = (labels >= 0).nonzero().squeeze(1)
        below = -log_p[labels[asked]] - losses.cpu().double()[asked]
        sequence = torch.searchsorted(ends.long(), asked, right=True)
        found = torch.zeros(2, len(ends), dtype=torch.float64)
        return found.index_add(1, sequence, torch.stack([below, torch.ones_like(below)]))

    return compare


def unigram(
    log_p: np.ndarray, store: Any, tokens: TokenSet, flags: DataFlags, world: World, prefix: str = "eval"
) -> dict:
    """The unigram baseline: predicts every masked residue from the frequencies in training, whose logarithms are
    log_p [vocab_size]."""
    sums = torch.zeros(3, dtype=torch.float64)
    with world.raise_together():
        for batch in held_out_batches(flags, store, evaluation_masks(flags, tokens, world.mesh), world):
            labels = batch["labels"].flatten().numpy()
            labels = labels[labels >= 0]
            correct = (labels == log_p.argmax()).sum()
            sums += torch.tensor([-log_p[labels].sum(), correct, len(labels)], dtype=torch.float64)
    loss_sum, correct, masked = world.sum(sums).tolist()
    masked = max(masked, 1)
    return {
        f"{prefix}_unigram_loss": loss_sum / masked,
        f"{prefix}_unigram_accuracy": correct / masked,
        f"{prefix}_unigram_perplexity": math.exp(loss_sum / masked),
    }


def residue_frequencies(store: Any, tokens: TokenSet) -> np.ndarray:
    """Relative frequencies of the tokens, float64 [vocab_size]; about zero for those that are never masked.

    One is added to every count, so that a residue absent from training has a finite loss.
    """
    counts = np.zeros(tokens.vocab_size)
    # Runs of consecutive records: single ones all over a large store would each be a read of the filesystem.
    starts = np.arange(0, len(store), UNIGRAM_RUN)
    if len(store) > UNIGRAM_SAMPLE:
        starts = np.linspace(0, len(store) - UNIGRAM_RUN, UNIGRAM_SAMPLE // UNIGRAM_RUN).astype(np.int64)
    for start in starts:
        block = np.arange(start, min(start + UNIGRAM_RUN, len(store)))
        ids, _ = store.gather(block, np.zeros_like(block), store.lengths(block))
        counts += np.bincount(ids, minlength=tokens.vocab_size)
    residues = slice(tokens.residues[0], tokens.residues[1] + 1)
    frequencies = np.full_like(counts, 1e-300)
    frequencies[residues] = (counts[residues] + 1) / (counts[residues] + 1).sum()
    return frequencies
