"""Exact duplicates: records whose token ids are equal before anything is truncated.

A sequence stands in one split only, test before validation before train: records of the other splits that repeat it
are copies, and left out. Duplicates inside a split are counted and stay.

Records are compared by 64-bit hashes, which FileEncoder writes while it encodes: 16 bytes a record on disk. They are
joined in partitions of the hash, so memory does not grow with the input. Of 69 million different proteins with 100,000
held out, one is left out by mistake with probability 4e-7.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib.format import open_memmap

from common.files.hashing import BYTES, GAMMA, WORD, derive_key, hash_counters, mix
from extras.prepare.splits import SPLITS

# Of a record: the hash of its token ids, its residues before truncation, its split (an index into SPLITS).
KEY = np.dtype([("hash", "<u8"), ("residues", "<u4"), ("split", "<u4")])
CHUNK = 1 << 20  # records that are read at once
PARTITION = 1 << 21  # records that are joined at once, about


class Duplicates(NamedTuple):
    """Counts of records by split, each [train, validation, test]."""

    left_out: list[int]  # copies of a record of a later split
    repeated: list[int]  # of the others: those that repeat another one of their split


def hash_records(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64 [N] hashes of N records: token ids uint8 [T] end to end, offsets int [N + 1] from 0, none empty.

    The sum over a record of the hashes of (eight tokens, their place), mixed with its length.
    """
    offsets = offsets.astype(np.int64)
    lengths = np.diff(offsets)
    counts = (lengths + 7) // 8  # of words
    ends = np.cumsum(counts)
    begins = ends - counts
    places = np.arange(ends[-1] if len(ends) else 0) - np.repeat(begins, counts)
    padded = np.concatenate((ids, np.zeros(8, np.uint8)))
    overlapping = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # a word at every byte
    words = overlapping[np.repeat(offsets[:-1], counts) + 8 * places]
    beyond = (8 * counts - lengths).astype(np.uint64)  # bytes of a last word that are the next record's
    words[ends - 1] &= np.uint64(WORD) >> (np.uint64(8) * beyond)
    words ^= hash_counters(derive_key(BYTES), np.arange(counts.max(initial=0)))[places]
    return mix(np.add.reduceat(mix(words), begins) + lengths.astype(np.uint64) * np.uint64(GAMMA))


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
