"""Exact duplicates: records whose token ids are equal before anything is truncated.

A sequence is kept in one split only, test before validation before train. Records of other splits that repeat it are
copies, and are dropped. Duplicates inside a split are counted and kept.

Records are compared by 64-bit hashes, which FileEncoder writes while it encodes: 16 bytes a record on disk. They are
joined in partitions of the hash, each read once: memory does not grow with the input, time and reads grow in
proportion. For 69 million different proteins with 100,000 held out, the probability that one is dropped by mistake is
4e-7.
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
from common.files.safe_files import sync_directory, write_json_flushed
from extras.prepare.dataset_writer import Piece, filter_pieces
from extras.prepare.encode import KEY, KEYS, directory_name, in_order
from extras.prepare.output_directory import Build
from extras.prepare.splits import SPLITS, Buckets

CHUNK = 1 << 20  # records read at a time
PARTITION = 1 << 21  # records joined at a time, about
SPLIT_BITS, SPLIT_MASK = np.uint64(2), np.uint64(3)  # of a value in the files of hashes: number << 2 | split


class Duplicates(NamedTuple):
    """Counts of records by split, each [train, validation, test]."""

    left_out: list[int]  # copies of a record in a later split
    repeated: list[int]  # of the others: duplicates inside their split


def read_keys(path: Path) -> Iterator[np.ndarray]:
    """The records of a file of KEY, in chunks."""
    with open(path, "rb") as file:
        while len(keys := np.fromfile(file, KEY, CHUNK)):
            yield keys


def find_copies(files: list[Path], path: Path) -> Duplicates:
    """Write to `path` (.npy) which records are copies: bool [records], in the order of the files of KEY.

    The keys are scattered once over files by their hash, 16 bytes a record, beside `path`; each is then read once.
    """
    records = sum(file.stat().st_size for file in files) // KEY.itemsize
    copies = open_memmap(path, "w+", bool, (records,))
    left_out, repeated = np.zeros((2, len(SPLITS)), np.int64)
    scattered = path.with_name("hashes")
    shutil.rmtree(scattered, ignore_errors=True)  # of a killed run
    buckets = Buckets(scattered, (records // PARTITION).bit_length())
    for keys in (keys for file in files for keys in read_keys(file)):
        numbers = np.arange(buckets.rows, buckets.rows + len(keys), dtype=np.uint64)
        buckets.add(keys["hash"], numbers << SPLIT_BITS | keys["split"])
    buckets.flush()
    for hashes, values in buckets:
        places, groups = _repeated(hashes)
        values = values[places]
        numbers, splits = (values >> SPLIT_BITS).astype(np.int64), (values & SPLIT_MASK).astype(np.uint8)
        latest = np.zeros(groups.max(initial=-1) + 1, np.uint8)
        np.maximum.at(latest, groups, splits)
        is_copy = splits < latest[groups]
        copies[numbers[is_copy]] = True
        left_out += _count(splits[is_copy])
        repeated += _count(splits[~is_copy]) - _count(latest)
    buckets.remove()
    copies.flush()
    return Duplicates(left_out.tolist(), repeated.tolist())


def _repeated(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the hashes that occur more than once, int64 [n], and a group number for each of them [n]."""
    ordered = np.sort(hashes)  # several times as fast as argsort
    repeated = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(repeated):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    groups = np.minimum(np.searchsorted(repeated, hashes), len(repeated) - 1)
    places = np.flatnonzero(repeated[groups] == hashes)
    return places, groups[places]


def _count(splits: np.ndarray) -> np.ndarray:
    return np.bincount(splits, minlength=len(SPLITS))


logger = logging.getLogger(__name__)
REPORT = "data_report.json"  # lengths, duplicates and unknown characters of the output of step 1
QUANTILES = {"5%": 0.05, "25%": 0.25, "median": 0.5, "75%": 0.75, "95%": 0.95, "99%": 0.99}


