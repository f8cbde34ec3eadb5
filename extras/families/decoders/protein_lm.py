"""Causal language modelling of proteins with a decoder; its batches are extras.families.decoders.protein_batches'.

Held-out proteins are read forwards. Beside the loss a predicted token there is that of the residues alone, in nats a
residue: what masked diffusion's bound is compared with, and what residue frequencies lose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from common.data.collators import Batch, Collator
from common.data.crops import Pack
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import EVAL_SEED, ProteinData, held_out_batches, rank_batches
from common.distributed.world import World
from common.training.baselines import hashes_of, of_all, sampled
from common.training.curves import PlotLabels
from common.training.evaluation import held_out_results, perplexity
from common.training.log_row import step_line
from common.training.masked_lm import add_by_protein, open_proteins
from common.training.neighbours import smoothed_frequencies
from common.training.protein_losses import Evaluation, ProteinLosses, hash_of_questions, mean_and_error
from extras.families.decoders.causal_arguments import CausalArguments
from extras.families.decoders.causal_lm import CausalLM
from extras.families.decoders.config import DIRECTIONS
from extras.families.decoders.protein_arguments import ProteinDecoderArguments, ResidueFlags
from extras.families.decoders.protein_batches import ProteinCollator, protein_batches
from extras.families.decoders.residues import RESIDUE_TOKENS, ResidueTokenizer


class ProteinLM(CausalLM):
    """Causal language modelling of proteins."""

    metrics = ("loss", "loss_residues", "accuracy")
    labels = PlotLabels("Causal-language-modelling loss", "nats per token", "held-out proteins", training="training")
    data: ProteinData

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self._baselines: dict[str, UnigramLosses] = {}

    def open_data(self, evaluates: bool) -> None:
        self.built.config.others |= {"bos_token_id": RESIDUE_TOKENS.begin, "pad_token_id": RESIDUE_TOKENS.pad}
        self.data, self.held_out = open_proteins(self, RESIDUE_TOKENS, evaluates)
        flags = self.flags.data
        self.built.config.others[DIRECTIONS] = flags.directions  # of score.py
        read = {"tokenizer": ResidueTokenizer.identity, "directions": flags.directions, "fill_in": flags.fill_in}
        self.data.identity = self.data.identity | read

    def example(self, tokens: int) -> Batch:
        pack = Pack.of_length(tokens, self.flags.data.max_seq_length)
        choices = np.array(RESIDUE_TOKENS.replacements, np.uint8)
        ids = choices[np.random.default_rng(self.flags.data.seed).integers(len(choices), size=tokens)]
        return protein_batches(self.flags.data, self.world.mesh)(pack, ids)

    def collator(self, total_steps: int) -> Collator:
        return protein_batches(self.flags.data, self.world.mesh, self._filled_to(self.flags.pack_tokens))

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> Evaluation:
        """Of all proteins of a split: CausalLM's results, those of `residue_results`, and the unigram baseline's."""
        store, flags, world = self.data.held_out(split), self.flags.data, self.world
        unigram = self.unigram(split)
        filled_to = self._filled_to(flags.held_out_tokens)
        collator = rank_batches(ProteinCollator(EVAL_SEED), flags, world.mesh, RESIDUE_TOKENS.pad, filled_to=filled_to)
        batches, sums = held_out_batches(flags, store, collator, world), ResidueSums(len(store), world.device)
        sequences = None if self.flags.log.disable_tqdm else len(store)
        how = self.flags.precision.bf16, "tokens", sums, sequences
        results, losses = held_out_results(model, batches, world, prefix, step, *how)
        if losses is None:
            return Evaluation({})
        with world.raise_together():
            clusters = self.data.clusters(split)
        losses = replace(losses, questions=unigram.questions, clusters=clusters)
        return Evaluation(results | residue_results(losses, unigram.proteins, prefix), losses)

    def unigram(self, split: str) -> UnigramLosses:
        """The baseline's losses on a split; all ranks together."""
        if split not in self._baselines:
            with self.world.raise_together():
                log_p = residue_frequencies(self.data)
            store = self.data.held_out(split)
            self._baselines[split] = unigram_losses(log_p, store, self.flags.data, self.world)
        return self._baselines[split]

    @staticmethod
    def summary(results: dict, prefix: str = "eval") -> str:
        if f"{prefix}_loss_residues" not in results:
            return f"No residue in {results[f'{prefix}_samples']} held-out proteins: no loss"
        text = (
            "Held-out loss {loss_residues:.4f} of {tokens_residues} residues (by their frequencies "
            "{unigram_loss_residues:.4f}), perplexity {perplexity_residues:.3f}; {loss:.4f} of all {tokens} tokens"
        )
        return text.format(**{name.removeprefix(f"{prefix}_"): value for name, value in results.items()})

    def line(self, row: dict, packs_per_step: PacksPerStep) -> str:
        return step_line(row, self.data.row_fields)


