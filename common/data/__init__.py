"""Records to the batches of a step, by data rank and step."""

from __future__ import annotations

from common.cli import UserError

# Default of --max_record_length for proteins: bytes with the header, a hundred times the longest protein known.
LONGEST_PROTEIN = 4 << 20
MAX_RECORD_LENGTH = 1 << 30  # Arrow counts the bytes of a block in 32 bits


def check_record_length(longest: int) -> None:
    """UserError for an impossible --max_record_length."""
    if not 1 <= longest <= MAX_RECORD_LENGTH:
        raise UserError(f"--max_record_length {longest}: a number of bytes, 1 to {MAX_RECORD_LENGTH}")
