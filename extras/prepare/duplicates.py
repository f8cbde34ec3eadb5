"""Exact duplicates: records whose token ids are equal before anything is truncated.

A sequence stands in one split only, test before validation before train: records of the other splits that repeat it
are copies, and left out. Duplicates inside a split are counted and stay.

Records are compared by 64-bit hashes, which FileEncoder writes while it encodes: 16 bytes a record on disk. They are
joined in partitions of the hash, so memory does not grow with the input. Of 69 million different proteins with 100,000
held out, one is left out by mistake with probability 4e-7.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from common.cli import UserError
from common.files.json_files import write_json_flushed
from common.files.output_directory import Build, sync_directory
from extras.prepare.dataset_writer import Piece, filter_pieces
from extras.prepare.encode import KEY, KEYS, directory_name, in_order
from extras.prepare.splits import SPLITS

CHUNK = 1 << 20  # records that are read at once
PARTITION = 1 << 21  # records that are joined at once, about


class Duplicates(NamedTuple):
    """Counts of records by split, each [train, validation, test]."""

    left_out: list[int]  # copies of a record of a later split
    repeated: list[int]  # of the others: those that repeat another one of their split


def read_keys(path: Path) -> Iterator[np.ndarray]:
    """The records of a file of KEY, in chunks."""
    with open(path, "rb") as file:
        while len(keys := np.fromfile(file, KEY, CHUNK)):
            yield keys


def find_copies(files: list[Path], path: Path) -> Duplicates:
    """Write to `path`, as .npy, which records are copies: bool [records], in the order of the files of KEY."""
    records = sum(file.stat().st_size for file in files) // KEY.itemsize
    copies = open_memmap(path, "w+", bool, (records,))
    left_out, repeated = np.zeros((2, len(SPLITS)), np.int64)
    bits = (records // PARTITION).bit_length()
    for number in range(1 << bits):
        hashes, splits, numbers = _partition(files, number, (1 << bits) - 1)
        places, groups = _repeated(hashes)
        splits = splits[places]
        latest = np.zeros(groups.max(initial=-1) + 1, np.uint8)
        np.maximum.at(latest, groups, splits)
        is_copy = splits < latest[groups]
        copies[numbers[places[is_copy]]] = True
        left_out += _count(splits[is_copy])
        repeated += _count(splits[~is_copy]) - _count(latest)
    copies.flush()
    return Duplicates(left_out.tolist(), repeated.tolist())


def _repeated(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of hashes that are there more than once, int64 [n], and a number for each of these hashes [n]."""
    ordered = np.sort(hashes)  # several times as fast as argsort
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    groups = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
    places = np.flatnonzero(repeated[groups] == hashes)
    return places, groups[places]


def _partition(files: list[Path], number: int, mask: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hashes, splits and numbers of the records whose hash has `number` in its lowest bits, those of `mask`."""
    hashes, splits, numbers = [np.empty(0, np.uint64)], [np.empty(0, np.uint8)], [np.empty(0, np.int64)]
    first = 0
    for keys in (keys for file in files for keys in read_keys(file)):
        chosen = np.flatnonzero((keys["hash"] & np.uint64(mask)) == number)
        hashes.append(keys["hash"][chosen])
        splits.append(keys["split"][chosen].astype(np.uint8))
        numbers.append(first + chosen)
        first += len(keys)
    return np.concatenate(hashes), np.concatenate(splits), np.concatenate(numbers)


def _count(splits: np.ndarray) -> np.ndarray:
    return np.bincount(splits, minlength=len(SPLITS))


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
