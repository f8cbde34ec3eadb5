"""Scores of mutations under a masked language model: log p(mutant) - log p(wild type), in nats.

The two scores are those of Meier et al. 2021 (NeurIPS), "Language models enable zero-shot prediction of the effects of
mutations on protein function". A variant with several mutations gets the sum of their scores, each computed alone,
as in ProteinGym.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.models.esm2.alphabet import BYTE_TO_ID, ESM2_TOKENS, STANDARD_RESIDUES, TOKENS
from extras.after.inference.chains import CHAIN_END, in_chain
from extras.after.inference.encoder import Encoder, Progress, in_parts
from extras.after.inference.packed import Window, windows

GROUP = 256  # sequences whose logits are in memory at a time
# A24G, or HGVS's Ala24Gly and Ala24= (no change).
SUBSTITUTION = re.compile(r"([A-Za-z]|[A-Za-z]{3})(-?[0-9]{1,9})([A-Za-z]|[A-Za-z]{3}|=)")
THREE_LETTERS = dict(
    re.findall(
        "([A-Z][a-z]{2})([A-Z])",
        "AlaA ArgR AsnN AspD CysC GlnQ GluE GlyG HisH IleI LeuL LysK MetM PheF ProP SerS ThrT TrpW TyrY ValV "
        "SecU PylO",
    )
)
SEPARATORS = re.compile(r"[:,;/ ]+")
WILD_TYPES = {*STANDARD_RESIDUES.tolist(), TOKENS.index("U"), TOKENS.index("O")}
RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
QUOTED = 40  # characters of a cell in an error


class Mutation(NamedTuple):
    """`A24G`: letters as ESM-2's token ids, whatever the model; position from 0."""

    wild: int
    position: int
    mutant: int


class Variant(NamedTuple):
    protein: bytes  # the wild type's residues, or its text in the model's alphabet
    mutations: tuple[Mutation, ...]

    @property
    def sequence(self) -> bytes:
        """The mutant's residues."""
        letters = bytearray(self.protein)
        for mutation in self.mutations:
            letters[mutation.position] = ord(TOKENS[mutation.mutant])
        return bytes(letters)


class Pass(NamedTuple):
    """A forward pass: a window of a protein, with one position masked, or none."""

    protein: bytes
    window: Window
    masked: int | None


def quoted(text: str) -> str:
    """A cell of a table, for an error message."""
    return repr(text if len(text) <= QUOTED else f"{text[:QUOTED]}...")


def parse_variant(text: str, protein: bytes, where: str, first_residue: int = 1) -> Variant:
    """`A24G`, or several as `A24G:K30R`; an empty text or `WT` is the wild type. Or HGVS: `p.Ala24Gly`, `p.A24G`,
    `p.(Ala24Gly)`, `p.[Ala24Gly;Lys30Arg]`, `p.=`.

    first_residue: the number of the protein's first residue. UserError, which begins with `where`, for anything but
    substitutions in this protein.
    """
    mutations = sorted(
        (parse_mutation(word, protein, where, first_residue) for word in words_of(text)), key=lambda m: m.position
    )
    for one, other in zip(mutations, mutations[1:], strict=False):
        if one.position == other.position:
            number = one.position - protein.rfind(CHAIN_END, 0, one.position) - 1 + first_residue
            raise UserError(f"{where}: {quoted(text)}: residue {number} is mutated twice: give it once")
    return Variant(protein, tuple(mutations))


def words_of(text: str) -> list[str]:
    """The single mutations of a variant; none of the wild type."""
    is_wild_type = text.strip().upper() in ("", "WT", "P.=", "P.(=)")
    return [] if is_wild_type else SEPARATORS.split(_without_hgvs(text.strip()))


def _without_hgvs(text: str) -> str:
    """What stands in HGVS's `p.`, `p.(...)` or `p.[...]`; other text as it is."""
    if text[:2] != "p.":
        return text
    text = text[2:]
    for pair in ("()", "[]", "()"):
        if text[:1] == pair[0] and text[-1:] == pair[1]:
            text = text[1:-1]
    return text


