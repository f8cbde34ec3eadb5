"""What a model of masked language modelling is compared with: predictors that are shown what the model is shown.

The unigram predictor knows how frequent residues are in training, and the residue that stands at the position asked.
The neighbour predictor (common.training.neighbours) knows what stands on both sides, and predicts hidden residues.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from common.data import TokenSet
from common.data.collators import IGNORE, MaskingCollator, MaskRates
from common.data.counter_rng import GAMMA, hash_counters, mix
from common.data.flags import DataFlags
from common.data.training_data import held_out_batches
from common.distributed.world import World
from common.training.neighbours import Neighbours
from common.training.protein_losses import hash_of_questions

SAMPLE = 200_000  # proteins, from all over the training split, that baselines are fitted on
RUN = 1000  # consecutive proteins that are read together


def sampled(store: Any, tokens: TokenSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks (ids uint8 [T], offsets int64 [n + 1]) of at most `SAMPLE` proteins of a store.

    Runs of consecutive records: single ones all over a large store would each be a read of the file system.
    """
    starts = np.arange(0, len(store), RUN)
    if len(store) > SAMPLE:
        starts = np.linspace(0, len(store) - RUN, SAMPLE // RUN).astype(np.int64)
    for start in starts:
        block = np.arange(start, min(start + RUN, len(store)))
        ids, offsets = store.gather(block, np.zeros_like(block), store.lengths(block))
        yield tokens.plain(ids), offsets


def given_shown(frequencies: np.ndarray, tokens: TokenSet, rates: MaskRates) -> np.ndarray:
    """Logarithms of P(true residue x | shown token s), float64 [vocab_size of s, vocab_size of x].

    Of the residues asked, a part m is shown as `<mask>`, a part r as one of R replacements at random, and the rest,
    k = 1 - m - r, as itself. With the frequencies f, Bayes' rule gives the prediction of least expected loss among
    those that see only s:

        P(x | <mask>) = f(x), over the x that such a mask stands for where it tells (`TokenSet.masked`)
        P(x | s) = f(x) (k [x = s] + r/R [s is a replacement]) / (k f(s) + r/R [s is a replacement])
    """
    unchanged, replaced = max(0.0, 1 - rates.mask_replace_prob - rates.random_replace_prob), rates.random_replace_prob
    vocabulary = len(frequencies)
    each = np.zeros(vocabulary)
    each[list(tokens.replacements)] = replaced / len(tokens.replacements)
    joint = frequencies[None] * (unchanged * np.eye(vocabulary) + each[:, None])
    total = joint.sum(1, keepdims=True)
    shown = np.where(total > 0, joint / np.where(total > 0, total, 1), frequencies)
    if tokens.masked is None:
        shown[tokens.mask] = frequencies
    for token in np.unique(tokens.masked_ids[tokens.is_maskable]) if tokens.masked is not None else ():
        shown[token] = np.where(tokens.is_maskable & (tokens.masked_ids == token), frequencies, 0)
        shown[token] /= shown[token].sum()
    with np.errstate(divide="ignore"):  # of a residue that cannot be shown so
        return np.log(shown)


@dataclass(frozen=True)
class BaselineLosses:
    """What the baselines lose on a held-out split.

    results: by name; proteins: {baseline: float64 [n]}, nats over the hidden residues of each protein; questions: a
    hash (hex) of which residues were hidden; log_frequencies: float64 [vocab_size], of residues in training.
    """

    results: dict[str, float]
    proteins: dict[str, np.ndarray]
    questions: str
    log_frequencies: np.ndarray


class Baselines:
    """Fitted on training proteins: a store, from which they are sampled."""

    def __init__(self, store: Any, tokens: TokenSet):
        self.tokens = tokens
        self.neighbours = Neighbours.fit(sampled(store, tokens), tokens)

    def losses(
        self, store: Any, flags: DataFlags, collator: MaskingCollator, world: World, prefix: str = "eval"
    ) -> BaselineLosses:
        """Their losses on the proteins of a held-out store; all ranks together.

        collator: of whole proteins, also where ranks share them: of such a group, the first rank computes.
        """
        table = given_shown(np.exp(self.neighbours.log_frequencies), self.tokens, collator.rates)
        kinds = ("unigram", ""), ("unigram", "_masked"), ("neighbours", "_masked")
        sums = np.zeros((len(kinds), 3))  # loss, correct, number
        proteins, hashes = np.zeros((2, len(store))), np.zeros(len(store), np.int64)
        with world.raise_together():
            for batch in held_out_batches(flags, store, collator, world):
                if world.mesh.cp_rank or not batch["num_tokens"]:
                    continue
                shown, labels, bounds, records = (
                    batch[name].numpy() for name in ("input_ids", "labels", "cu_seqlens", "records")
                )
                hashes[records] = hashes_of(shown, labels, bounds).view(np.int64)
                asked = np.flatnonzero(labels != IGNORE)
                hidden = asked[shown[asked] == self.tokens.masked_ids[labels[asked]]]
                log_p = table[shown[asked]], table[shown[hidden]], self.neighbours.log_p(shown, bounds, hidden)
                sequence = np.searchsorted(bounds[1:], hidden, side="right")
                for number, (each, places) in enumerate(zip(log_p, (asked, hidden, hidden), strict=True)):
                    losses = -np.take_along_axis(each, labels[places, None], 1)[:, 0]
                    sums[number] += losses.sum(), (each.argmax(1) == labels[places]).sum(), len(places)
                    if number:
                        proteins[number - 1, records] = np.bincount(sequence, losses, minlength=len(records))
        total = partial(of_all, world)
        results = {}
        for (name, of), (loss, correct, number) in zip(kinds, total(sums).tolist(), strict=True):
            if number:
                results |= {
                    f"{prefix}_{name}_loss{of}": loss / number,
                    f"{prefix}_{name}_accuracy{of}": correct / number,
                    f"{prefix}_{name}_perplexity{of}": math.exp(loss / number),
                }
        of_proteins = dict(zip(("unigram", "neighbours"), total(proteins), strict=True))
        questions = hash_of_questions(total(hashes).view(np.uint64))
        return BaselineLosses(results, of_proteins, questions, self.neighbours.log_frequencies)


def of_all(world: World, values: np.ndarray) -> np.ndarray:
    """Summed over the ranks."""
    return world.sum(torch.from_numpy(values).to(world.device)).cpu().numpy()


def hashes_of(shown: np.ndarray, labels: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """uint64 [B] hashes of the questions about each sequence of a pack: shown, labels int64 [T]; bounds [B + 1]."""
    position = np.arange(len(shown)) - np.repeat(bounds[:-1], np.diff(bounds))
    hashes = hash_counters(0, position) ^ (shown.astype(np.uint64) << np.uint64(32))
    hashes = mix(hashes ^ ((labels + 1 - IGNORE).astype(np.uint64) * np.uint64(GAMMA)))
    return np.add.reduceat(hashes, bounds[:-1])
