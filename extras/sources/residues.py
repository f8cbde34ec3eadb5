"""What of a text is protein, one rule for all ways in: what is taken out of it, and what is refused.

White space, and the stops (`*`) at the end, are taken out. Any other character that is no residue becomes `<unk>` and
is counted; where too many of them are, these are no proteins. Nor are words: nearly all letters stand for residues.
DNA's do, too: of that there is a warning.
"""

from __future__ import annotations

import logging

import numpy as np

from common.cli import UserError
from common.models.esm2.alphabet import BYTE_TO_ID, UNK

logger = logging.getLogger(__name__)
WHITESPACE = b" \t\r\n\v\f"
STOP = b"*"[0]
RESIDUES = np.flatnonzero(BYTE_TO_ID != UNK).astype(np.uint8).tobytes()  # as letters
IS_WHITESPACE = np.isin(np.arange(256), list(WHITESPACE))
# Characters to judge by, and more than which share of them is no protein any more; below ENOUGH, a half.
ENOUGH, MOST_UNKNOWN = 1000, 0.1
# More than which share of these letters is DNA or RNA. Of the residues of 8,000 proteins of UniRef90 they are 28 %.
NUCLEOTIDES, MOST_NUCLEOTIDES = b"ACGTUNacgtun", 0.9
LOOKED_AT = 1 << 16  # characters of a batch: they tell, and all batches are looked at
# Gaps a character: more than in any prose, they stand between single letters, as some tools have proteins.
SPACED = 0.4


def clean(data: np.ndarray, offsets: np.ndarray, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Texts without white space and without the stops at their ends.

    data: uint8, N texts end to end; offsets: int [N + 1], where each begins. Returns what is left, uint8 [C], and its
    offsets, which begin at 0; views where that is all of it. A text may come out empty. UserError, which begins with
    `where`, for words: what white space stands between in more than a tenth of the places, and not everywhere.
    """
    data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
    if not len(data):
        return data, offsets
    _warn_of_nucleotides(where, data)
    blank = data <= ord(" ")
    if blank.any():
        blank &= IS_WHITESPACE[data]
        kept = np.flatnonzero(~blank)
        data, offsets = _without(data, offsets, blank)
        gap_before = np.diff(kept, prepend=-1) > 1
        gap_before[offsets[:-1][offsets[:-1] < len(data)]] = False  # nor what stands before a text
        _check_words(where, np.count_nonzero(gap_before), len(data))
    filled = np.flatnonzero(np.diff(offsets))
    last = offsets[filled + 1] - 1
    stopped = data[last] == STOP
    if not stopped.any():
        return data, offsets
    is_stop = np.zeros(len(data), bool)
    is_stop[last[stopped]] = True
    # More than one is rare: those are looked at one by one.
    for text in filled[stopped][data[np.maximum(last[stopped] - 1, 0)] == STOP].tolist():
        begin, end = int(offsets[text]), int(offsets[text + 1])
        is_stop[begin + len(data[begin:end].tobytes().rstrip(b"*")) : end] = True
    return _without(data, offsets, is_stop)


def _without(data: np.ndarray, offsets: np.ndarray, dropped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The texts without the characters that are `dropped`, bool [C]; offsets int64 [N + 1], from 0."""
    kept = np.append(0, np.cumsum(~dropped))
    return data[~dropped], kept[offsets]


def _check_words(where: str, gaps: int, characters: int) -> None:
    if gaps + characters >= ENOUGH and MOST_UNKNOWN * (gaps + characters) < gaps < SPACED * characters:
        raise UserError(
            f"{where}: {gaps / (gaps + characters):.0%} of the characters are blanks between words: are these "
            "proteins? (a column of names or descriptions is not)"
        )


_warned: list[str] = []  # of nucleotides: once a process, not once a batch


def _warn_of_nucleotides(where: str, data: np.ndarray) -> None:
    if len(data) < ENOUGH or _warned:
        return
    data = data[:LOOKED_AT]
    share = 1 - len(data.tobytes().translate(None, NUCLEOTIDES)) / len(data)
    if share > MOST_NUCLEOTIDES:
        _warned.append(where)
        logger.warning(
            "%s: %.0f%% of the characters are A, C, G, T, U or N: this looks like DNA or RNA, not protein: translate "
            "it first",
            where,
            100 * share,
        )


def check_residues(where: str, unknown: int, characters: int) -> None:
    """UserError where so many of the characters are `unknown` that they are no proteins: names, prose, numbers."""
    if unknown > (MOST_UNKNOWN if characters >= ENOUGH else 0.5) * characters:
        raise UserError(
            f"{where}: {unknown / characters:.0%} of the characters are no residues: are these proteins? "
            "(a column of names or numbers is not)"
        )


def count_unknown(data: np.ndarray) -> int:
    """Characters that are no residues, of uint8 [C]."""
    return len(data.tobytes().translate(None, RESIDUES))
