"""Which characters of a text are residues: one rule for all readers of proteins.

White space and stops (`*`) at the end are removed. Gaps (`-`, `.`) are refused, removed or kept. Other characters that
stand for no residue become `<unk>`; a record with more than a tenth of them is refused, as is one that says that there
is no sequence. What is changed is counted, and reported once. Several chains in a record, `A:B`, are refused or kept.

Files named A3M or A2M are alignments: their gaps are removed by default, and insertions (lower case) where gaps are
kept, so that all rows are as long as the query. HH-suite's annotations among the records are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from common.cli import UserError
from common.data import Gaps
from common.models.esm2.alphabet import BYTE_TO_ID, UNK
from extras.prepare.sources.compression import strip_compression
from extras.prepare.sources.records import BadRecords

logger = logging.getLogger(__name__)
WHITESPACE = b" \t\r\n\v\f"
IS_WHITESPACE = np.isin(np.arange(256), list(WHITESPACE))
STOP = b"*"[0]
GAPS = b"-."  # of an alignment; ESM-2 has a token for each
ALIGNMENTS = (".a3m", ".a2m")  # ends of files' names
INSERTIONS = np.isin(np.arange(256), list(b".abcdefghijklmnopqrstuvwxyz"))  # of A3M and A2M
ANNOTATIONS = (b"ss_dssp", b"sa_dssp", b"ss_pred", b"sa_pred", b"ss_conf", b"aa_dssp", b"aa_pred")  # ids of HH-suite's
RESIDUES = bytes(set(np.flatnonzero(BYTE_TO_ID != UNK).tolist()) - set(GAPS))  # as letters
IS_GAP, IS_UNKNOWN = np.isin(np.arange(256), list(GAPS)), ~np.isin(np.arange(256), list(RESIDUES + GAPS))
MOST_UNKNOWN = 0.1  # of a record's characters
NAMED = 3  # records with unknown characters
# What BioMart and others write in place of a sequence, without blanks.
NO_SEQUENCE = (b"SEQUENCEUNAVAILABLE", b"SEQUENCENOTAVAILABLE", b"NOSEQUENCEAVAILABLE")
# What R, pandas and Python write for a missing value, in their spelling.
MISSING = (b"NA", b"N/A", b"#N/A", b"<NA>", b"nan", b"NaN", b"None", b"null", b"NULL")
SAYING_LENGTHS = sorted({len(text) for text in (*NO_SEQUENCE, *MISSING)})
CHAIN_ENDS = b":/"  # between the chains of a complex in one record, as ColabFold and others have it
CHAIN_END = CHAIN_ENDS[0]  # the one that is kept
# Texts with a higher share of these letters are DNA or RNA. In 8,000 proteins of UniRef90 the share is 28 %.
NUCLEOTIDES, MOST_NUCLEOTIDES = b"ACGTUNacgtun", 0.9
SAMPLED = 1 << 16  # characters of each batch, to detect nucleotides
ENOUGH = 1000  # characters, to detect words
ENOUGH_NUCLEOTIDES = 100
ENOUGH_TURNS, MOST_TURNS = 20, 0.9  # of capitals and small letters, and their share of the characters
# Gaps between words a character: more than in any prose. Some tools write proteins with a space after each residue.
FEWEST_BLANKS, SPACED = 0.1, 0.4


COUNTS = ("blanks", "stops", "gaps", "insertions", "annotations", "comments", "unknown", "with_unknown", "empty")
COUNTS = (*COUNTS, "without_structure")


@dataclass
class Changes:
    """What was changed in the records of an input. unknown: characters that become `<unk>`, with_unknown: records that
    have some, first: the names of a few of those; empty: records without a protein; without_structure: records without
    the 3Di letters that others have."""

    blanks: int = 0
    stops: int = 0
    gaps: int = 0
    insertions: int = 0
    annotations: int = 0
    comments: int = 0
    unknown: int = 0
    with_unknown: int = 0
    empty: int = 0
    without_structure: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, other: Changes | dict[str, Any]) -> None:
        """Add those of another input. other: also as `state`."""
        other = other if isinstance(other, Changes) else Changes(**other)
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = (self.first + other.first)[:NAMED]

    @property
    def state(self) -> dict[str, Any]:
        return asdict(self)

    def report(self, where: str) -> None:
        """Log what there is."""
        removed = {"blanks": self.blanks, "stops (*) at the end": self.stops, "gaps (- and .)": self.gaps}
        removed |= {"insertions (lower case)": self.insertions, "records of annotation": self.annotations}
        removed["lines of comment"] = self.comments
        if any(removed.values()):
            counts = ", ".join(f"{count:,} {what}" for what, count in removed.items() if count)
            logger.info("%s: removed: %s", where, counts)
        if self.empty:
            logger.warning("%s: %s records have no protein: left out", where, f"{self.empty:,}")
        if self.without_structure:
            logger.warning("%s: %s records have no structure: # for its letters", where, f"{self.without_structure:,}")
        if self.unknown:
            counts = f"{self.unknown:,}", f"{self.with_unknown:,}"
            more = " and others" if self.with_unknown > len(self.first) else ""
            named = ", ".join(self.first) + more
            logger.warning("%s: %s characters in %s records are not residues: <unk> (%s)", where, *counts, named)


def is_alignment(path: str) -> bool:
    """Whether a file, plain or compressed, is A3M or A2M by its name."""
    return strip_compression(path.lower()).endswith(ALIGNMENTS)


class Cleaner:
    """Cleans the texts of an input and counts what it changes.

    where: the input, which begins the errors; gaps: None removes those of an alignment and refuses others;
    bad_records: called with the error of each record that is refused, by default it raises; aligned: an A3M or A2M
    file; chains: whether records of several chains are kept.
    """

    def __init__(
        self,
        where: str,
        gaps: Gaps | None = None,
        bad_records: Callable[[UserError], None] | None = None,
        aligned: bool = False,
        chains: bool = False,
    ) -> None:
        self.where, self.gaps = where, gaps or ("remove" if aligned else "refuse")
        self.bad_records = bad_records or BadRecords()
        self.aligned, self.chains = aligned, chains
        self.has_hashes = True  # whether a line of FASTA that begins with # is a comment
        self.changes = Changes()

    def __call__(
        self, data: np.ndarray, offsets: np.ndarray, name: Callable[[int], str]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The cleaned texts and the numbers of those that are refused, which are empty.

        data: uint8, N texts end to end; offsets: int [N + 1] of the texts; name: of a text. Returns characters
        uint8 [C] and offsets from 0, views if nothing was removed. A text may become empty. UserError for words: white
        space at more than a tenth of the positions, but not between single letters; and for SaProt's texts.
        """
        data, offsets = data[offsets[0] : offsets[-1]], offsets - offsets[0]
        if not len(data):
            return data, offsets, []
        _warn_of_nucleotides(self.where, data)
        _refuse_structure_letters(self.where, data)
        data, offsets = self._without_blanks(data, offsets)
        if self.aligned and self.gaps == "keep" and (inserted := INSERTIONS[data]).any():
            data, offsets = _without(data, offsets, inserted)
            self.changes.insertions += int(inserted.sum())
        data, offsets, refused = self._without_missing(data, offsets)
        if not _are_capitals(data) and data.tobytes().translate(None, RESIDUES):
            data, offsets = self._without_stops(data, offsets)
            if self.chains:
                data, offsets = self._without_inner_stops(data, offsets)
            data, offsets = self._without_gaps(data, offsets, refused)
            self._count_unknown(data, offsets, name, refused)
        return self._without_refused(data, offsets, name, refused)

    def _without_refused(
        self, data: np.ndarray, offsets: np.ndarray, name: Callable[[int], str], refused: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The texts, of which those that are refused become empty. refused: what is wrong with each."""
        for number, complaint in sorted(refused.items()):
            self.bad_records(UserError(f"{self.where}: {name(number)} {complaint}"))
        data, offsets = without_texts(data, offsets, refused)
        return data, offsets, sorted(refused)

    @property
    def skips(self) -> bool:
        """Whether bad records are skipped."""
        return isinstance(self.bad_records, BadRecords) and self.bad_records.policy == "skip"

    @property
    def state(self) -> list[dict]:
        """What was changed and skipped."""
        return [self.changes.state, self.bad_records.state if isinstance(self.bad_records, BadRecords) else {}]

    def report(self, where: str | None = None) -> None:
        """Log what was changed and skipped. where: in place of `self.where`."""
        self.changes.report(where or self.where)
        if isinstance(self.bad_records, BadRecords):
            self.bad_records.report()

    def _without_blanks(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if data.min() > ord(" ") or not (blank := IS_WHITESPACE[data]).any():
            return data, offsets
        positions = np.flatnonzero(~blank)
        data, offsets = _without(data, offsets, blank)
        self.changes.blanks += int(blank.sum())
        gap_before = np.diff(positions, prepend=-1) > 1
        gap_before[offsets[:-1][offsets[:-1] < len(data)]] = False  # nor white space before a text
        gaps = np.bincount(texts_of(np.flatnonzero(gap_before), offsets), minlength=len(offsets) - 1)
        _check_words(self.where, gaps, np.diff(offsets))
        return data, offsets

    def _without_missing(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
        """Texts that are a word for a missing value become empty; those that say so at length are refused."""
        refused, missing = {}, np.zeros(len(offsets) - 1, bool)
        for number in np.flatnonzero(np.isin(np.diff(offsets), SAYING_LENGTHS)).tolist():
            text = data[offsets[number] : offsets[number + 1]].tobytes()
            missing[number] = text in MISSING
            if text.upper() in NO_SEQUENCE:
                refused[number] = "says that there is no sequence: remove the record"
        if missing.any():
            data, offsets = _without(data, offsets, np.repeat(missing, np.diff(offsets)))
        return data, offsets, refused

    def _without_stops(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        filled = np.flatnonzero(np.diff(offsets))
        last = offsets[filled + 1] - 1
        stopped = data[last] == STOP
        if not stopped.any():
            return data, offsets
        is_stop = np.zeros(len(data), bool)
        is_stop[last[stopped]] = True
        # More than one stop is rare: handled one text at a time.
        for text in filled[stopped][data[np.maximum(last[stopped] - 1, 0)] == STOP].tolist():
            begin, end = int(offsets[text]), int(offsets[text + 1])
            is_stop[begin + len(data[begin:end].tobytes().rstrip(b"*")) : end] = True
        self.changes.stops += int(is_stop.sum())
        return _without(data, offsets, is_stop)

    def _without_inner_stops(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Without the stop at the end of each chain but the last."""
        is_stop = (data == STOP) & (np.append(data[1:], 0) == CHAIN_END)
        if not is_stop.any():
            return data, offsets
        self.changes.stops += int(is_stop.sum())
        return _without(data, offsets, is_stop)

    def _without_gaps(
        self, data: np.ndarray, offsets: np.ndarray, refused: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.gaps == "keep" or not (gap := IS_GAP[data]).any():
            return data, offsets
        if self.gaps == "remove":
            self.changes.gaps += int(gap.sum())
            return _without(data, offsets, gap)
        for number in np.unique(texts_of(np.flatnonzero(gap), offsets)).tolist():
            refused[number] = (
                "has gaps (- or .), as in an alignment: give --gaps remove for the proteins alone, or --gaps keep"
            )
        return data, offsets

    def _count_unknown(
        self, data: np.ndarray, offsets: np.ndarray, name: Callable[[int], str], refused: dict[int, str]
    ) -> None:
        is_unknown = IS_UNKNOWN[data]
        if self.chains:
            is_unknown &= data != CHAIN_END
            self._refuse_empty_chains(data, offsets, refused)
        places = np.flatnonzero(is_unknown)
        of_texts, bytes_there = texts_of(places, offsets), data[places]
        lengths = np.diff(offsets)
        for number in np.unique(of_texts[bytes_there >= 128]).tolist():
            refused.setdefault(number, "has bytes that are not ASCII: remove them")
        numbers, counts = np.unique(of_texts, return_counts=True)
        chain_ends = np.bincount(of_texts[np.isin(bytes_there, list(CHAIN_ENDS))], minlength=len(lengths)).tolist()
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number in refused:
                continue
            if count - chain_ends[number] > MOST_UNKNOWN * (length := int(lengths[number])):
                refused[number] = (
                    f"has {count:,} characters of {length:,} that are not residues: is it a protein? (a column of "
                    "names or numbers is not)"
                )
            elif chain_ends[number]:
                refused[number] = (
                    "has / as between chains: write : in its place"
                    if self.chains
                    else "has : or / as between chains: make a record of each (--chains is of step 1, and of encoders "
                    "that are trained with it)"
                )
            else:
                self.changes.unknown += count
                self.changes.with_unknown += 1
                self.changes.first = (self.changes.first + [name(number)])[:NAMED]

    @staticmethod
    def _refuse_empty_chains(data: np.ndarray, offsets: np.ndarray, refused: dict[int, str]) -> None:
        is_end = data == CHAIN_END
        texts = texts_of(np.flatnonzero(is_end), offsets)
        first, last = np.zeros((2, len(data)), bool)
        filled = np.diff(offsets) > 0
        first[offsets[:-1][filled]] = last[offsets[1:][filled] - 1] = True
        after_end = np.append(False, is_end[:-1])
        empty = (first | last | after_end)[is_end]
        for number in np.unique(texts[empty]).tolist():
            refused.setdefault(number, "has an empty chain (: at an end, or ::): remove that :")


def without_texts(data: np.ndarray, offsets: np.ndarray, numbers: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
    """The texts, of which some become empty."""
    bad = np.zeros(len(offsets) - 1, bool)
    bad[list(numbers)] = True
    return _without(data, offsets, np.repeat(bad, np.diff(offsets))) if bad.any() else (data, offsets)


def _are_capitals(data: np.ndarray) -> bool:
    """Whether all characters are capitals that stand for a residue: a fast answer for most data."""
    return not len(data) or bool(data.min() >= ord("A") and data.max() <= ord("Z") and not (data == ord("J")).any())


def texts_of(places: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """The numbers of the texts with these characters."""
    return np.searchsorted(offsets, places, side="right") - 1


def _without(data: np.ndarray, offsets: np.ndarray, dropped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove the characters where `dropped`, bool [C]; offsets int64 [N + 1], from 0."""
    kept_before = np.append(0, np.cumsum(~dropped))
    return data[~dropped], kept_before[offsets]


def _check_words(where: str, gaps: np.ndarray, lengths: np.ndarray) -> None:
    """UserError if most characters are in texts of words. gaps: between words, of each text, int [N]."""
    wordy = (gaps > FEWEST_BLANKS * (gaps + lengths)) & (gaps < SPACED * lengths)
    if lengths.sum() >= ENOUGH and 2 * lengths[wordy].sum() > lengths.sum():
        share = gaps[wordy].sum() / (gaps[wordy].sum() + lengths[wordy].sum())
        raise UserError(
            f"{where}: {share:.0%} of the characters are blanks between words: are these proteins? (a column of names "
            "or descriptions is not)"
        )


_warned: list[str] = []  # about nucleotides: once a process


def _warn_of_nucleotides(where: str, data: np.ndarray) -> None:
    if len(data) < ENOUGH_NUCLEOTIDES or _warned:
        return
    data = data[:SAMPLED]
    share = 1 - len(data.tobytes().translate(None, NUCLEOTIDES)) / len(data)
    if share > MOST_NUCLEOTIDES:
        _warned.append(where)
        logger.warning(
            "%s: %.0f%% of the characters are A, C, G, T, U or N: this looks like DNA or RNA, not protein: translate "
            "it first",
            where,
            100 * share,
        )


def _refuse_structure_letters(where: str, data: np.ndarray) -> None:
    """UserError for SaProt's texts, `MdEvKp`: their small letters would count as residues."""
    turns = np.diff(data[:SAMPLED] >= ord("a"))  # where letters of two cases meet
    if len(turns) >= ENOUGH_TURNS and turns.mean() > MOST_TURNS:
        raise UserError(
            f"{where}: capitals and small letters take turns, as amino acids and 3Di letters do: step 1 reads such "
            "texts with --alphabet saprot, other scripts with a model of that alphabet"
        )
