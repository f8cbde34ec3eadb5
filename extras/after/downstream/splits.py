"""Splits of labelled proteins: those that a table gives, or drawn by a hash; equal proteins are never on two sides."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from common.cli import UserError
from extras.after.inference.mutation_tables import is_missing

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
SHORT = {"val": "validation", "valid": "validation", "dev": "validation"}
COLUMN = "split"
# FLIP's (Dallago et al. 2021, https://github.com/J-SNACKKB/FLIP): train or test, and which of train are validation.
FLIP_SET, FLIP_VALIDATION = "set", "validation"
TRUE, FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


def held_out_number(key: str) -> float:
    """From 0 to 1, by a hash: a protein or cluster is held out if it is below a threshold, whatever else there is."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64


def split_of(group: str, sizes: tuple[float, float]) -> str:
    """By a hash of a sequence or a cluster, so that equal ones stay together. sizes: of validation and test, fractions
    of 1."""
    number, (validation, test) = held_out_number(group), sizes
    return "test" if number < test else "validation" if number < test + validation else "train"


def given_splits(rows: Sequence[dict[str, str]], column: str | None, places: Sequence[str]) -> list[str] | None:
    """The split of each row of a table, "" where its field is missing; None if the table has none.

    column: the splits'; None: `split`, or FLIP's `set` if it has splits, in any case of letters. FLIP's `validation`
    goes with `set`. places: of the rows, for errors. UserError for a field that is no split.
    """
    named = {name.strip().lower(): name for name in rows[0]}
    rows = [
        row | {name: row[named[name]] for name in (COLUMN, FLIP_SET, FLIP_VALIDATION) if name in named} for row in rows
    ]
    column = column or next((name for name in (COLUMN, FLIP_SET) if _has_splits(name, rows)), None)
    if column is None:
        return None
    splits = [_split_named(row[column], place) for row, place in zip(rows, places, strict=True)]
    if column == FLIP_SET:
        columns = [name for name in (FLIP_SET, FLIP_VALIDATION) if name in rows[0]]
        logger.info("Splits as in FLIP: by the column %s", " and the column ".join(columns))
        if len(columns) > 1:
            return [_with_validation(*each) for each in zip(rows, splits, places, strict=True)]
    return splits


def _has_splits(name: str, rows: Sequence[dict[str, str]]) -> bool:
    """Whether there is such a column; one named `set` may be about something else."""
    if name not in rows[0]:
        return False
    first = next((row[name] for row in rows if not is_missing(row[name])), "").strip().lower()
    return name == COLUMN or first in (*SPLITS, *SHORT)


def _split_named(word: str, place: str) -> str:
    name = word.strip().lower()
    name = "" if is_missing(name) else SHORT.get(name, name)
    if name not in ("", *SPLITS):
        raise UserError(f"{place}: the split is {word[:40]!r}: expected {', '.join(SPLITS)}")
    return name


def _with_validation(row: dict[str, str], split: str, place: str) -> str:
    """FLIP's `validation` says which rows of `set` train are for validation."""
    word = row[FLIP_VALIDATION].strip().lower()
    if word in FALSE or is_missing(word):
        return split
    if word not in TRUE:
        raise UserError(f"{place}: {FLIP_VALIDATION} is {row[FLIP_VALIDATION][:40]!r}: expected True or False")
    if split == "test":
        raise UserError(f"{place}: {FLIP_SET} is test and {FLIP_VALIDATION} is True: a protein has one split")
    return split and "validation"


def check_sides(sequences: Sequence[str], groups: Sequence[str], splits: Sequence[str], places: Sequence[str]) -> None:
    """UserError for a sequence or a group (a cluster) that is in two splits."""
    sides: dict[str, str] = {}
    for sequence, group, split, place in zip(sequences, groups, splits, places, strict=True):
        for key, same in ((sequence, "same sequence"), (group, f"cluster {group[:40]!r}")):
            if sides.setdefault(key, split) != split:
                raise UserError(f"{place}: the {same} is in the {sides[key]} split, too: put it in one")
