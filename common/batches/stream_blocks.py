"""What a stream has read: blocks of rows, of each protein its crop alone; and the window it takes packs of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.batches.stream_order import Share
from common.batches.windows import Pack, Window, crop
from common.files.alphabet import encode_many
from common.sources.stream_reader import ROW_BITS


class Block(NamedTuple):
    """Some rows of a unit, those of other streams left out."""

    unit_index: int  # among the stream's units of the epoch
    unit: int
    rows: np.ndarray  # int64 [n], row numbers in the unit
    ids: np.ndarray  # uint8 [T], of each record its crop
    offsets: np.ndarray  # int64 [n + 1], from 0
    lengths: np.ndarray  # int64 [n], of the whole records
    starts: np.ndarray  # int64 [n], of the crops
    end: int  # the row to go on from

    @classmethod
    def encode(cls, index: int, share: Share, first: int, characters: np.ndarray, offsets: np.ndarray) -> Block:
        ids, offsets = encode_many(characters, offsets)
        rows = np.arange(first, first + len(offsets) - 1)
        if share.parts > 1:
            mine, lengths = rows % share.parts == share.part, np.diff(offsets)
            ids, rows = ids[np.repeat(mine, lengths)], rows[mine]
            offsets = np.append(0, np.cumsum(lengths[mine]))
        end = first + len(mine) if share.parts > 1 else first + len(rows)
        return cls(index, share.unit, rows, ids, offsets, np.diff(offsets), np.zeros_like(rows), end)

    def cropped(self, seed: int, epoch: int, max_seq_length: int) -> Block:
        """With no more of each record than its crop, which a window's plan will choose again."""
        if not (self.lengths > max_seq_length).any():
            return self
        starts, crops = crop(self.records, self.lengths, seed, epoch, max_seq_length)
        begins = self.offsets[:-1] + starts
        pieces = [self.ids[a:b] for a, b in zip(begins.tolist(), (begins + crops).tolist(), strict=True)]
        return self._replace(ids=np.concatenate(pieces), offsets=np.append(0, np.cumsum(crops)), starts=starts)

    @property
    def records(self) -> np.ndarray:
        return (self.unit << ROW_BITS) + self.rows

    def split(self, count: int) -> tuple[Block, Block | None]:
        """The first `count` rows and the rest."""
        if count >= len(self.rows):
            return self, None
        cut = int(self.offsets[count])
        now = self._replace(
            rows=self.rows[:count],
            ids=self.ids[:cut],
            offsets=self.offsets[: count + 1],
            lengths=self.lengths[:count],
            starts=self.starts[:count],
            end=int(self.rows[count - 1]) + 1,
        )
        rest = self._replace(
            rows=self.rows[count:],
            ids=self.ids[cut:],
            offsets=self.offsets[count:] - cut,
            lengths=self.lengths[count:],
            starts=self.starts[count:],
        )
        return now, rest


class Buffer:
    """A planned window and the tokens of its records."""

    def __init__(self, window: Window, records: np.ndarray, begins: np.ndarray, ids: np.ndarray, following):
        """begins: where in `ids` each record would begin, int64 [n]; of a crop, only its own part is there."""
        self.window, self.ids, self.following = window, ids, following
        self._begins, self._sorter = begins, np.argsort(records)
        self._records = records[self._sorter]

    def gather(self, pack: Pack) -> np.ndarray:
        """The pack's tokens uint8 [T]."""
        begin = self._begins[self._sorter[np.searchsorted(self._records, pack.records)]] + pack.starts
        pieces = [self.ids[a:b] for a, b in zip(begin.tolist(), (begin + pack.lengths).tolist(), strict=True)]
        return np.concatenate(pieces or [self.ids[:0]])
