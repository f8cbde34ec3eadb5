"""Records to the batches of a step, by data rank and step."""

from dataclasses import dataclass
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

    residues: first and last id of the tokens that may be masked; replacements: ids of which a random one replaces a
    selected token.
    """

    vocab_size: int
    pad: int
    mask: int
    unknown: int
    residues: tuple[int, int]
    replacements: tuple[int, ...]

    @property
    def num_head(self) -> int:
        """Tokens before the first residue."""
        return 1

    @property
    def stored(self) -> "TokenSet":
        """The alphabet of the prepared data on disk."""
        return self

    def of_stored(self, ids: np.ndarray) -> np.ndarray:
        """ids of `stored`, any shape -> ids of these."""
        return ids
