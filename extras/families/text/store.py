"""Text as tokens: a split that 1.tokenize_text.py wrote (TextStore), or the first documents of files (TextMemory).

Documents are token ids, each followed by the end-of-text token. A split is a directory of Arrow files as in
common.data.token_store, `list<uint16>` or `list<uint32>`; `tokens.json` beside the splits names the tokenizer. A few
bytes for each record batch are enough to find the n-th token of all documents end to end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.data.token_store import ArrowLists, read_state, split_directory
from extras.families.decoders.residues import RESIDUES
from extras.families.text.tokenizers import Pieces, Tokenizer, tokenize
from extras.prepare.sources.find_files import File
from extras.prepare.sources.sequence_files import read_rows, units_of

DOCUMENTS_AT_ONCE = 64


def tokenize_files(files: tuple[File, ...], tokenizer: Tokenizer) -> Iterator[tuple[pa.Array, np.ndarray, np.ndarray]]:
    """The documents of some files, a few at a time, with their ids and bounds from `tokenize`."""
    for unit in units_of(files, wanted=1):
        for block in read_rows(unit, 0):
            for first in range(0, len(block), DOCUMENTS_AT_ONCE):
                texts = block[first : first + DOCUMENTS_AT_ONCE]
                yield texts, *tokenize(tokenizer, texts)


class TextMemory:
    """Documents in memory, the held-out text of a streamed source, with the interface of a TextStore.

    ids [T] end to end, bounds int64 [n + 1].
    """

    def __init__(self, ids: np.ndarray, bounds: np.ndarray):
        self.ids, self.bounds = ids, bounds

    @classmethod
    def read(cls, files: tuple[File, ...], tokenizer: Tokenizer, max_tokens: int) -> TextMemory:
        """The first `max_tokens` tokens of some files."""
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
        """The pieces of tokens [begin, end) of all documents end to end, 0 <= begin < end <= their number."""
        return Pieces.between(np.arange(len(self)), self.bounds, begin, end)

    def gather(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n documents, end to end, and their offsets int64 [n + 1]."""
        begins = (self.bounds[records] + starts).tolist()
        parts = [self.ids[begin : begin + length] for begin, length in zip(begins, lengths.tolist(), strict=True)]
        return np.concatenate(parts or [self.ids[:0]]), np.append(0, np.cumsum(lengths))


STEP = "1.tokenize_text.py"  # the script that writes splits
TOKENS = "tokens.json"


class TextStore:
    """Random access to the tokens of one split, by document or position. Cheap to fork; pickles as its path."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        state = read_state(self.path, STEP)
        self._lists = lists = ArrowLists(self.path, state)
        if lists.width or lists.dtype not in (np.uint16, np.uint32):
            raise UserError(f"{self.path}: holds lists of {lists.dtype}, not tokens of text: tokenise with {STEP}")
        if lists.num_rows == 0:
            raise UserError(f"{self.path}: the dataset is empty")
        self.fingerprint = str(state.get("_fingerprint"))
        tokens = [self._bounds(chunk)[-1] for chunk in range(len(lists.chunk_start))]
        self._chunk_token = np.append(0, np.cumsum(tokens, dtype=np.int64))  # first token of each record batch
        self.num_tokens = int(self._chunk_token[-1])

    def __reduce__(self):
        return TextStore, (self.path,)

    def __len__(self) -> int:
        return self._lists.num_rows

    def pieces(self, begin: int, end: int) -> Pieces:
        """The pieces of tokens [begin, end) of all documents end to end, 0 <= begin < end <= num_tokens."""
        first, last = np.searchsorted(self._chunk_token, (begin, end - 1), side="right") - 1
        pieces = []
        for chunk in range(int(first), int(last) + 1):
            offset, bounds = int(self._chunk_token[chunk]), self._bounds(chunk)
            records = self._lists.chunk_start[chunk] + np.arange(len(bounds) - 1)
            within = max(begin - offset, 0), min(end - offset, int(bounds[-1]))
            pieces.append(Pieces.between(records, bounds, *within))
        return Pieces.concat(pieces)

    def gather(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n documents, end to end: ids uint16 or uint32, offsets [n + 1]."""
        return self._lists.gather(records, starts, lengths)

    def _bounds(self, chunk: int) -> np.ndarray:
        """Offsets of the documents of a record batch, from 0; int64 [rows + 1]."""
        lists = self._lists
        file, slot = lists.files[lists.chunk_file[chunk]], lists.offset_slot[chunk]
        rows = int(np.append(lists.chunk_start, lists.num_rows)[chunk + 1] - lists.chunk_start[chunk])
        bounds = file.offsets[slot : slot + rows + 1].astype(np.int64)
        return bounds - bounds[0]


def open_text_split(dataset_dir: str | Path, split: str, tokenizer: Tokenizer) -> TextStore:
    """The store of one split of a directory that was tokenised with this tokenizer; UserError for any other."""
    directory = split_directory(dataset_dir, split, STEP)
    try:
        described = json.loads((Path(dataset_dir) / TOKENS).read_text())
        name, identity = described["tokenizer"], described["identity"]
    except (OSError, ValueError, KeyError):
        raise UserError(
            f"{dataset_dir}: no {TOKENS} in it, so it holds no text that {STEP} tokenised: of proteins? Then add "
            f"--tokenizer {RESIDUES}"
        ) from None
    if identity != tokenizer.identity:
        raise UserError(
            f"{dataset_dir}: tokenised with {name} ({identity}), and --tokenizer {tokenizer.name} is another one "
            f"({tokenizer.identity}): give --tokenizer {name}, or tokenise again"
        )
    return TextStore(directory)


def describe_tokens(tokenizer: Tokenizer) -> dict:
    """The content of `tokens.json`."""
    return {
        "tokenizer": tokenizer.name,
        "identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
    }