def parts_of(word: str, where: str) -> tuple[str, int, str]:
    """(wild type's letter, number, mutant's letter) of `A24G` or `Ala24Gly`. UserError for anything else."""
    match = SUBSTITUTION.fullmatch(word)
    letters = [] if match is None else [letter_of(each) for each in (match[1], match[3])]
    if match is None or not all(letters):
        raise UserError(
            f"{where}: {quoted(word)} is not a mutation: expected, for example, A24G or p.Ala24Gly (stops and "
            "frameshifts have no score; insertions and deletions, as A24_K27del, have one of score.py)"
        )
    wild, mutant = letters
    return wild, int(match[2]), wild if mutant == "=" else mutant


def letter_of(name: str) -> str:
    """The letter of `A` or `Ala`; "" for none."""
    return name if len(name) == 1 else THREE_LETTERS.get(name.title(), "")


def parse_mutation(word: str, protein: bytes, where: str, first_residue: int) -> Mutation:
    """A substitution. UserError as `parse_variant`."""
    plain, chain, begin = in_chain(word, protein, where)
    wild_letter, number, mutant_letter = parts_of(plain, where)
    position = begin + position_of(word, wild_letter, number, chain, where, first_residue)
    return _mutation(wild_letter, position, mutant_letter, f"{where}: {word}")


def position_of(word: str, wild_letter: str, number: int, protein: bytes, where: str, first_residue: int) -> int:
    """The position from 0 of the residue that `word` gives a number. UserError unless it is that letter there."""
    position = number - first_residue
    if not 0 <= position < len(protein):
        last = first_residue + len(protein) - 1
        raise UserError(f"{where}: {word}: the protein has residues {first_residue} to {last}")
    residue = chr(protein[position]).upper()
    if residue != wild_letter.upper():
        residue = residue if residue.isprintable() else "?"
        raise UserError(
            f"{where}: {word}: residue {number} of the protein is {residue}, not {wild_letter}: is it this protein, "
            f"and does it begin with residue {first_residue}?"
        )
    return position


def _mutation(wild_letter: str, position: int, mutant_letter: str, where: str) -> Mutation:
    """UserError unless both are amino acids."""
    wild, mutant = (int(BYTE_TO_ID[ord(letter)]) for letter in (wild_letter, mutant_letter))
    if wild not in WILD_TYPES:
        raise UserError(f"{where}: {wild_letter} is not an amino acid: its probability is meaningless")
    if mutant not in STANDARD_RESIDUES and mutant != wild:
        raise UserError(f"{where}: {mutant_letter} is not one of the 20 amino acids")
    return Mutation(wild, position, mutant)


def compare(mutated: str, protein: bytes, where: str) -> Variant:
    """The substitutions that make `mutated` of the protein. UserError, which begins with `where`, if there are none
    such: another length, or residues that are no amino acids."""
    text, wild_type = mutated.strip().upper(), protein.decode("latin-1").upper()
    if len(text) != len(wild_type):
        raise UserError(
            f"{where}: the mutated sequence has {len(text)} residues, the protein {len(wild_type)}: insertions and "
            "deletions have a score of score.py only"
        )
    if not text.isascii():
        raise UserError(f"{where}: {quoted(mutated)}: not a protein")
    changed = (n for n, (old, new) in enumerate(zip(wild_type, text, strict=True)) if old != new)
    return Variant(protein, tuple(_mutation(wild_type[n], n, text[n], where) for n in changed))


def undo(text: str, mutated: str, where: str, first_residue: int = 1) -> bytes:
    """The wild type whose mutations `text` gave the sequence `mutated`. UserError if it does not have them."""
    letters = list(mutated.strip().upper())
    for word in words_of(text):
        wild, number, mutant = parts_of(word, where)
        if not 0 <= number - first_residue < len(letters) or letters[number - first_residue] != mutant.upper():
            raise UserError(f"{where}: {quoted(text)}: the mutated sequence has no {mutant} at {number}")
        letters[number - first_residue] = wild.upper()
    return "".join(letters).encode("latin-1", "replace")


