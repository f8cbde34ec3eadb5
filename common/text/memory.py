"""The first documents of files that nobody prepared, as tokens in memory: the held-out text of a streamed source."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from common.sources.dataset import File
from common.sources.stream_reader import read_rows, units_of
from common.text.pieces import Pieces
from common.text.tokenizers import Tokenizer, tokenize

DOCUMENTS_AT_ONCE = 64


def tokenize_files(files: tuple[File, ...], tokenizer: Tokenizer) -> Iterator[tuple[pa.Array, np.ndarray, np.ndarray]]:
    """The documents of some files, a few at a time, with what `tokenize` gives for them: ids and bounds."""
    for unit in units_of(files, wanted=1):
        for block in read_rows(unit, 0):
            for first in range(0, len(block), DOCUMENTS_AT_ONCE):
                texts = block[first : first + DOCUMENTS_AT_ONCE]
                yield texts, *tokenize(tokenizer, texts)


class TextMemory:
    """Documents with the interface of a TextStore: ids [T] end to end, bounds int64 [n + 1]."""

    def __init__(self, ids: np.ndarray, bounds: np.ndarray):
        self.ids, self.bounds = ids, bounds

    @classmethod
    def read(cls, files: tuple[File, ...], tokenizer: Tokenizer, max_tokens: int) -> TextMemory:
        """The first documents of some files, until they have `max_tokens` tokens; what is beyond is left out."""
        ids, lengths, missing = [], [], max_tokens
        for _, some, bounds in tokenize_files(files, tokenizer):
            ids.append(some[:missing])
            lengths.append(np.diff(np.minimum(bounds, missing)))
            missing -= len(ids[-1])
            if not missing:
                break
        return cls._of(ids, lengths, tokenizer)

    @classmethod
    def _of(cls, ids: list[np.ndarray], lengths: list[np.ndarray], tokenizer: Tokenizer) -> TextMemory:
        lengths = np.concatenate(lengths or [np.zeros(0, np.int64)])
        bounds = np.append(0, np.cumsum(lengths[lengths > 0]))
        return cls(np.concatenate(ids or [np.zeros(0, tokenizer.dtype)]), bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    def pieces(self, begin: int, end: int) -> Pieces:
        """As `TextStore.pieces`."""
        return Pieces.between(np.arange(len(self)), self.bounds, begin, end)

    def gather(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `TextStore.gather`."""
        begins = (self.bounds[records] + starts).tolist()
        parts = [self.ids[begin : begin + length] for begin, length in zip(begins, lengths.tolist(), strict=True)]
        return np.concatenate(parts or [self.ids[:0]]), np.append(0, np.cumsum(lengths))
