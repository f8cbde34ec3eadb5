"""Step 1 after encoding: leave copies (duplicates.py) out of the pieces, file by file; a killed run goes on."""

from __future__ import annotations

import logging
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np

from common.cli import UserError
from common.files.output_directory import Build, sync_directory
from common.prepare.duplicates import KEY, Duplicates, find_copies, read_keys
from common.prepare.encode_files import KEYS, Piece, directory_name, filter_pieces
from common.prepare.encode_records import in_order
from common.prepare.splits import SPLITS

logger = logging.getLogger(__name__)
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
