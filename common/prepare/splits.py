"""Sizes of the train, validation and test splits, and which record goes into which."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import numpy as np

from common.cli import UserError

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
UNUSED = len(SPLITS)
WINDOW = 1 << 16  # records whose labels are drawn together
MAX_HELD_OUT = 0.1  # of the records go to validation + test when the size of train is "what is left"


def split_sizes(records: int, train: float | None, validation: float, test: float) -> tuple[int, int, int]:
    """Records in (train, validation, test), out of `records`.

    Sizes are counts, or fractions of the records where below 1; train None is all that is left. What does not fit
    is scaled down in proportion, with a warning: to the input, and, where train is None, counts of validation + test
    to a tenth of the input (fractions are taken at their word as long as they leave something to train on). A split
    that was asked for keeps at least one record. UserError below 3 records or for a negative or broken size.
    """
    if records < 3:
        raise UserError(f"{records} records: at least 3 are needed to make the splits")
    asked = [_count(name, size, records) for name, size in (("validation", validation), ("test", test))]
    if train is None:
        fractions = all(size < 1 for size in (validation, test))
        room = records - 1 if fractions else max(int(MAX_HELD_OUT * records), sum(n > 0 for n in asked))
        held_out = _scale(asked, min(room, records - 1))
        sizes = (records - sum(held_out), *held_out)
        if held_out != asked:
            logger.warning(
                "validation + test (%s + %s) would leave too little of the %s records to train on: scaled down to"
                " %s + %s (fractions or --train_size set them exactly)",
                *(f"{n:,}" for n in (*asked, records, *held_out)),
            )
    else:
        wanted = [_count("train", train, records), *asked]
        sizes = tuple(_scale(wanted, records))
        if sizes != tuple(wanted):
            logger.warning(
                "train + validation + test (%s + %s + %s) are more than the %s records: scaled down to %s + %s + %s",
                *(f"{n:,}" for n in (*wanted, records, *sizes)),
            )
    return sizes


def split_labels(records: int, sizes: tuple[int, int, int], seed: int) -> Iterator[np.ndarray]:
    """The split of every record in order (0 train, 1 validation, 2 test, 3 unused), in arrays of up to WINDOW, uint8.

    Uniform over all ways to choose splits of exactly these sizes, though only a window is held at a time: how many of
    each label fall into the next window is multivariate hypergeometric, and where they fall in it is a shuffle.
    """
    generator = np.random.default_rng([seed, 1])  # not the stream that shuffled the partitions
    remaining = np.array([*sizes, records - sum(sizes)], dtype=np.int64)
    assert (remaining >= 0).all()
    while left := int(remaining.sum()):
        counts = generator.multivariate_hypergeometric(remaining, min(WINDOW, left), method="marginals")
        labels = np.repeat(np.arange(4, dtype=np.uint8), counts)
        generator.shuffle(labels)
        remaining -= counts
        yield labels


def labels_by_file(windows: Iterable[np.ndarray], counts: list[int]) -> Iterator[np.ndarray]:
    """The labels of all records, which come in windows, dealt to files of so many records."""
    windows, ahead = iter(windows), np.empty(0, np.uint8)
    for count in counts:
        parts = [ahead]
        while sum(map(len, parts)) < count:
            parts.append(next(windows))
        labels = np.concatenate(parts)
        ahead = labels[count:]
        yield labels[:count]


def _count(name: str, size: float, records: int) -> int:
    if size < 0 or (size >= 1 and size != int(size)):
        raise UserError(f"--{name}_size {size:g}: give a number of records, or a fraction below 1")
    if size >= 1:
        return int(size)
    return max(1, round(size * records)) if size else 0


def _scale(wanted: list[int], room: int) -> list[int]:
    """`wanted` in proportion, each that is not 0 at least 1, with a sum of at most `room`."""
    total = sum(wanted)
    if total <= room:
        return list(wanted)
    scaled = [max(1, n * room // total) if n else 0 for n in wanted]
    largest = scaled.index(max(scaled))
    scaled[largest] += room - sum(scaled)  # what rounding left over, or what the ones took
    return scaled
