"""Sizes of the train, validation and test splits, and which record goes into which."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator

import numpy as np

from common.cli import UserError

logger = logging.getLogger(__name__)
SPLITS = ("train", "validation", "test")
UNUSED = len(SPLITS)
WINDOW = 1 << 16  # records whose labels are drawn together
HELD_OUT = 50_000  # records of validation, and of test, where nothing is said
MAX_HELD_OUT = 0.1  # of the records go to validation + test when the size of train is "what is left"


def split_sizes(
    records: int, train: float | None = None, validation: float | None = None, test: float | None = None
) -> tuple[int, int, int]:
    """Records in (train, validation, test), out of `records`.

    Sizes are counts, or fractions of the records where below 1. What is said is taken at its word as long as it fits;
    None is what nobody has said: for validation and test HELD_OUT records, of what is left by a given train, else no
    more than a tenth of the input together; for train all that is left then. What is said and does not fit is scaled
    down in proportion, with a warning: to the input, and, where train is not said, counts of validation + test to a
    tenth of it. A split that was asked for keeps at least one record. UserError below 3 records, for a size that is
    none, and where all three are 0.
    """
    if records < 3:
        raise UserError(f"{records} records: at least 3 are needed to make the splits")
    asked = dict(zip(SPLITS, (train, validation, test), strict=True))
    said = {name: _count(name, size, records) for name, size in asked.items() if size is not None}
    if len(said) == len(SPLITS) and not any(said.values()):
        raise UserError("--train_size, --validation_size and --test_size are 0: nothing would be left")
    unsaid = [name for name in SPLITS[1:] if name not in said]
    tenth = int(MAX_HELD_OUT * records)
    modest = min(HELD_OUT, max(1, tenth // 2))
    sizes, total = said, sum(said.values())
    if train is None and total + len(unsaid) >= records:
        fractions = all(asked[name] < 1 for name in said)
        room = records - 1 if fractions else max(tenth, sum(n > 0 for n in said.values()))
        sizes = _scale(said, min(room, records - 1 - len(unsaid)))
    elif train is not None and total + len(unsaid) > records:
        sizes = _scale(said, records - modest * len(unsaid))
    if sizes != said:
        logger.warning(
            "%s do not fit into %s records: scaled down to %s (fractions, or sizes that fit, are taken exactly)",
            " + ".join(f"{name} {n:,}" for name, n in said.items()),
            f"{records:,}",
            " + ".join(f"{n:,}" for n in sizes.values()),
        )
    rest = records - sum(sizes.values())
    most = (rest - 1 if train is None else rest) // max(len(unsaid), 1)
    found = dict.fromkeys(unsaid, min(HELD_OUT if train is not None else modest, most)) | sizes
    found.setdefault("train", records - sum(found.values()))
    return tuple(found[name] for name in SPLITS)


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
    if not (math.isfinite(size) and size >= 0) or (size >= 1 and size != int(size)):
        raise UserError(f"--{name}_size {size:g}: give a number of records, or a fraction below 1")
    if size >= 1:
        return int(size)
    return max(1, round(size * records)) if size else 0


def _scale(wanted: dict[str, int], room: int) -> dict[str, int]:
    """`wanted` in proportion, each that is not 0 at least 1, with a sum of at most `room`."""
    total = sum(wanted.values())
    if total <= room:
        return wanted
    scaled = {name: max(1, n * room // total) if n else 0 for name, n in wanted.items()}
    largest = max(scaled, key=scaled.__getitem__)
    scaled[largest] += room - sum(scaled.values())  # what rounding left over, or what the ones took
    return scaled
