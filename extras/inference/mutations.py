"""Scores of mutations under a masked language model: log p(mutant) - log p(wild type), in nats.

The two scores are those of Meier et al. 2021 (NeurIPS), "Language models enable zero-shot prediction of the effects of
mutations on protein function". A variant with several mutations gets the sum of their scores, each computed alone,
as in ProteinGym.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import torch

from common.cli import UserError
from common.models.esm2.alphabet import BYTE_TO_ID, MASK, STANDARD_RESIDUES, TOKENS, encode
from extras.inference.encoder import Encoder, Progress, Window, in_parts, windows

GROUP = 256  # sequences whose logits are in memory at a time
SUBSTITUTION = re.compile(r"([A-Za-z])(-?[0-9]{1,9})([A-Za-z])")
SEPARATORS = re.compile(r"[:,;/ ]+")
WILD_TYPES = {*STANDARD_RESIDUES.tolist(), TOKENS.index("U"), TOKENS.index("O")}
QUOTED = 40  # characters of a cell in an error


class Mutation(NamedTuple):
    """`A24G`: letters as token ids, position from 0."""

    wild: int
    position: int
    mutant: int


class Variant(NamedTuple):
    protein: bytes  # the wild type's residues
    mutations: tuple[Mutation, ...]


class Pass(NamedTuple):
    """A forward pass: a window of a protein, with one position masked, or none."""

    protein: bytes
    window: Window
    masked: int | None


def quoted(text: str) -> str:
    """A cell of a table, for an error message."""
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}...")


def parse_variant(text: str, protein: bytes, where: str, first_residue: int = 1) -> Variant:
    """`A24G`, or several as `A24G:K30R`; an empty text or `WT` is the wild type.

    first_residue: the number of the protein's first residue. UserError, which begins with `where`, for anything but
    substitutions in this protein.
    """
    words = [] if text.strip().upper() in ("", "WT") else SEPARATORS.split(text.strip())
    mutations = sorted(
        (_parse_mutation(word, protein, where, first_residue) for word in words), key=lambda m: m.position
    )
    for one, other in zip(mutations, mutations[1:], strict=False):
        if one.position == other.position:
            raise UserError(
                f"{where}: {quoted(text)}: residue {one.position + first_residue} is mutated twice: give it once"
            )
    return Variant(protein, tuple(mutations))


def _parse_mutation(word: str, protein: bytes, where: str, first_residue: int) -> Mutation:
    match = SUBSTITUTION.fullmatch(word)
    if match is None:
        raise UserError(f"{where}: {quoted(word)} is not a mutation: expected, for example, A24G")
    wild, mutant = (int(BYTE_TO_ID[ord(letter)]) for letter in (match[1], match[3]))
    position = int(match[2]) - first_residue
    if not 0 <= position < len(protein):
        last = first_residue + len(protein) - 1
        raise UserError(f"{where}: {word}: the protein has residues {first_residue} to {last}")
    residue = chr(protein[position]).upper()
    if residue != match[1].upper():
        residue = residue if residue.isprintable() else "?"
        raise UserError(
            f"{where}: {word}: residue {match[2]} of the protein is {residue}, not {match[1]}: is it this protein, "
            f"and does it begin with residue {first_residue}?"
        )
    if wild not in WILD_TYPES:
        raise UserError(f"{where}: {word}: {match[1]} is not an amino acid: its probability is meaningless")
    if mutant not in STANDARD_RESIDUES:
        raise UserError(f"{where}: {word}: {match[3]} is not one of the 20 amino acids")
    return Mutation(wild, position, mutant)


def score(
    encoder: Encoder, variants: list[Variant], masked: bool, done: Progress = lambda tokens: None
) -> list[float]:
    """The sum over each variant's mutations of log p(mutant) - log p(wild type), in nats; 0 for the wild type.

    Each position is scored in the window whose centre is nearest. masked: one pass per position, with it masked; else
    one pass per window, with nothing masked. done: as in `Encoder.logits`.
    """
    proteins: dict[bytes, set[Mutation]] = {}
    for protein, mutations in variants:
        proteins.setdefault(protein, set()).update(mutations)
    passes: dict[Pass, list[Mutation]] = {}
    for protein, mutations in proteins.items():
        of_protein = list(windows(len(protein), encoder.flags.max_seq_length - 2))
        ends = [window.start + window.end for window in of_protein]
        for mutation in sorted(mutations):
            window = of_protein[bisect_right(ends, mutation.position)]
            passes.setdefault(Pass(protein, window, mutation.position if masked else None), []).append(mutation)
    scores: dict[tuple[bytes, Mutation], float] = {}
    for group in in_parts(passes, GROUP):
        for key, logits in zip(group, encoder.logits([_tokens(key) for key in group], done), strict=True):
            log_p = torch.log_softmax(logits.double(), -1).numpy()
            for mutation in passes[key]:
                row = log_p[1 + mutation.position - key.window.start]
                scores[key.protein, mutation] = float(row[mutation.mutant] - row[mutation.wild])
    return [sum((scores[protein, mutation] for mutation in mutations), 0.0) for protein, mutations in variants]


def _tokens(key: Pass) -> np.ndarray:
    tokens = encode(key.window.residues_of(key.protein))
    if key.masked is not None:
        tokens[1 + key.masked - key.window.start] = MASK
    return tokens
