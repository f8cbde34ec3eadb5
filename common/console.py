"""What a person at a terminal sees: log lines that fit it, bars, colours for warnings. Logs without one stay plain."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

WIDEST = 100  # columns
COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
TIME = "%H:%M:%S"


def is_terminal() -> bool:
    """Whether log lines, which go to standard error, are read at a terminal."""
    return sys.stderr.isatty()


def columns() -> int:
    """The terminal's, at most `WIDEST`."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


class TerminalFormatter(logging.Formatter):
    """`HH:MM:SS message`, wrapped between words; the level only of warnings and errors, coloured unless NO_COLOR is
    set (no-color.org)."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", TIME)
        self.coloured = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        text = f"{record.asctime} {level}{record.message}"
        width = shutil.get_terminal_size((WIDEST, 24)).columns
        if len(text) > width and "\n" not in text:
            indent = " " * len(f"{record.asctime} ")
            text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        colour = COLOURS.get(record.levelno) if self.coloured else None
        return text.replace(level, f"{colour}{level}\033[0m", 1) if level and colour else text


def bar(total: float | None, unit: str, hidden: bool = False, **options) -> tqdm:
    """A bar that only a terminal shows, and that goes when it is full. total: None if it isn't known."""
    shown: dict[str, Any] = {"dynamic_ncols": True, "leave": False, "unit": f" {unit}"} | options
    return tqdm(total=total, disable=True if hidden else None, **shown)  # None: only on a terminal


def each(items: Sequence[T], unit: str) -> Iterator[T]:
    """The items, with a bar as of `bar`."""
    with bar(len(items), unit) as shown:
        for item in items:
            yield item
            shown.update()


def slow_bar(total: float | None, unit: str, hidden: bool = False, **options) -> tqdm:
    """A bar that also a log gets, as a line every ten seconds."""
    interval = 0.5 if is_terminal() else 10.0
    shown: dict[str, Any] = {
        "dynamic_ncols": True,
        "unit": f" {unit}",
        "unit_scale": True,
        "mininterval": interval,
    } | options
    return tqdm(total=total, disable=hidden, **shown)


def fitted(fields: list[tuple[int, str]], width: int) -> str:
    """The fields in their order, as many as fit. fields: (rank, text); those of the highest ranks go first."""
    left = list(fields)
    while len(left) > 1 and sum(len(text) + 2 for _, text in left) - 2 > width:
        left.remove(max(left, key=lambda field: field[0]))
    return "  ".join(text for _, text in left)


def short(number: float) -> str:
    """`950`, `12.3k`, `4.56M`: three digits."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            scaled = number / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """`3.2 days`, or hours, minutes and seconds."""
    days = seconds / 86400
    return f"{days:,.1f} days" if days >= 1 else str(timedelta(seconds=round(seconds)))
