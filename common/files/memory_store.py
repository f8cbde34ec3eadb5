"""A few proteins held in memory, with the interface of a TokenStore: held-out ones of a source that is streamed."""

from __future__ import annotations

import numpy as np

from common.files.alphabet import encode_many
from common.files.sources import File
from common.files.stream_reader import read_sequences, units_of


class MemoryStore:
    """Token ids of n records, end to end: ids uint8 [T], offsets int64 [n + 1]."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        self.ids, self.offsets = ids, offsets

    @classmethod
    def read(cls, files: tuple[File, ...], max_records: int) -> MemoryStore:
        """The first `max_records` proteins of some files, empty rows left out."""
        ids, lengths, missing = [], [], max_records
        for unit in units_of(files, wanted=1):
            for characters, offsets in read_sequences(unit, 0):
                proteins, offsets = encode_many(characters, offsets)
                sizes = np.diff(offsets)
                kept = sizes > 2  # not only <cls> and <eos>
                kept &= np.cumsum(kept) <= missing
                ids.append(proteins[np.repeat(kept, sizes)])
                lengths.append(sizes[kept])
                missing -= int(kept.sum())
                if not missing:
                    break
            if not missing:
                break
        offsets = np.append(0, np.cumsum(np.concatenate(lengths or [np.zeros(0, np.int64)])))
        return cls(np.concatenate(ids or [np.zeros(0, np.uint8)]), offsets)

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
