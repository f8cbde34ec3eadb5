"""Variants with insertions and deletions: HGVS's words, or the whole mutated sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from common.cli import UserError
from common.models.esm2.alphabet import TOKENS
from extras.after.inference.chains import CHAIN_END
from extras.after.inference.mutation_scores import (
    WILD_TYPES,
    Variant,
    compare,
    letter_of,
    parse_mutation,
    position_of,
    quoted,
    words_of,
)

# A24del, A24_K27del, A24_G25insKL, A24_K27delinsKL, A24dup; or with three letters, as Lys2_Gly3insGlnSerLys.
RESIDUE = "([A-Z]|[A-Z][a-z]{2})(-?[0-9]{1,9})"
INDEL = re.compile(f"{RESIDUE}(?:_{RESIDUE})?(delins|del|ins|dup)((?:[A-Z][a-z]{{2}})+|[A-Z]+)?")
AMINO_ACIDS = frozenset(TOKENS[token] for token in WILD_TYPES)


class Mutated(NamedTuple):
    """A variant of another length than its wild type: residues of both, in upper case."""

    protein: bytes
    sequence: bytes


Variants = Sequence[Variant | Mutated]


class Edit(NamedTuple):
    """Residues [start, end) of the wild type become `residues`."""

    start: int
    end: int
    residues: str


def has_indel(text: str) -> bool:
    """Whether a variant is written with an insertion or deletion."""
    return any(INDEL.fullmatch(word) for word in words_of(text))


def edited(text: str, protein: bytes, where: str, first_residue: int = 1) -> Variant | Mutated:
    """`A24_K27del`, or several changes as `A24del:K30_G31insLL:G40R`, all numbered as in the wild type.

    first_residue: the number of the protein's first residue. UserError, which begins with `where`, for changes that
    are not of this protein, or overlap.
    """
    if CHAIN_END in protein:
        raise UserError(
            f"{where}: {quoted(text)}: the protein has several chains: give insertions and deletions as the mutated "
            "sequence, A:B"
        )
    edits = sorted(_edit(word, protein, where, first_residue) for word in words_of(text))
    for one, other in pairwise(edits):
        if other.start < one.end or one[:2] == other[:2]:
            raise UserError(f"{where}: {quoted(text)}: two of its changes overlap: write them as one (delins)")
    letters = protein.decode()
    for edit in reversed(edits):
        letters = letters[: edit.start] + edit.residues + letters[edit.end :]
    return of_sequence(letters, protein, f"{where}: {quoted(text)}")


def _edit(word: str, protein: bytes, where: str, first_residue: int) -> Edit:
    match = INDEL.fullmatch(word)
    if match is None:
        mutation = parse_mutation(word, protein, where, first_residue)
        return Edit(mutation.position, mutation.position + 1, TOKENS[mutation.mutant])
    first, first_number, last, last_number, change, inserted = match.groups()
    residues = [letter_of(name) for name in re.findall("[A-Z][a-z]{2}|[A-Z]", inserted or "")]
    wild = [letter_of(name) for name in (first, last) if name]
    if not all((*residues, *wild)):
        raise UserError(f"{where}: {quoted(word)} names a residue that is no amino acid (stops have no score)")
    if bool(inserted) != change.endswith("ins"):
        raise UserError(f"{where}: {quoted(word)}: expected, for example, A24_K27del, A24_G25insKL or A24_K27delinsKL")
    numbers = [int(number) for number in (first_number, last_number) if number]
    positions = [
        position_of(word, letter, number, protein, where, first_residue)
        for letter, number in zip(wild, numbers, strict=True)
    ]
    start, end = positions[0], positions[-1] + 1
    if start >= end or (change == "ins" and end != start + 2):
        asked = "two neighbours, as A24_G25insKL" if change == "ins" else "first and last residue, as A24_K27del"
        raise UserError(f"{where}: {quoted(word)}: expected {asked}")
    if change == "ins":
        return Edit(start + 1, start + 1, "".join(residues))
    return Edit(end, end, protein[start:end].decode()) if change == "dup" else Edit(start, end, "".join(residues))


def of_sequence(text: str, protein: bytes, where: str) -> Variant | Mutated:
    """The variant of a whole mutated sequence: substitutions if it is as long as the protein.

    UserError, which begins with `where`, for an empty one, and for letters that are no amino acids; X, B, Z and J may
    be there where the wild type has them.
    """
    sequence = text.strip().upper()
    if not sequence:
        raise UserError(f"{where}: no residues: remove this row")
    if len(sequence) == len(protein):
        return compare(sequence, protein, where)
    for letter in dict.fromkeys(sequence):
        if letter not in AMINO_ACIDS and letter not in protein.decode():
            what = f"{letter if letter.isprintable() else '?'} is not an amino acid"
            raise UserError(f"{where}: {quoted(text.strip())}: {what}: correct or remove this row")
    return Mutated(protein, sequence.encode())
