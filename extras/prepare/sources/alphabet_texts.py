"""Texts of an alphabet that is not ESM-2's: which records can be encoded, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from common.cli import UserError
from common.data.alphabet import Alphabet
from extras.prepare.sources.residues import MOST_UNKNOWN, NAMED, Cleaner, texts_of, without_texts


class AlphabetCleaner(Cleaner):
    """Removes white space from the texts of an input; refuses those that are no whole tokens of an alphabet.

    Characters of `Alphabet.ambiguous` make a token unknown, and a record with more than a tenth of those is refused.
    """

    def __init__(self, where: str, alphabet: Alphabet, bad_records: Callable[[UserError], None] | None = None) -> None:
        super().__init__(where, bad_records=bad_records)
        self.alphabet = alphabet
        ambiguous = alphabet.ambiguous + (alphabet.ambiguous.lower() if alphabet.ignore_case else "")
        self.is_ambiguous = np.isin(np.arange(256), list(ambiguous.encode()))
        self.is_outside = (alphabet.characters == alphabet.no_character) & ~self.is_ambiguous
        self.has_hashes = bool(self.is_outside[ord("#")])

    def __call__(
        self, data: np.ndarray, offsets: np.ndarray, name: Callable[[int], str]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """As of `Cleaner`."""
        data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
        if not len(data):
            return data, offsets, []
        data, offsets = self._without_blanks(data, offsets)
        data, offsets, refused = self._without_missing(data, offsets)
        refused |= self._outside(data, offsets) | self._broken(offsets)
        data, offsets = without_texts(data, offsets, refused)
        refused |= self._misplaced(data, offsets, name)
        return self._without_refused(data, offsets, name, refused)

    def _outside(self, data: np.ndarray, offsets: np.ndarray) -> dict[int, str]:
        """Records with a character that no token has."""
        places = np.flatnonzero(self.is_outside[data])
        numbers, first = np.unique(texts_of(places, offsets), return_index=True)
        letters = (chr(data[place]) for place in places[first])
        return {
            number: f"has {letter!r}, which is not in the alphabet {self.alphabet.name}"
            for number, letter in zip(numbers.tolist(), letters, strict=True)
        }

    def _broken(self, offsets: np.ndarray) -> dict[int, str]:
        """Records that are no whole tokens."""
        lengths, width = np.diff(offsets), self.alphabet.width
        return {
            number: f"has {lengths[number]:,} characters, no multiple of {width}: out of frame"
            for number in np.flatnonzero(lengths % width).tolist()
        }

    def _misplaced(self, data: np.ndarray, offsets: np.ndarray, name: Callable[[int], str]) -> dict[int, str]:
        """Records with characters side by side that are no token, or a token before the end that ends a text."""
        alphabet, width = self.alphabet, self.alphabet.width
        of_none = f"is none of the alphabet {alphabet.name} ({alphabet.letters[alphabet.residues[0]]}, ...)"
        ids, bounds = alphabet.ids_of(data), offsets // width
        is_ambiguous = self.is_ambiguous[data].reshape(-1, width).any(1)
        refused: dict[int, str] = {}
        ends = np.zeros(len(ids), bool)
        ends[bounds[1:][np.diff(bounds) > 0] - 1] = True
        early = np.isin(ids, alphabet.last_only) & ~ends
        for place in np.flatnonzero(((ids == alphabet.unknown) & ~is_ambiguous) | early).tolist():
            number = int(texts_of(np.array([place]), bounds)[0])
            token = data[place * width : (place + 1) * width].tobytes().decode("latin-1")
            what = "may only be the last" if early[place] else of_none
            refused.setdefault(number, f"has {token} as token {place - bounds[number] + 1:,}, which {what}")
        self._count_ambiguous(is_ambiguous, bounds, name, refused)
        return refused

    def _count_ambiguous(
        self, is_ambiguous: np.ndarray, bounds: np.ndarray, name: Callable[[int], str], refused: dict[int, str]
    ) -> None:
        if not is_ambiguous.any():
            return
        counts = np.append(0, np.cumsum(is_ambiguous))[bounds]
        for number, (before, after) in enumerate(pairwise(counts.tolist())):
            count, length = after - before, int(bounds[number + 1] - bounds[number])
            if not count or number in refused:
                continue
            if count > MOST_UNKNOWN * length:
                refused[number] = f"has {count:,} tokens of {length:,} with a letter of {self.alphabet.ambiguous}"
            else:
                self.changes.unknown += count
                self.changes.with_unknown += 1
                self.changes.first = (self.changes.first + [name(number)])[:NAMED]
