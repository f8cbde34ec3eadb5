"""A baseline for masked language modelling: predicts a residue from its two neighbours on each side, where visible.

    P(x | neighbours) ~ f(x) * product over visible neighbours of (P(x | neighbour) / f(x)) ** w

f is the residue frequency. P(x | neighbour) is counted for each of the four places, with pseudo-counts. w is one
number, cross-validated over proteins: 0 gives the frequencies, 1 naive Bayes. Counts of whole neighbourhoods (5-grams)
gain more where held-out proteins have relatives in training, and are worse than the frequencies where they have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.data import TokenSet

PLACES = (-1, 1, -2, 2)
EDGE, HIDDEN = -2, -1  # symbols of neighbours beside the S standard residues, 0 .. S - 1: indices from the end
FOLDS = 10  # of proteins: w is fitted on the residues of each with the counts of the others
MAX_FITTED = 50_000  # residues that w is fitted on, evenly from all
STRENGTHS = np.arange(31) / 20  # w


def smoothed_frequencies(counts: np.ndarray, tokens: TokenSet) -> np.ndarray:
    """Relative frequencies of tokens from their counts, float64 [vocab_size].

    About zero for tokens that are never masked. One is added to every count, so that a residue absent from training
    has a finite loss.
    """
    residues = tokens.is_maskable
    frequencies = np.full(tokens.vocab_size, 1e-300)
    frequencies[residues] = (counts[residues] + 1) / (counts[residues] + 1).sum()
    return frequencies


@dataclass(frozen=True)
class Neighbours:
    """The fitted baseline; the formula is the module's.

    log_frequencies: float64 [vocab_size]; scores: float64 [4, S + 2, S], w * log(P(x | symbol) / f(x)) for each place,
    symbol and standard residue x; strength: w.
    """

    tokens: TokenSet
    log_frequencies: np.ndarray
    scores: np.ndarray
    strength: float

    @classmethod
    def fit(cls, blocks: Iterable[tuple[np.ndarray, np.ndarray]], tokens: TokenSet) -> Neighbours:
        """blocks: of whole training proteins with `<cls>` and `<eos>`, ids uint8 [T] and offsets int64 [n + 1]."""
        symbols, standard = _symbols(tokens), len(tokens.replacements)
        counts = np.zeros(tokens.vocab_size)
        pairs = np.zeros((FOLDS, len(PLACES), standard + 2, standard))
        fitted, step = np.empty((0, len(PLACES) + 2), np.int16), 1
        proteins = residues = 0
        for ids, offsets in blocks:
            counts += np.bincount(ids, minlength=tokens.vocab_size)
            fold = (proteins + np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))) % FOLDS
            positions = np.flatnonzero(symbols[ids] >= 0)
            around = _around(symbols, ids, offsets, positions)
            rows = np.column_stack((around, fold[positions], symbols[ids[positions]]))
            pairs += _count(rows, standard)
            fitted = np.concatenate((fitted, rows[-residues % step :: step].astype(np.int16)))
            while len(fitted) > MAX_FITTED:
                fitted, step = fitted[::2], 2 * step
            proteins, residues = proteins + len(offsets) - 1, residues + len(rows)
        log_frequencies = np.log(smoothed_frequencies(counts, tokens))
        log_f = _log_softmax(log_frequencies[list(tokens.replacements)])
        strength = _fit_strength(pairs, fitted, log_f)
        return cls(tokens, log_frequencies, strength * _log_ratios(pairs.sum(0), log_f), strength)

    def log_p(self, input_ids: np.ndarray, offsets: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Log-probabilities of the residues at `positions`, float64 [P, vocab_size]. Their own tokens are not read,
        but for what a mask tells (`TokenSet.masked`).

        input_ids: [T], as the model sees them; offsets: int64 [n + 1], of its sequences or crops.
        """
        around = _around(_symbols(self.tokens), input_ids, offsets, positions)
        log_p = np.repeat(self.log_frequencies[None], len(positions), 0)
        standard = list(self.tokens.replacements)  # other letters keep their frequencies
        log_f = self.log_frequencies[standard]
        log_p[:, standard] = _log_softmax(log_f + _sum_scores(self.scores, around)) + np.log(np.exp(log_f).sum())
        if self.tokens.masked is not None:  # what is shown tells which tokens it may stand for
            possible = self.tokens.masked_ids == input_ids[positions][:, None]
            log_p = _log_softmax(np.where(possible, log_p, -np.inf))
        return log_p


