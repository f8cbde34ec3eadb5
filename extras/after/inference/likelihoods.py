"""Scores of whole sequences: the log-likelihood of a variant minus that of its wild type, in nats.

Of an encoder, which has no likelihood, the pseudo-log-likelihood (Salazar et al. 2020, "Masked language model
scoring"): the sum over residues of log p(residue | all others), each masked in a pass of its own. The cheap score is
the same sum of one pass with nothing masked. Sums and means over residues rank insertions and deletions differently:
both are given. X, B, Z and J are read, but not counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from common.cli import UserError
from common.console import duration, short
from common.models.esm2.alphabet import BYTE_TO_ID
from extras.after.inference.encoder import Encoder, Progress
from extras.after.inference.indels import Variants
from extras.after.inference.mutation_scores import WILD_TYPES, ContextOf, lacking, log_probabilities, quoted
from extras.after.inference.packed import windows

logger = logging.getLogger(__name__)
MEAN = "_mean"  # ends the name of a column of means over residues
AT_A_TIME = 1 << 14  # residues whose log-probabilities are in memory
# Of a wild type and sequences: the log-probabilities of each sequence's residues.
Read = Callable[[bytes, list[bytes]], Iterable[np.ndarray]]
COUNTED = np.isin(BYTE_TO_ID, list(WILD_TYPES))  # of each byte


def positions_of(sequence: bytes) -> np.ndarray:
    """The positions of the residues that count. UserError if there are none."""
    found = np.flatnonzero(COUNTED[np.frombuffer(sequence, np.uint8)])
    if not len(found):
        raise UserError(f"{quoted(sequence.decode())}: no amino acid to score: correct or remove it")
    return found


def sequences_of(variants: Variants) -> dict[bytes, list[bytes]]:
    """{wild type: the different sequences to score, itself first}."""
    found: dict[bytes, dict[bytes, None]] = {}
    for variant in variants:
        found.setdefault(variant.protein, {variant.protein: None})[variant.sequence] = None
    return {protein: list(sequences) for protein, sequences in found.items()}


def differences(variants: Variants, read: Read) -> dict[str, np.ndarray]:
    """{"": sums over residues, "_mean": means}: float64 [variants], each minus that of the wild type."""
    found = {}
    for protein, sequences in sequences_of(variants).items():
        for sequence, log_p in zip(sequences, read(protein, sequences), strict=True):
            found[protein, sequence] = np.array([log_p.sum(), log_p.mean()])
    both = np.array([found[v.protein, v.sequence] - found[v.protein, v.protein] for v in variants]).reshape(-1, 2)
    return {"": both[:, 0], MEAN: both[:, 1]}


def pseudo_log_likelihoods(
    encoder: Encoder,
    variants: Variants,
    masked: bool,
    done: Progress = lambda tokens: None,
    planned: Progress = lambda tokens: None,
    context_of: ContextOf | None = None,
) -> dict[str, np.ndarray]:
    """`differences` of an encoder. Says the cost of masked passes, and after the first sequence the time.

    Arguments as of `log_probabilities`; variants are read with the context of their wild type.
    """
    by_protein = sequences_of(variants)
    check_sequences(encoder, by_protein)
    work = [_cost(encoder, sequence, masked) for sequences in by_protein.values() for sequence in sequences]
    total = sum(tokens for _, tokens in work)
    planned(total)
    if masked:
        passes = short(sum(number for number, _ in work))
        logger.info("%s sequences, a pass for each residue: %s passes of %s tokens", len(work), passes, short(total))
    begin, first = time.perf_counter(), True

    def read(protein: bytes, sequences: list[bytes]) -> Iterator[np.ndarray]:
        nonlocal first
        context = context_of(protein) if context_of else None
        for group in _groups(sequences):
            yield from _log_p(encoder, group, masked, done, context)
            if first and masked:
                seconds = (time.perf_counter() - begin) * total / work[0][1]
                logger.info("About %s at the speed of the first sequence", duration(seconds))
            first = False

    return differences(variants, read)


def check_sequences(encoder: Encoder, by_protein: dict[bytes, list[bytes]]) -> None:
    """UserError for a residue that the model's alphabet lacks."""
    lacks = lacking(encoder.alphabet)
    for sequence in (sequence for sequences in by_protein.values() for sequence in sequences):
        residues = np.frombuffer(sequence, np.uint8)[positions_of(sequence)]
        for letter in residues[lacks[BYTE_TO_ID[residues]]][:1]:
            where = quoted(sequence.decode())
            raise UserError(f"{where}: the model's alphabet has no {chr(letter)}: leave this sequence out")


def _cost(encoder: Encoder, sequence: bytes, masked: bool) -> tuple[int, int]:
    """(passes, their tokens) of a sequence."""
    specials, longest = encoder.alphabet.num_special, encoder.flags.max_seq_length
    if masked:
        passes = len(positions_of(sequence))
        return passes, passes * min(len(sequence) + specials, longest)
    parts = list(windows(len(sequence), longest - specials))
    return len(parts), sum(part.length + specials for part in parts)


def _groups(sequences: list[bytes]) -> Iterator[list[bytes]]:
    """The first sequence alone; then as many at a time as have `AT_A_TIME` residues."""
    yield sequences[:1]
    group: list[bytes] = []
    for sequence in sequences[1:]:
        if group and sum(map(len, group)) + len(sequence) > AT_A_TIME:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _log_p(
    encoder: Encoder, sequences: list[bytes], masked: bool, done: Progress, context: Any
) -> Iterator[np.ndarray]:
    """The log-probabilities of each sequence's residues, float64."""
    keys = [(sequence, int(at)) for sequence in sequences for at in positions_of(sequence)]
    rows = log_probabilities(encoder, keys, masked, done, context_of=lambda _: context)
    for sequence in sequences:
        yield np.array([rows[sequence, int(at)][BYTE_TO_ID[sequence[at]]] for at in positions_of(sequence)])
