"""The command line of a small command: words in their order, no flags."""

from __future__ import annotations

import sys

from common.cli import UserError


def positional(description: str, usage: str, *counts: int) -> list[str]:
    """The arguments of a command line without flags, `counts` of them; prints the description for --help."""
    words = sys.argv[1:]
    if not {"-h", "--help"}.isdisjoint(words):
        print(f"usage: {usage}\n\n{description.strip()}")
        raise SystemExit(0)
    if len(words) not in counts:
        raise UserError(f"usage: {usage}")
    return words
