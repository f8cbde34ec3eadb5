"""The alphabet of a family: its tokens in the order of their ids, and look-up tables to encode text with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common.cli import UserError, one_line
from common.data import TokenSet
from common.hooks import extra

ESM2 = "esm2"  # the name of ESM-2's, in which data without a record of their alphabet are prepared
ALPHABET = "alphabet.json"  # beside the splits: what declares their alphabet, if that is not ESM-2's
LARGEST_TABLE = 1 << 24  # entries, of letters that stand side by side


@dataclass(frozen=True, kw_only=True)
class Alphabet(TokenSet):
    """A TokenSet that encodes text.

    letters: the tokens; those in the range `residues` are `width` characters each. begin, end: ids of what stands
    around a sequence; after_begin, before_end: more of them, inside those. prepared: the alphabet in which prepared
    data are stored, None for this one.

    name: of data and models that record it; declared: the JSON from which `extra().alphabet` makes it again, "" for
    ESM-2's and those that are translated from it. ignore_case: whether lower case counts as upper case; synonyms:
    pairs of characters, of which the first is read as the second; ambiguous: characters that a text may have and no
    token has: theirs is unknown. last_only: ids that may only be the last of a text; scored_as: the letter of the
    amino acid that each token stands for, "" for none, where that is not the token itself.
    """

    letters: tuple[str, ...]
    begin: int
    end: int
    after_begin: tuple[int, ...] = ()
    before_end: tuple[int, ...] = ()
    prepared: Alphabet | None = None
    name: str = ""
    declared: str = ""
    width: int = 1
    ignore_case: bool = True
    synonyms: tuple[tuple[str, str], ...] = ()
    ambiguous: str = ""
    last_only: tuple[int, ...] = ()
    scored_as: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.letters)

    @property
    def head(self) -> tuple[int, ...]:
        """The tokens before the first residue."""
        return self.begin, *self.after_begin

    @property
    def tail(self) -> tuple[int, ...]:
        """The tokens after the last residue."""
        return *self.before_end, self.end

    @property
    def num_head(self) -> int:
        return len(self.head)

    @property
    def num_special(self) -> int:
        """Tokens of a sequence that are no residues."""
        return len(self.head) + len(self.tail)

    @cached_property
    def byte_to_id(self) -> np.ndarray:
        """`dtype` [256]: byte -> token id, of an alphabet of one character a token. Lower case counts as upper case
        (UniRef marks low-complexity regions so) with `ignore_case`; anything else is the unknown token."""
        return self._id_of[self.characters]

    @cached_property
    def _symbols(self) -> dict[str, int]:
        """The number of each character that a token has."""
        first, last = self.residues
        return {letter: n for n, letter in enumerate(sorted(set("".join(self.letters[first : last + 1]))))}

    @property
    def no_character(self) -> int:
        return len(self._symbols)

    @cached_property
    def characters(self) -> np.ndarray:
        """int64 [256]: byte -> number of the character of tokens that it stands for, or `no_character`."""
        symbols = self._symbols | {new: self._symbols[old] for new, old in self.synonyms}
        if self.ignore_case:
            symbols |= {letter.lower(): number for letter, number in symbols.items()}
        table = np.full(256, self.no_character, dtype=np.int64)
        table[[ord(letter) for letter in symbols]] = list(symbols.values())
        return table

    @cached_property
    def _id_of(self) -> np.ndarray:
        """`dtype` [(characters + 1) ** width]: the id of the characters side by side, the first counting most."""
        base = self.no_character + 1
        assert base**self.width <= LARGEST_TABLE, "too many characters a token"
        table = np.full(base**self.width, self.unknown, dtype=self.dtype)
        for token in range(self.residues[0], self.residues[1] + 1):
            number = 0
            for letter in self.letters[token]:
                number = number * base + self._symbols[letter]
            table[number] = token
        return table

    def ids_of(self, data: np.ndarray) -> np.ndarray:
        """Token ids `dtype` [C / width] of the characters uint8 [C], without `head` and `tail`.

        UserError where they are no whole tokens.
        """
        if self.width == 1:
            return self.byte_to_id[data]
        if len(data) % self.width:
            raise UserError(
                f"a text of {len(data):,} characters is no whole number of tokens of {self.name}, {self.width} each"
            )
        base, index = self.no_character + 1, np.zeros(len(data) // self.width, np.int64)
        for column in self.characters[data].reshape(-1, self.width).T:
            index = index * base + column
        return self._id_of[index]

    def text_of(self, ids: np.ndarray) -> str:
        """The inverse of `ids_of`; special tokens by their names."""
        return "".join(self.letters[token] for token in ids)

    @cached_property
    def amino_acids(self) -> np.ndarray:
        """uint8 [vocab_size]: the letter of the amino acid that each token stands for, 0 for none."""
        letters = self.scored_as or [letter if len(letter) == 1 else "" for letter in self.letters]
        return np.array([ord(letter) if letter else 0 for letter in letters], np.uint8)

    @property
    def stored(self) -> Alphabet:
        return self.prepared or self

    @cached_property
    def stored_to_id(self) -> np.ndarray:
        """`dtype` [tokens of `stored`]: the id here of each of its tokens; a letter that is not here is unknown."""
        stored = self.stored
        table = np.full(stored.vocab_size, self.unknown, dtype=self.dtype)
        for token in range(stored.residues[0], stored.residues[1] + 1):
            table[token] = self.byte_to_id[ord(stored.letters[token])]
        for name in ("pad", "mask", "begin", "end"):
            table[getattr(stored, name)] = getattr(self, name)
        return table

    def of_stored(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.prepared is None else self.stored_to_id[ids]

    def encode(self, sequence: str | bytes) -> np.ndarray:
        """A sequence between `head` and `tail` as ids `dtype` [len(sequence) / width + num_special]."""
        raw = sequence.encode("latin-1", "replace") if isinstance(sequence, str) else sequence
        ids = self.ids_of(np.frombuffer(raw, np.uint8))
        return np.concatenate((self.head, ids, self.tail)).astype(self.dtype)

    def places(self, text: bytes) -> np.ndarray:
        """Where each residue of a text has its token in `encode(text)`, int64 [len(text) / width]."""
        return np.arange(len(text) // self.width) + self.num_head

    def room(self, text: bytes, tokens: int) -> int:
        """Most residues of a part of the text, which has at most so many tokens."""
        return tokens - self.num_special

    def encode_many(self, characters: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode many sequences at once, without a Python loop.

        characters: uint8 [C], the sequences' bytes end to end; offsets: int [N + 1], where each begins.
        Returns ids `dtype` [C / width + num_special * N] (each between `head` and `tail`), and their offsets int64
        [N + 1].
        """
        offsets = np.asarray(offsets, dtype=np.int64)
        characters = characters[offsets[0] : offsets[-1]]
        offsets = (offsets - offsets[0]) // self.width
        out_offsets = offsets + self.num_special * np.arange(len(offsets))
        ids = np.empty(out_offsets[-1], dtype=self.dtype)
        is_residue = np.ones(len(ids), dtype=bool)
        places = [(out_offsets[:-1] + n, token) for n, token in enumerate(self.head)]
        places += [(out_offsets[1:] - len(self.tail) + n, token) for n, token in enumerate(self.tail)]
        for positions, token in places:
            ids[positions] = token
            is_residue[positions] = False
        ids[is_residue] = self.ids_of(characters)
        return ids, out_offsets


def recorded_alphabet(directory: str | Path) -> Alphabet | None:
    """The alphabet of the splits in a directory; None for ESM-2's, of which there is no record."""
    file = Path(directory) / ALPHABET
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({one_line(error)}): tokenise again") from error
    return extra().alphabet(record, str(file))
