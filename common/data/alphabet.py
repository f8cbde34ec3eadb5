"""The alphabet of a family: its tokens in the order of their ids, and look-up tables to encode text with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.data import TokenSet


@dataclass(frozen=True, kw_only=True)
class Alphabet(TokenSet):
    """A TokenSet that encodes text.

    letters: the tokens; those in the range `residues` are one letter each. begin, end: ids of what stands around a
    sequence; after_begin, before_end: more of them, inside those. prepared: the alphabet in which prepared data are
    stored, None for this one.
    """

    letters: tuple[str, ...]
    begin: int
    end: int
    after_begin: tuple[int, ...] = ()
    before_end: tuple[int, ...] = ()
    prepared: Alphabet | None = None

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
        """uint8 [256]: byte -> token id. Lower case counts as upper case (UniRef marks low-complexity regions so);
        anything else is the unknown token."""
        table = np.full(256, self.unknown, dtype=np.uint8)
        for token in range(self.residues[0], self.residues[1] + 1):
            table[ord(self.letters[token])] = table[ord(self.letters[token].lower())] = token
        return table

    @property
    def stored(self) -> Alphabet:
        return self.prepared or self

    @cached_property
    def stored_to_id(self) -> np.ndarray:
        """uint8 [tokens of `stored`]: the id here of each of its tokens; a letter that is not here is unknown."""
        stored = self.stored
        table = np.full(stored.vocab_size, self.unknown, dtype=np.uint8)
        for token in range(stored.residues[0], stored.residues[1] + 1):
            table[token] = self.byte_to_id[ord(stored.letters[token])]
        for name in ("pad", "mask", "begin", "end"):
            table[getattr(stored, name)] = getattr(self, name)
        return table

    def of_stored(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.prepared is None else self.stored_to_id[ids]

    def encode(self, sequence: str | bytes) -> np.ndarray:
        """A sequence between `head` and `tail` as uint8 ids, shape [len(sequence) + num_special]."""
        raw = sequence.encode("latin-1", "replace") if isinstance(sequence, str) else sequence
        ids = self.byte_to_id[np.frombuffer(raw, np.uint8)]
        return np.concatenate((self.head, ids, self.tail)).astype(np.uint8)

    def encode_many(self, characters: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode many sequences at once, without a Python loop.

        characters: uint8 [C], the sequences' bytes end to end; offsets: int [N + 1], where each begins.
        Returns ids uint8 [C + num_special * N] (each between `head` and `tail`) and their offsets int64 [N + 1].
        """
        offsets = np.asarray(offsets, dtype=np.int64)
        characters = characters[offsets[0] : offsets[-1]]
        offsets = offsets - offsets[0]
        out_offsets = offsets + self.num_special * np.arange(len(offsets))
        ids = np.empty(out_offsets[-1], dtype=np.uint8)
        is_residue = np.ones(len(ids), dtype=bool)
        places = [(out_offsets[:-1] + n, token) for n, token in enumerate(self.head)]
        places += [(out_offsets[1:] - len(self.tail) + n, token) for n, token in enumerate(self.tail)]
        for positions, token in places:
            ids[positions] = token
            is_residue[positions] = False
        ids[is_residue] = self.byte_to_id[characters]
        return ids, out_offsets
