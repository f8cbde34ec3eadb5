"""Packs of proteins to batches in which each token predicts the next: both directions, and spans to fill in.

Which records are reversed or filled in, and where, are hashes of (seed, epoch, record): ranks, workers and resumes
change nothing. Spans are filled in as ProGen3 does (Bhatnagar et al. 2025):

    <bos_glm> 1 M K <span_1> A 2 <eos> <span_1> V L <eos_span>

Only the residues of spans and `<eos_span>` are predicted. Positions run on to the end, as in stock transformers.
A crop has only the ends of its protein that it reaches, and no span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from common.data.collators import IGNORE, Batch, Collator
from common.data.counter_rng import DIRECTION, FILL_IN, SPANS, derive_key, hash_counters, scale
from common.data.crops import Pack
from common.data.training_data import rank_batches
from common.distributed.world import Mesh
from common.shape_buckets import sequences_of_packs
from extras.families.decoders.protein_arguments import ResidueFlags
from extras.families.decoders.residues import BOS_FILL, EOS_SPAN, FIRST_SPAN, RESIDUE_TOKENS, reversed_protein
from extras.families.text.contexts import next_token_batch

MOST_SPANS = 4  # in a protein
TOKENS_OF_SPAN = 3  # beside its residues: `<span_k>` twice, and `<eos_span>`


@dataclass(frozen=True)
class ProteinCollator:
    """both: half of the records are reversed; fill_in: the fraction of records with spans to fill in; longest: most
    tokens of a sequence, which those with spans keep to. Evaluations have neither."""

    seed: int
    both: bool = False
    fill_in: float = 0.0
    longest: int = 1 << 62

    def __call__(self, pack: Pack, ids: np.ndarray, step: int | None = None) -> Batch:
        """The batch of a pack of crops whose tokens are `ids` uint8 [T], as of `next_token_batch`; in an evaluation
        with `records`, else with `source`."""
        sequences = np.split(ids, np.cumsum(pack.lengths)[:-1]) if len(ids) else []
        predicted = [np.ones(len(sequence), bool) for sequence in sequences]
        if step is not None:
            arranged = [self._arranged(*one, pack.epoch) for one in zip(sequences, pack.records.tolist(), strict=True)]
            sequences, predicted = [tokens for tokens, _ in arranged], [targets for _, targets in arranged]
        ids = np.concatenate([*sequences, ids[:0]])
        batch = next_token_batch(ids, np.array([len(sequence) for sequence in sequences]))
        if len(ids):
            is_target = torch.from_numpy(np.concatenate(predicted))
            batch["labels"][:-1].masked_fill_(~is_target[1:], IGNORE)
            batch["num_targets"] = int((batch["labels"] != IGNORE).sum())
        batch["num_unknown"] = int(np.count_nonzero(ids == RESIDUE_TOKENS.unknown))
        if step is None:
            batch["records"] = torch.from_numpy(pack.records.astype(np.int64))
        else:
            batch["source"] = pack.source
        return batch

    def _arranged(self, ids: np.ndarray, record: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """One sequence as it is trained on, and which of its tokens are predicted, bool."""
        direction, fills = (self._hash(epoch, purpose, record) for purpose in (DIRECTION, FILL_IN))
        if self.both and direction >> 63:
            ids = reversed_protein(ids)
        spans = []
        if fills >> 11 < round(self.fill_in * 2**53):  # 53 bits, so that 1.0 is above all
            spans = self._spans(ids, derive_key(self.seed, epoch, SPANS, record))
        return with_spans(ids, spans) if spans else (ids, np.ones(len(ids), bool))

    def _hash(self, epoch: int, purpose: int, record: int) -> int:
        return int(hash_counters(derive_key(self.seed, epoch, purpose), np.array([record]))[0])

    def _spans(self, ids: np.ndarray, key: int) -> list[tuple[int, int]]:
        """The spans of a whole protein, each from a token up to another: one to MOST_SPANS pairs of points between
        residues, uniform and sorted; those without a residue are left out. None where they would not fit, and of a
        crop."""
        if (ids[0], ids[-1]) != (RESIDUE_TOKENS.begin, RESIDUE_TOKENS.end):
            return []
        hashes = hash_counters(key, np.arange(1 + 2 * MOST_SPANS))
        number = 1 + int(scale(hashes[:1], MOST_SPANS)[0])
        if len(ids) + TOKENS_OF_SPAN * number > self.longest:
            return []
        points = 2 + np.sort(scale(hashes[1 : 1 + 2 * number], len(ids) - 3))
        return [(begin, end) for begin, end in points.reshape(-1, 2).tolist() if begin < end]


def with_spans(ids: np.ndarray, spans: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """A protein from `<bos>` to `<eos>` with spans [begin, end) to fill in: its tokens, and which of them are
    predicted, bool."""
    context, filled, targets, at = [np.array([BOS_FILL], np.uint8)], [], [], 1
    for number, (begin, end) in enumerate(spans):
        span = np.array([FIRST_SPAN + number], np.uint8)
        context += [ids[at:begin], span]
        filled += [span, ids[begin:end], np.array([EOS_SPAN], np.uint8)]
        targets += [False, *[True] * (end - begin), True]
        at = end
    tokens = np.concatenate([*context, ids[at:], *filled])
    return tokens, np.append(np.zeros(len(tokens) - len(targets), bool), targets)


def protein_batches(flags: ResidueFlags, mesh: Mesh, filled_to: int = 0) -> Collator:
    """The collator of a rank for training: of whole packs, or of its slices of them. filled_to: of `rank_batches`,
    without the tokens that spans add."""
    collator = ProteinCollator(flags.seed, flags.directions == "both", flags.fill_in, flags.max_seq_length)
    if filled_to and flags.fill_in:
        filled_to += MOST_SPANS * TOKENS_OF_SPAN * sequences_of_packs(filled_to, flags.max_seq_length)
    return rank_batches(collator, flags, mesh, RESIDUE_TOKENS.pad, filled_to=filled_to)