def check_letters(variants: Sequence[Variant], alphabet: Alphabet) -> None:
    """UserError for a mutation of, or to, a residue that the model's alphabet lacks."""
    lacks = lacking(alphabet)
    for mutation in (mutation for variant in variants for mutation in variant.mutations):
        for token in (mutation.wild, mutation.mutant):
            if lacks[token]:
                name = f"{TOKENS[mutation.wild]}{mutation.position + 1}{TOKENS[mutation.mutant]}"
                raise UserError(f"{name}: the model's alphabet has no {TOKENS[token]}: leave this mutation out")


Key = tuple[bytes, int]  # a protein and a position in it
ContextOf = Callable[[bytes], Any]  # the context (`Encoder.read`) that a protein is read with


def log_probabilities(
    encoder: Encoder,
    positions: Iterable[Key],
    masked: bool,
    done: Progress = lambda tokens: None,
    planned: Progress = lambda tokens: None,
    context_of: ContextOf | None = None,
) -> dict[Key, np.ndarray]:
    """{(protein, position): log-probabilities of the 33 tokens of ESM-2 there, float64 [33]}; NaN for those that the
    model's alphabet lacks.

    Each position is read in the window whose centre is nearest. masked: one pass per position, with it masked; else
    one pass per window, with nothing masked. done: as in `Encoder.logits`; planned: called first, with the number
    of tokens to come. context_of: called once a protein; without it proteins are read alone.
    """
    of_protein: dict[bytes, set[int]] = {}
    for protein, position in positions:
        of_protein.setdefault(protein, set()).add(position)
    passes: dict[Pass, list[int]] = {}
    alphabet = encoder.alphabet
    for protein, wanted in of_protein.items():
        room = alphabet.room(protein, encoder.flags.max_seq_length)
        parts = list(windows(len(protein) // alphabet.width, room))
        ends = [window.start + window.end for window in parts]
        for position in sorted(wanted):
            window = parts[bisect_right(ends, position)]
            passes.setdefault(Pass(protein, window, position if masked else None), []).append(position)
    planned(sum(key.window.length + alphabet.num_special for key in passes))
    log_probs: dict[Key, np.ndarray] = {}
    for context, group in _groups(passes, context_of):
        in_window = [_places(key, alphabet)[np.array(passes[key]) - key.window.start] for key in group]
        tokens = [_tokens(key, alphabet) for key in group]
        for key, logits in zip(group, encoder.logits(tokens, done, in_window, context), strict=True):
            rows = in_esm2_ids(torch.log_softmax(logits.double(), -1).numpy(), alphabet)
            log_probs |= {(key.protein, position): row for position, row in zip(passes[key], rows, strict=True)}
    return log_probs


def lacking(alphabet: Alphabet) -> np.ndarray:
    """bool [33]: the tokens of ESM-2 that an alphabet has no letter for."""
    return np.isnan(in_esm2_ids(np.zeros((1, alphabet.vocab_size)), alphabet))[0]


def in_esm2_ids(log_p: np.ndarray, alphabet: Alphabet) -> np.ndarray:
    """Log-probabilities [n, vocab_size] by the ids of ESM-2, [n, 33]; NaN for letters that the alphabet lacks.

    Of an alphabet with several tokens an amino acid, the logarithm of their summed probabilities.
    """
    if alphabet.declared:
        found = np.full((len(log_p), ESM2_TOKENS.vocab_size), np.nan)
        for letter in np.unique(alphabet.amino_acids[alphabet.is_maskable]):
            if letter and (token := BYTE_TO_ID[letter]) != ESM2_TOKENS.unknown:
                found[:, token] = np.logaddexp.reduce(log_p[:, alphabet.amino_acids == letter], axis=1)
        return found
    if alphabet.prepared is None:
        return log_p
    ids = alphabet.of_stored(np.arange(ESM2_TOKENS.vocab_size))
    return np.where(ids == alphabet.unknown, np.nan, log_p[:, ids])


def amino_acids_of(text: bytes, alphabet: Alphabet) -> bytes:
    """The amino acids that a text of a model stands for, X for none, without a token that ends it (a stop codon)."""
    if not alphabet.declared:
        return text
    ids = alphabet.ids_of(np.frombuffer(text, np.uint8))
    if len(ids) and ids[-1] in alphabet.last_only:
        ids = ids[:-1]
    letters = alphabet.amino_acids[ids]
    return np.where(letters == 0, ord("X"), letters).astype(np.uint8).tobytes()


def _groups(passes: Iterable[Pass], context_of: ContextOf | None) -> Iterator[tuple[Any, list[Pass]]]:
    """(context, at most `GROUP` passes that follow it). passes: those of a protein one after another."""
    if context_of is None:
        yield from ((None, group) for group in in_parts(passes, GROUP))
        return
    for protein, of_protein in groupby(passes, lambda key: key.protein):
        context = context_of(protein)
        yield from ((context, group) for group in in_parts(of_protein, GROUP))


def score(
    encoder: Encoder,
    variants: Sequence[Variant],
    masked: bool,
    done: Progress = lambda tokens: None,
    planned: Progress = lambda tokens: None,
    context_of: ContextOf | None = None,
) -> list[float]:
    """The variants' scores: the sums of log p(mutant) - log p(wild type), as of `log_probabilities`."""
    check_letters(variants, encoder.alphabet)
    wanted = ((protein, mutation.position) for protein, mutations in variants for mutation in mutations)
    log_p = log_probabilities(encoder, wanted, masked, done, planned, context_of)

    def of(protein: bytes, mutation: Mutation) -> float:
        row = log_p[protein, mutation.position]
        return float(row[mutation.mutant] - row[mutation.wild])

    return [sum((of(protein, mutation) for mutation in mutations), 0.0) for protein, mutations in variants]


def check_standard(encoder: Encoder) -> None:
    """UserError for a model whose alphabet lacks some of `RESIDUES`."""
    lacks = lacking(encoder.alphabet)
    if letters := ", ".join(letter for letter in RESIDUES if lacks[BYTE_TO_ID[ord(letter)]]):
        raise UserError(f"{encoder.flags.model_name_or_path}: no {letters} in its alphabet: score --mutations")


def single_mutants(
    encoder: Encoder,
    proteins: Iterable[bytes],
    masked: bool,
    done: Progress = lambda tokens: None,
    planned: Progress = lambda tokens: None,
    context_of: ContextOf | None = None,
) -> list[np.ndarray]:
    """The scores of all single mutants of each protein, float64 [length, 20] in the order of `RESIDUES`; NaN where the
    wild type is no amino acid."""
    proteins = list(proteins)
    residues = {protein: amino_acids_of(protein, encoder.alphabet) for protein in proteins}
    wild = {protein: BYTE_TO_ID[np.frombuffer(text, np.uint8)] for protein, text in residues.items()}
    known = {protein: np.isin(ids, list(WILD_TYPES)) for protein, ids in wild.items()}
    wanted = ((protein, int(n)) for protein, is_known in known.items() for n in np.flatnonzero(is_known))
    log_p = log_probabilities(encoder, wanted, masked, done, planned, context_of)
    columns = [int(BYTE_TO_ID[ord(letter)]) for letter in RESIDUES]
    matrices = []
    for protein in proteins:
        scores = np.full((len(residues[protein]), len(columns)), np.nan)
        for n in np.flatnonzero(known[protein]):
            row = log_p[protein, int(n)]
            scores[n] = row[columns] - row[wild[protein][n]]
        matrices.append(scores)
    return matrices


def _tokens(key: Pass, alphabet: Alphabet) -> np.ndarray:
    tokens = alphabet.encode(key.window.residues_of(key.protein, alphabet.width))
    if key.masked is not None:
        place = _places(key, alphabet)[key.masked - key.window.start]
        tokens[place] = alphabet.masked_ids[tokens[place]]
    return tokens


def _places(key: Pass, alphabet: Alphabet) -> np.ndarray:
    """Where the window's residues have their tokens."""
    return alphabet.places(key.window.residues_of(key.protein, alphabet.width))
