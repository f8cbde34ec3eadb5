"""What a masked language model thinks of mutations: log-odds of the mutated residues, at masks and without.

Meier et al. 2021 (NeurIPS), "Language models enable zero-shot prediction of the effects of mutations on protein
function", equations for the masked-marginal and the wild-type-marginal score; all mutated positions of a variant are
masked at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from common.cli import UserError
from common.files.alphabet import BYTE_TO_ID, MASK, STANDARD_RESIDUES
from common.inference.encoder import Encoder, Progress
from common.inference.windows import tokens_of, window_around

AT_ONCE = 256  # sequences whose logits are held at a time
ONE = re.compile(r"([A-Za-z])(\d+)([A-Za-z])")


class Mutation(NamedTuple):
    """`A24G`: letters as token ids, the position from 0."""

    wild: int
    position: int
    mutant: int


class Variant(NamedTuple):
    protein: bytes  # the wild type's residues
    mutations: tuple[Mutation, ...]


def parse_variant(text: str, protein: bytes, where: str, first_residue: int = 1) -> Variant:
    """Of `A24G`, or `A24G:K30R`; nothing, or WT, is the wild type.

    first_residue: the number of the protein's first one. UserError, which begins with `where`, for what is no mutation
    of this protein.
    """
    words = [] if text.strip().upper() in ("", "WT") else re.split(r"[:,;/ ]+", text.strip())
    found = []
    for word in words:
        match = ONE.fullmatch(word)
        if match is None:
            raise UserError(f"{where}: {word!r} is no mutation: expected, say, A24G")
        wild, mutant = (int(BYTE_TO_ID[ord(letter)]) for letter in (match[1], match[3]))
        position = int(match[2]) - first_residue
        if not 0 <= position < len(protein):
            last = first_residue + len(protein) - 1
            raise UserError(f"{where}: {word}: the protein has residues {first_residue} to {last}")
        there = chr(protein[position]).upper()
        if BYTE_TO_ID[protein[position]] != wild:
            raise UserError(
                f"{where}: {word}: residue {match[2]} of the protein is {there}, not {match[1]}: is it this protein, "
                f"and does it begin with residue {first_residue}?"
            )
        if mutant not in STANDARD_RESIDUES:
            raise UserError(f"{where}: {word}: {match[3]} is none of the 20 amino acids")
        found.append(Mutation(wild, position, mutant))
    if len({each.position for each in found}) < len(found):
        raise UserError(f"{where}: {text}: a residue is mutated twice")
    return Variant(protein, tuple(sorted(found, key=lambda each: each.position)))


def window_of(variant: Variant, max_seq_length: int) -> tuple[int, int]:
    """(start, length) of the residues that are seen: all, or those around the mutations. ValueError where those do not
    fit into so many tokens."""
    positions = [each.position for each in variant.mutations] or [0]
    return window_around(positions, len(variant.protein), max_seq_length - 2)


def score(
    encoder: Encoder, variants: list[Variant], masked: bool, done: Progress = lambda tokens: None
) -> list[float]:
    """log p(mutant) - log p(wild type), summed over each variant's mutations, in nats; 0 for the wild type.

    masked: with the mutated positions masked; else in the wild type as it is. ValueError where the mutations of a
    variant are further apart than the model's window. done: as `Encoder.logits`.
    """
    asked: dict[tuple, list[int]] = {}  # what is computed, and the variants that ask for it
    for number, (protein, mutations) in enumerate(variants):
        if not mutations:
            continue
        window = window_of(variants[number], encoder.flags.max_seq_length)
        hidden = tuple(each.position for each in mutations) if masked else ()
        asked.setdefault((protein, window, hidden), []).append(number)
    scores = [0.0] * len(variants)
    for some in _some_at_a_time(asked):
        found = encoder.logits([_tokens(*each) for each in some], done)
        for (protein, (start, length), hidden), logits in zip(some, found, strict=True):
            log_p = torch.log_softmax(logits.double(), -1).numpy()
            for number in asked[protein, (start, length), hidden]:
                scores[number] = sum(
                    float(log_p[each.position - start + 1, each.mutant] - log_p[each.position - start + 1, each.wild])
                    for each in variants[number].mutations
                )
    return scores


def _some_at_a_time(asked: dict) -> Iterator[list[tuple]]:
    keys = iter(asked)
    while some := list(islice(keys, AT_ONCE)):
        yield some


def _tokens(protein: bytes, window: tuple[int, int], masked: tuple[int, ...]) -> np.ndarray:
    tokens = tokens_of(protein, *window)
    tokens[[1 + position - window[0] for position in masked]] = MASK
    return tokens
