"""The command line of a small command: words in their order, then flags if it has some."""

from __future__ import annotations

import sys
from itertools import takewhile
from typing import TypeVar

from common.cli import UserError
from common.flags import parse_arguments

T = TypeVar("T")


def positional(description: str, usage: str, *counts: int) -> list[str]:
    """The arguments of a command line without flags, `counts` of them; prints the description for --help."""
    words = sys.argv[1:]
    if not {"-h", "--help"}.isdisjoint(words):
        print(f"usage: {usage}\n\n{description.strip()}")
        raise SystemExit(0)
    if len(words) not in counts:
        raise UserError(f"usage: {usage}")
    return words


def words_and_flags(description: str | None, program: str, flags: type[T]) -> tuple[list[str], T]:
    """The words before the first flag, and the flags. program: its name in help and errors."""
    words = list(takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    return words, parse_arguments(description, flags, argv=sys.argv[1 + len(words) :], program=program)
