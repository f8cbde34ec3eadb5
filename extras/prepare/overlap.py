"""Count the held-out proteins of prepared data that other prepared data train on, by their whole sequences.

    python -m extras.prepare.overlap HELD_OUT/arrow TRAINED/arrow

Step 1 leaves copies out within its own output alone. For relatives, prepare both as one, with --cluster.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from common.cli import UserError, log_every, run
from common.data.alphabet import recorded_alphabet
from common.models.esm2.alphabet import PAD
from extras.command_line import positional
from extras.prepare.encode import hash_records
from extras.prepare.extend import batches_of, lists_of
from extras.prepare.splits import SPLITS


def copies_in_train(held_out: Path, trained: Path) -> dict[str, tuple[int, int]]:
    """{held-out split: (records that `trained`'s train has too, records)} of two outputs of step 1."""
    hashes = {split: hashes_of(held_out, split) for split in SPLITS[1:] if (held_out / split).is_dir()}
    counts = count_in_train(hashes, trained)
    return {split: (counts[split], len(of_split)) for split, of_split in hashes.items()}


def count_in_train(hashes: dict[str, np.ndarray], trained: Path) -> dict[str, int]:
    """How many of the records of each set (`hashes_of`) are in train of an output of step 1, which is read once."""
    found = {name: np.zeros(len(of_set), bool) for name, of_set in hashes.items()}
    for batch in batches_of(trained, "train"):
        of_batch = hashes_in(batch)
        for name, of_set in hashes.items():
            found[name] |= np.isin(of_set, of_batch)
    return {name: int(of_set.sum()) for name, of_set in found.items()}


def hashes_of(directory: Path, split: str) -> np.ndarray:
    """Of each record, uint64 [records]."""
    return np.concatenate([np.empty(0, np.uint64), *map(hashes_in, batches_of(directory, split))])


def hashes_in(batch: pa.RecordBatch) -> np.ndarray:
    """Of the token ids of each record without <pad>, uint64 [records]. Those of text have no <pad>, and are hashed by
    their two or four bytes."""
    ids, offsets = lists_of(batch)
    if ids.dtype == np.uint8:
        kept = ids != PAD
        ids, offsets = ids[kept], np.append(0, np.cumsum(kept))[offsets]
    return hash_records(ids, offsets)


def main() -> None:
    usage = "python -m extras.prepare.overlap HELD_OUT/arrow TRAINED/arrow"
    held_out, trained = map(Path, positional(__doc__, usage, 2))
    for directory in (held_out, trained):
        if not (directory / "train/state.json").is_file():
            raise UserError(f"{directory}: not an output of step 1: give the directory arrow")
    if recorded_alphabet(held_out) != recorded_alphabet(trained):
        raise UserError(f"{held_out} and {trained}: of different alphabets, whose tokens do not compare")
    with log_every("Comparing"):
        counts = copies_in_train(held_out, trained)
    for split, (copies, records) in counts.items():
        print(f"{copies:,} of {records:,} {split} proteins of {held_out} are in train of {trained}")


if __name__ == "__main__":
    run(main)