def write_report(build: Build, files: list[Path], copies: np.ndarray, max_seq_length: int | None) -> None:
    """Add lengths, tokens and bytes to the build's results, log them, and write all results to REPORT.

    files, copies: as for `count_lengths`; max_seq_length: tokens that records were truncated to.
    """
    lengths = count_lengths(files, copies)
    quantiles = length_quantiles(lengths)
    longest = max_seq_length or sys.maxsize
    tokens = sum(min(residues + 2, longest) * records for residues, records in lengths.items())
    written = sum(path.stat().st_size for path in build.paths["arrow"].rglob("*.arrow"))
    build.results |= {"tokens": tokens, "bytes": written, "residues": quantiles}
    logger.info("%s tokens, %.0f bytes a record", f"{tokens:,}", written / lengths.total())
    logger.info("Residues a protein: %s", ", ".join(f"{name} {value:,}" for name, value in quantiles.items()))
    write_json_flushed(build.paths["arrow"] / REPORT, build.results, sort_keys=False)


def count_lengths(files: list[Path], copies: np.ndarray) -> Counter:
    """{residues before truncation: number of records} of the records in files of KEY, without copies."""
    lengths: Counter = Counter()
    first = 0
    for keys in (keys for path in files for keys in read_keys(path)):
        unique = ~copies[first : first + len(keys)]
        values, counts = np.unique(keys["residues"][unique], return_counts=True)
        lengths.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        first += len(keys)
    return lengths


def length_quantiles(lengths: Counter) -> dict[str, int | float]:
    """Minimum, maximum and mean length, and QUANTILES.

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
    """The files of KEY that FileEncoder wrote for `files` input files."""
    return [build.scratch / directory_name(number) / KEYS for number in range(files)]


def open_copies(build: Build) -> np.ndarray:
    """Which records are copies: bool [records], memory-mapped, in the order of the key files."""
    return np.load(build.scratch / COPIES, mmap_mode="r")


def mark_copies(build: Build, files: int, sizes: tuple[int, ...]) -> Duplicates:
    """Find copies among all encoded records, once, and log their numbers. sizes: records of each split.

    UserError if a split becomes empty.
    """
    if (counts := build.done("duplicates")) is None:
        logger.info("Looking for exact duplicates")
        shutil.rmtree(build.paths["arrow"])  # splits with copies, of a stopped run of an earlier version
        build.paths["arrow"].mkdir()
        counts = find_copies(key_files(build, files), build.scratch / COPIES)._asdict()
        sync_directory(build.scratch)
        build.note("duplicates", counts)
    duplicates = Duplicates(**counts)
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
    """The pieces of every file, by split, without copies. Files without copies keep their pieces."""
    copies, files = open_copies(build), key_files(build, len(pieces))
    ends = np.cumsum([path.stat().st_size // KEY.itemsize for path in files]).tolist()
    affected = [n for n, (begin, end) in enumerate(pairwise([0, *ends])) if copies[begin:end].any()]

    def without_copies(number: int) -> dict[str, list[Piece]]:
        if (noted := build.done(_note(number))) is not None:
            return {split: [Piece(*piece) for piece in of_split] for split, of_split in noted.items()}
        splits = np.concatenate([keys["split"].astype(np.uint8) for keys in read_keys(files[number])])
        is_copy = copies[ends[number] - len(splits) : ends[number]]
        filtered = dict(pieces[number])
        for label in np.unique(splits[is_copy]).tolist():
            split, is_kept = SPLITS[label], ~is_copy[splits == label]
            target = f"{directory_name(number)}/{split}-kept"
            filtered[split] = filter_pieces(pieces[number][split], is_kept, build.scratch, target)
        return filtered

    result = list(pieces)
    for number, filtered in zip(affected, in_order(without_copies, affected, min(workers, len(pieces))), strict=True):
        if build.done(_note(number)) is None:
            build.note(_note(number), filtered)
        for split in SPLITS:
            if filtered[split] != pieces[number][split]:
                shutil.rmtree(build.scratch / directory_name(number) / split, ignore_errors=True)
        result[number] = filtered
    return result


def _note(number: int) -> str:
    return f"without copies {number}"
