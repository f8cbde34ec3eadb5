"""The held-out bound: an upper bound of -log p(protein | its length) in nats a residue (formula: masking.py).

Each protein is masked at K = 8 times, t = (u + k) / K with one u of its own: a stratified estimate without bias. Times
and masks depend on the protein alone, so that every model, objective and number of ranks is asked the same.

How many residues happen to be masked moves the estimate more than the model does. So the sum is of what each masked
residue loses beyond a guess among the A standard ones, and the guess's own bound, log A a residue, is added: the same
expectation, and for that guess the exact value.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from common.data import TokenSet
from common.data.collators import Batch
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.loader import ProteinStore
from common.data.training_data import EVAL_SEED, held_out_batches, rank_batches, with_linkers
from common.distributed.world import World
from common.training.evaluation import held_out_results
from common.training.masked_lm import add_by_protein
from common.training.protein_losses import Evaluation, mean_and_error
from extras.families.diffusion.masking import DiffusionCollator, uniform

if TYPE_CHECKING:
    from common.training.masked_lm import MaskedLM

logger = logging.getLogger(__name__)
STRATA = 8


class StratumCollator(DiffusionCollator):
    """The times of stratum k; its masks are drawn apart from those of the others."""

    def __init__(self, tokens: TokenSet, stratum: int):
        super().__init__(tokens, EVAL_SEED)
        self.stratum = stratum

    def times(self, pack: Pack) -> np.ndarray:
        return (uniform(EVAL_SEED, 0, pack.records) + self.stratum) / STRATA

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        return super().__call__(replace(pack, epoch=self.stratum), ids, step)


@dataclass(frozen=True)
class ProteinBounds:
    """Of n held-out proteins, float64 [n] each: bound, nats; unigram: nats of residue frequencies; residues."""

    bound: np.ndarray
    unigram: np.ndarray
    residues: np.ndarray


class BoundSums:
    """Sums over the strata for each protein: bound, unigram, residues. guess: log A; log_frequencies: float64
    [vocab_size], of the unigram baseline."""

    def __init__(self, proteins: int, guess: float, log_frequencies: np.ndarray, device: torch.device):
        self.guess, self.log_frequencies = guess, torch.from_numpy(log_frequencies).to(device)
        self.sums = torch.zeros(3, proteins, dtype=torch.float64, device=device)

    def add(self, output: Any, inputs: dict[str, Any], batch: Batch) -> None:
        labels, weights = inputs["labels"], inputs["weights"].double()
        is_masked, is_residue = labels >= 0, weights > 0
        true = torch.where(is_masked, labels, inputs["input_ids"])
        more = (output.token_losses.double() - self.guess) * weights * is_masked
        unigram = torch.where(is_residue, -self.log_frequencies[true], 0.0)
        number = is_residue.double()
        values = torch.stack((more + self.guess * number, unigram, number))
        add_by_protein(self.sums, values, inputs["cu_seqlens"].long(), batch["records"])

    def reduced(self, world: World, prefix: str) -> Evaluation:
        self.sums = world.sum(self.sums)
        return Evaluation({})


def protein_bounds(
    model: nn.Module,
    store: ProteinStore,
    tokens: TokenSet,
    flags: DataFlags,
    world: World,
    log_frequencies: np.ndarray,
    step: int = 0,
    bf16: bool = False,
    static_shape: bool = False,
) -> ProteinBounds | None:
    """The bounds of a store's proteins; all ranks together. None if the run was stopped meanwhile."""

    def batches() -> Generator[Batch, None, None]:
        filled_to = flags.held_out_tokens if static_shape else 0
        for stratum in range(STRATA):
            masks, most = with_linkers(StratumCollator(tokens, stratum), tokens), (stratum + 1) / STRATA
            collator = rank_batches(masks, flags, world.mesh, tokens.pad, tokens.mask, filled_to, most)
            yield from held_out_batches(flags, store, collator, world)

    guess = math.log(len(tokens.replacements))
    also = BoundSums(len(store), guess, log_frequencies, world.device)
    if not held_out_results(model, batches(), world, "nelbo", step, bf16, "residues", also).results:
        return None
    return ProteinBounds(*(also.sums.cpu().numpy() / STRATA))


class HeldOutBound:
    """The bounds of a run's evaluations."""

    def __init__(self, task: MaskedLM):
        self.task = task

    def evaluate(
        self,
        model: nn.Module,
        store: ProteinStore,
        prefix: str,
        step: int,
        clusters: np.ndarray | None,
        log_frequencies: np.ndarray,
    ) -> dict[str, float] | None:
        """`{prefix}_nelbo`, its standard error over proteins, or over their clusters, and the same of residue
        frequencies, each in nats a residue; {} without a residue. All ranks together; None if the run was stopped."""
        task = self.task
        settings = step, task.bf16, task.built.static_shape
        asked = model, store, task.tokens, task.flags.data, task.world, given_masks(log_frequencies, task.tokens)
        if (bounds := protein_bounds(*asked, *settings)) is None:
            return None
        (mean, error), unigram = (
            mean_and_error(sums, bounds.residues, clusters) for sums in (bounds.bound, bounds.unigram)
        )
        names = "nelbo", "nelbo_stderr", "unigram_nelbo"
        results = {f"{prefix}_{name}": value for name, value in zip(names, (mean, error, unigram[0]), strict=True)}
        results = {name: value for name, value in results.items() if np.isfinite(value)}
        if results:
            logger.info("%s", summary(results, int(bounds.residues.sum()), prefix, task.tokens))
        return results


def given_masks(log_frequencies: np.ndarray, tokens: TokenSet) -> np.ndarray:
    """The logarithm of each token's frequency among those that are masked alike, float64 [vocab_size]: what a model
    is shown tells that much."""
    if tokens.masked is None:
        return log_frequencies
    frequencies = np.exp(log_frequencies) * tokens.is_maskable
    alike = np.bincount(tokens.masked_ids, frequencies, tokens.vocab_size)[tokens.masked_ids]
    return np.where(tokens.is_maskable, log_frequencies - np.log(np.where(alike > 0, alike, 1)), log_frequencies)


def summary(results: dict[str, float], residues: int, prefix: str, tokens: TokenSet) -> str:
    """The results in a line, with what they compare with."""
    error = results.get(f"{prefix}_nelbo_stderr")
    bound = f"{results[f'{prefix}_nelbo']:.4f}" + ("" if error is None else f" ± {error:.4f}")
    unit, others = "residue", "a decoder's nats a residue, without <eos>, compare"
    if getattr(tokens, "declared", ""):
        unit, others = "token", "no other alphabet's compares"
    if tokens.masked is not None:
        others = f"given what masks show; {others}"
    return (
        f"Held-out bound of -log p(protein): {bound} nats a {unit}, of {residues:,} (by their frequencies "
        f"{results[f'{prefix}_unigram_nelbo']:.4f}); {others}"
    )
