"""Step 1 after encoding: leave copies (duplicates.py) out of the pieces, file by file; a killed run goes on."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.cli import UserError
from common.files.json_files import sync_directory, write_json_flushed
from extras.prepare.duplicates import KEY, Duplicates, find_copies, read_keys
from extras.prepare.encode import KEYS, Piece, directory_name, filter_pieces, in_order
from extras.prepare.output_directory import Build
from extras.prepare.splits import SPLITS

# What step 1 made, in numbers: lengths, duplicates, unknown characters (OUTPUT_DIR/arrow/data_report.json).

logger = logging.getLogger(__name__)
FILE = "data_report.json"
QUANTILES = {"5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "99%": 0.99}


def write_report(build: Build, files: list[Path], copies: np.ndarray, max_seq_length: int | None) -> None:
    """Add lengths, tokens and bytes to the build's results, log them, and write all results to FILE.

    files, copies: as of `count_lengths`; max_seq_length: tokens that a record was truncated to.
    """
    lengths = count_lengths(files, copies)
    quantiles = length_quantiles(lengths)
    longest = max_seq_length or sys.maxsize
    tokens = sum(min(residues + 2, longest) * records for residues, records in lengths.items())
    written = sum(path.stat().st_size for path in build.paths["arrow"].rglob("*.arrow"))
    build.results |= {"tokens": tokens, "bytes": written, "residues": quantiles}
    logger.info("%s tokens, %.0f bytes a record", f"{tokens:,}", written / lengths.total())
    logger.info("Residues a protein: %s", ", ".join(f"{name} {value:,}" for name, value in quantiles.items()))
    write_json_flushed(build.paths["arrow"] / FILE, build.results, sort_keys=False)


def count_lengths(files: list[Path], copies: np.ndarray) -> Counter:
    """{residues before truncation: records} of the records in files of KEY that are no copies."""
    lengths: Counter = Counter()
    first = 0
    for keys in (keys for path in files for keys in read_keys(path)):
        kept = ~copies[first : first + len(keys)]
        found = np.unique(keys["residues"][kept], return_counts=True)
        lengths.update(dict(zip(*(column.tolist() for column in found), strict=True)))
        first += len(keys)
    return lengths


def length_quantiles(lengths: Counter) -> dict[str, int | float]:
    """Least, greatest and mean length, and QUANTILES: the least length that so large a share of records stays within.

    lengths: as of `count_lengths`, not empty.
    """
    values, counts = (np.array(column, np.int64) for column in zip(*sorted(lengths.items()), strict=True))
    within = np.cumsum(counts)
    places = {name: np.searchsorted(within, share * within[-1]) for name, share in QUANTILES.items()}
    quantiles = {name: int(values[place]) for name, place in places.items()}
    mean = round(float((values * counts).sum() / within[-1]), 1)
    return {"min": int(values[0]), **quantiles, "max": int(values[-1]), "mean": mean}


COPIES = "copies.npy"


def key_files(build: Build, files: int) -> list[Path]:
    """The files of KEY that FileEncoder wrote for so many input files."""
    return [build.scratch / directory_name(number) / KEYS for number in range(files)]


def open_copies(build: Build) -> np.ndarray:
    """Which records are copies: bool [records], memory-mapped, in the order of the input and of the key files."""
    return np.load(build.scratch / COPIES, mmap_mode="r")


def mark_copies(build: Build, files: int, sizes: tuple[int, ...]) -> Duplicates:
    """Find copies among all encoded records, once, and log what was found. sizes: records of each split.

    UserError where a split would be left empty.
    """
    if (found := build.done("duplicates")) is None:
        logger.info("Looking for exact duplicates")
        shutil.rmtree(build.paths["arrow"])  # splits that a stopped run of an earlier version left, copies and all
        build.paths["arrow"].mkdir()
        found = find_copies(key_files(build, files), build.scratch / COPIES)._asdict()
        sync_directory(build.scratch)
        build.note("duplicates", found)
    duplicates = Duplicates(**found)
    for split, later, size, left_out in zip(SPLITS, ("held-out", "test"), sizes, duplicates.left_out, strict=False):
        if left_out and left_out == size:
            raise UserError(
                f"all {size:,} {split} records are exact copies of {later} ones: hold out fewer (--validation_size, "
                "--test_size), or give more different proteins"
            )
        if left_out:
            logger.warning("%s %s records are exact copies of %s ones: left out", f"{left_out:,}", split, later)
    if any(duplicates.repeated):
        logger.warning(
            "Exact duplicates inside a split, kept: train %s, validation %s, test %s",
            *(f"{count:,}" for count in duplicates.repeated),
        )
    return duplicates


def drop_copies(build: Build, pieces: list[dict[str, list[Piece]]], workers: int) -> list[dict[str, list[Piece]]]:
    """The pieces of every file, by split, without copies. Files that have none keep theirs."""
    copies, files = open_copies(build), key_files(build, len(pieces))
    ends = np.cumsum([path.stat().st_size // KEY.itemsize for path in files]).tolist()
    affected = [n for n, (begin, end) in enumerate(pairwise([0, *ends])) if copies[begin:end].any()]

    def without_copies(number: int) -> dict[str, list[Piece]]:
        if (found := build.done(_note(number))) is not None:
            return {split: [Piece(*piece) for piece in of_split] for split, of_split in found.items()}
        splits = np.concatenate([keys["split"].astype(np.uint8) for keys in read_keys(files[number])])
        is_copy = copies[ends[number] - len(splits) : ends[number]]
        found = dict(pieces[number])
        for label in np.unique(splits[is_copy]).tolist():
            split, kept = SPLITS[label], ~is_copy[splits == label]
            target = build.scratch / directory_name(number) / f"{split}-kept"
            found[split] = filter_pieces(pieces[number][split], kept, build.scratch, target)
        return found

    result = list(pieces)
    for number, found in zip(affected, in_order(without_copies, affected, min(workers, len(pieces))), strict=True):
        if build.done(_note(number)) is None:
            build.note(_note(number), found)
        for split in SPLITS:
            if found[split] != pieces[number][split]:
                shutil.rmtree(build.scratch / directory_name(number) / split, ignore_errors=True)
        result[number] = found
    return result


def _note(number: int) -> str:
    return f"without copies {number}"