def task_for(args: CausalArguments) -> type[CausalLM]:
    """The task of a decoder whose flags these are."""
    return ProteinLM if isinstance(args, ProteinDecoderArguments) else CausalLM


def is_residue(labels: Any) -> Any:
    """Which labels are residues, of a tensor or an array."""
    first, last = RESIDUE_TOKENS.residues
    return (labels >= first) & (labels <= last)


class ResidueSums:
    """Loss and number of the residues of each held-out protein."""

    def __init__(self, proteins: int, device: torch.device):
        self.by_protein = torch.zeros(2, proteins, dtype=torch.float64, device=device)

    def add(self, output: Any, inputs: dict[str, Any], batch: Batch) -> None:
        counted = is_residue(inputs["labels"])
        values = torch.stack([output.token_losses.double() * counted, counted.double()])
        add_by_protein(self.by_protein, values, inputs["cu_seqlens"].long(), batch["records"])

    def reduced(self, world: World, prefix: str) -> Evaluation:
        loss_sum, residues = world.sum(self.by_protein).cpu().numpy()
        return Evaluation({}, ProteinLosses(loss_sum, residues.astype(np.int32)))


def residue_results(losses: ProteinLosses, unigram: np.ndarray, prefix: str) -> dict[str, float]:
    """Losses in nats a residue, with standard errors over proteins, or over their clusters. losses: `masked` counts
    the residues; unigram: float64 [n], the baseline's of each protein."""
    residues = int(losses.masked.sum())
    if not residues:
        return {}
    mean, error = mean_and_error(losses.loss_sum, losses.masked, losses.clusters)
    below, of_below = losses.below(unigram)
    results = {
        f"{prefix}_loss_residues": mean,
        f"{prefix}_loss_residues_stderr": error,
        f"{prefix}_perplexity_residues": perplexity(mean),
        f"{prefix}_tokens_residues": residues,
        f"{prefix}_unigram_loss_residues": float(unigram.sum() / residues),
        f"{prefix}_below_unigram_residues": below,
        f"{prefix}_below_unigram_residues_stderr": of_below,
    }
    if losses.clusters is not None:
        results[f"{prefix}_clusters"] = len(np.unique(losses.clusters[losses.masked > 0]))
    return {name: value for name, value in results.items() if np.isfinite(value)}


@dataclass(frozen=True)
class UnigramLosses:
    """proteins: float64 [n], nats over the residues of each; questions: a hash (hex) of what is predicted."""

    proteins: np.ndarray
    questions: str


def residue_frequencies(data: ProteinData) -> np.ndarray:
    """Logarithms of the frequencies of tokens in training proteins, float64 [vocab_size]."""
    size = RESIDUE_TOKENS.vocab_size
    counts = sum(
        (np.bincount(ids, minlength=size) for ids, _ in sampled(data.sample(), RESIDUE_TOKENS)), np.zeros(size)
    )
    return np.log(smoothed_frequencies(counts, RESIDUE_TOKENS))


def unigram_losses(log_p: np.ndarray, store: Any, flags: ResidueFlags, world: World) -> UnigramLosses:
    """Of the held-out proteins of a store; all ranks together. Of a group that shares packs, the first rank counts."""
    proteins, hashes = np.zeros(len(store)), np.zeros(len(store), np.int64)
    with world.raise_together():
        for batch in held_out_batches(flags, store, ProteinCollator(EVAL_SEED), world):
            if world.mesh.cp_rank or not batch["num_tokens"]:
                continue
            shown, labels, bounds, records = (
                batch[name].numpy() for name in ("input_ids", "labels", "cu_seqlens", "records")
            )
            hashes[records] = hashes_of(shown, labels, bounds).view(np.int64)
            losses = np.where(is_residue(labels), -log_p[np.maximum(labels, 0)], 0.0)
            proteins[records] = np.add.reduceat(losses, bounds[:-1])
    return UnigramLosses(of_all(world, proteins), hash_of_questions(of_all(world, hashes).view(np.uint64)))
