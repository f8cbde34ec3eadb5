"""A few proteins of files that nobody prepared, held in memory."""

from __future__ import annotations

import math

import numpy as np

from common.files.alphabet import UNK, encode_many
from common.sources.dataset import File
from common.sources.stream_reader import read_sequences, units_of


class MemoryStore:
    """A few proteins held in memory, with the interface of a TokenStore: held-out ones of a source that is streamed.

    Token ids of n records, end to end: ids uint8 [T], offsets int64 [n + 1].
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        self.ids, self.offsets = ids, offsets

    @classmethod
    def read(cls, files: tuple[File, ...], max_records: int, max_tokens: float = math.inf) -> MemoryStore:
        """The first `max_records` proteins of some files, empty rows left out; fewer once they have `max_tokens`."""
        ids, lengths, missing = [], [], max_records
        for unit in units_of(files, wanted=1):
            for text, offsets in read_sequences(unit, 0):
                proteins, offsets = encode_many(text, offsets)
                sizes = np.diff(offsets)
                kept = sizes > 2  # not only <cls> and <eos>
                kept &= np.cumsum(kept) <= missing
                ids.append(proteins[np.repeat(kept, sizes)])
                lengths.append(sizes[kept])
                missing -= int(kept.sum())
                max_tokens -= len(ids[-1])
                if not missing or max_tokens <= 0:
                    break
            if not missing or max_tokens <= 0:
                break
        offsets = np.append(0, np.cumsum(np.concatenate(lengths or [np.zeros(0, np.int64)])))
        return cls(np.concatenate(ids or [np.zeros(0, np.uint8)]), offsets)

    def unknown(self) -> tuple[int, int]:
        """Characters that are no residues, and the records they are in."""
        places = np.flatnonzero(self.ids == UNK)
        return len(places), len(np.unique(np.searchsorted(self.offsets, places, side="right")))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of the records int64 [n], `<cls>` and `<eos>` included."""
        return self.offsets[np.asarray(indices) + 1] - self.offsets[indices]

    def gather(self, indices: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n records, end to end: ids uint8, offsets int64 [n + 1]."""
        begin = (self.offsets[indices] + starts).tolist()
        pieces = [self.ids[a : a + n] for a, n in zip(begin, lengths.tolist(), strict=True)]
        return np.concatenate(pieces or [self.ids[:0]]), np.append(0, np.cumsum(lengths))
