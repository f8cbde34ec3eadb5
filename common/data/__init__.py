"""Records to the batches of a step, by data rank and step."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from common.cli import UserError

Gaps = Literal["refuse", "remove", "keep"]  # what becomes of `-` and `.` in proteins
GAPS_HELP = (
    "gaps (- and .) of proteins, as alignments have them: refuse, remove, or keep them as tokens; A3M and A2M: remove "
    "them, and keep leaves insertions out"
)
Policy = Literal["error", "skip"]  # for records that cannot be used

# Default of --max_record_length for proteins: bytes with the header, a hundred times the longest protein known.
LONGEST_PROTEIN = 4 << 20
MAX_RECORD_LENGTH = 1 << 30  # Arrow counts the bytes of a block in 32 bits


def check_record_length(longest: int) -> None:
    """UserError for an impossible --max_record_length."""
    if not 1 <= longest <= MAX_RECORD_LENGTH:
        raise UserError(f"--max_record_length {longest}: a number of bytes, 1 to {MAX_RECORD_LENGTH}")


@dataclass(frozen=True)
class TokenSet:
    """The token ids of a family's alphabet that reading and masking need.

    residues: first and last id of the tokens that stand for letters of a text; replacements: ids of which a random one
    replaces a selected token; maskable: ids of the tokens that may be masked, None for all residues; masked: what each
    token becomes when it is masked, None for `mask`.
    """

    vocab_size: int
    pad: int
    mask: int
    unknown: int
    residues: tuple[int, int]
    replacements: tuple[int, ...]
    maskable: tuple[int, ...] | None = None
    masked: tuple[int, ...] | None = None

    @cached_property
    def dtype(self) -> np.dtype:
        """Of ids, in memory and in prepared data: uint8 for up to 256 tokens, else uint16."""
        return np.dtype(np.uint8 if self.vocab_size <= 256 else np.uint16)

    @cached_property
    def is_maskable(self) -> np.ndarray:
        """bool [vocab_size]"""
        table = np.zeros(self.vocab_size, dtype=bool)
        table[slice(self.residues[0], self.residues[1] + 1) if self.maskable is None else list(self.maskable)] = True
        return table

    @cached_property
    def masked_ids(self) -> np.ndarray:
        """`dtype` [vocab_size]: what stands for each token when it is masked."""
        return np.array([self.mask] * self.vocab_size if self.masked is None else self.masked, dtype=self.dtype)

    @property
    def num_head(self) -> int:
        """Tokens before the first residue."""
        return 1

    @property
    def chains(self) -> str:
        """What a model sees between the chains of a record: "separator", "linker", or "" if it has none."""
        return ""

    def plain(self, ids: np.ndarray) -> np.ndarray:
        """Token ids of what a store gives, any shape: ids of records with linkers also say of which chain they are."""
        return ids

    @property
    def stored(self) -> "TokenSet":
        """The alphabet of the prepared data on disk."""
        return self

    def of_stored(self, ids: np.ndarray) -> np.ndarray:
        """ids of `stored`, any shape -> ids of these."""
        return ids