def _symbols(tokens: TokenSet) -> np.ndarray:
    """The symbol of each token, int64 [vocab_size]: an edge for `<cls>`, `<eos>` and other special tokens; hidden for
    `<mask>`, `<unk>`, `<pad>` and residues other than the standard ones."""
    symbols = np.full(tokens.vocab_size, EDGE)
    symbols[tokens.residues[0] : tokens.residues[1] + 1] = HIDDEN
    symbols[[tokens.mask, tokens.unknown, tokens.pad]] = HIDDEN
    symbols[list(tokens.replacements)] = np.arange(len(tokens.replacements))
    return symbols


def _around(symbols: np.ndarray, ids: np.ndarray, offsets: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Symbols at PLACES around each position, int64 [P, 4]: hidden beyond an edge, which says all there is to say, and
    beyond a crop."""
    sequence = np.searchsorted(offsets, positions, side="right") - 1
    first, last = offsets[sequence], offsets[sequence + 1] - 1
    around = np.empty((len(positions), len(PLACES)), np.int64)
    for column, place in enumerate(PLACES):
        clipped = np.clip(positions + place, first, last)
        around[:, column] = np.where(clipped == positions + place, symbols[ids[clipped]], HIDDEN)
    around[:, 2:][around[:, :2] == EDGE] = HIDDEN
    return around


def _count(rows: np.ndarray, standard: int) -> np.ndarray:
    """The numbers of pairs of symbol and residue, [FOLDS, 4, S + 2, S].

    rows: int64 [n, 6], symbols around, fold of the protein, and residue."""
    shape = (FOLDS, standard + 2, standard)
    fold, x = rows[:, -2:].T
    pairs = [(fold * shape[1] + rows[:, column] % shape[1]) * standard + x for column in range(len(PLACES))]
    of_places = [np.bincount(of_place, minlength=math.prod(shape)).reshape(shape) for of_place in pairs]
    return np.stack(of_places, 1)


def _log_ratios(pairs: np.ndarray, log_f: np.ndarray) -> np.ndarray:
    """log(P(x | symbol) / f(x)), [4, S + 2, S], with S pseudo-counts in proportion to f; 0 for a hidden symbol."""
    pseudo = len(log_f)
    ratios = np.log((pairs / np.exp(log_f) + pseudo) / (pairs.sum(-1, keepdims=True) + pseudo))
    ratios[:, HIDDEN] = 0
    return ratios


def _fit_strength(pairs: np.ndarray, rows: np.ndarray, log_f: np.ndarray) -> float:
    """The likeliest of STRENGTHS, of residues given the counts of the other folds. pairs, rows: as of `_count`."""
    likelihoods = np.zeros(len(STRENGTHS))
    for fold, of_fold in enumerate(pairs):
        chosen = rows[rows[:, -2] == fold]
        sums = _sum_scores(_log_ratios(pairs.sum(0) - of_fold, log_f), chosen[:, : len(PLACES)])
        log_p = (_log_softmax(log_f + w * sums) for w in STRENGTHS)
        likelihoods += [np.take_along_axis(of_w, chosen[:, -1:], 1).sum() for of_w in log_p]
    return float(STRENGTHS[np.argmax(likelihoods)])


def _sum_scores(scores: np.ndarray, around: np.ndarray) -> np.ndarray:
    """[P, S] of symbols around [P, 4]."""
    return scores[np.arange(len(PLACES)), around].sum(1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
