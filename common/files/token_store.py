"""Read one tokenised split (`processed/arrow/train`, say): memory-mapped, nothing loaded, nothing indexed per record.

A split is a directory that `datasets.load_from_disk` opens. Its own format is one `list<uint8>` column `input_ids` =
`<cls> residues <eos>`: a record's length and place follow from the Arrow offsets in the file, so opening costs a few
bytes for each record batch and reading costs one copy of the tokens. Datasets of other tools (wider integers,
fixed-size or large lists, trailing `<pad>`) are read too; for those, the lengths without padding are found when
first asked for and kept (4 bytes a record).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.cli import UserError
from common.files import earlier_identity
from common.files.alphabet import PAD, VOCAB_SIZE
from common.files.arrow_lists import ArrowLists, indices_mapping, read_state, split_directory

STEP = "1.tokenize_uniref_csv.py"  # which makes them


class TokenStore:
    """Random access to the token ids of one split. Cheap to fork; pickles as its path.

    path: directory of one split; max_records: use the first that many records only.
    Raises UserError for anything that isn't such a directory. Token ids are checked when they are read.
    """

    def __init__(self, path: str | Path, max_records: int | None = None):
        self.path, self.max_records = Path(path), max_records
        state = read_state(self.path, STEP)
        self._lists = lists = ArrowLists(self.path, state)
        self._is_padded = lists.width > 0 or lists.dtype != np.uint8 or lists.has_masks
        self._mapping = indices_mapping(self.path, state)

        self._num_records = lists.num_rows if self._mapping is None else len(self._mapping)
        if self._num_records == 0:
            raise UserError(f"{self.path}: the dataset is empty")
        if max_records is not None:
            if max_records < 1:
                raise UserError(f"{self.path}: the number of records to use must be at least 1, not {max_records}")
            self._num_records = min(self._num_records, max_records)
        self.fingerprint = f"{state.get('_fingerprint')}-{self._num_records}"

        self._lengths = None  # int32 [rows], -1 where not yet known: padded datasets only
        if not self._is_padded:
            # uint8 rows that another tool padded and stripped of their masks look like ours but for their ends
            first = zip(*lists.locate(self._rows(np.arange(min(self._num_records, 256)))), strict=True)
            ends = [lists.files[file].tokens[begin + length - 1] for file, begin, length in first if length]
            self._is_padded = PAD in ends
        if self._is_padded:
            self._lengths = np.full(lists.num_rows, -1, dtype=np.int32)

    @property
    def earlier_fingerprint(self) -> str:
        """As earlier versions made it."""
        return f"{earlier_identity.fingerprint(self.path, self._lists.num_rows)}-{self._num_records}"

    def __reduce__(self):
        return TokenStore, (self.path, self.max_records)

    def __len__(self) -> int:
        return self._num_records

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens (with `<cls>` and `<eos>`, without padding) int64 [n] of the records int64 [n]."""
        if self._is_padded:
            return self._stripped_lengths(self._rows(indices))
        return self._lists.locate(self._rows(indices))[2]

    def gather(self, indices: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n records, end to end.

        Returns ids uint8 [sum(lengths)] and offsets int64 [n + 1]. Raises UserError for an id that is none of the 33
        tokens and for `<pad>` inside a sequence.
        """
        ids, offsets = self._lists.gather(self._rows(indices), starts, lengths)
        self._check(ids, indices, offsets)
        return ids.astype(np.uint8, copy=False), offsets

    def _check(self, ids: np.ndarray, indices: np.ndarray, offsets: np.ndarray) -> None:
        wrong = (ids >= VOCAB_SIZE) | (ids < 0) | (ids == PAD)
        if wrong.any():
            at = int(wrong.argmax())
            record = int(indices[np.searchsorted(offsets, at, side="right") - 1])
            what = (
                "<pad> inside its sequence" if ids[at] == PAD else f"token id {ids[at]}, ESM-2 has 0-{VOCAB_SIZE - 1}"
            )
            raise UserError(f"{self.path}: record {record}: {what}: tokenise again with the ESM-2 alphabet")

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        """Stored rows of records: the same unless the dataset carries an indices mapping."""
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < self._num_records):
            raise IndexError(f"records are numbered 0 to {self._num_records - 1}")
        return indices if self._mapping is None else self._mapping[indices].astype(np.int64)

    def _stripped_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Lengths without trailing <pad> of stored rows, whole chunks at a time."""
        lists = self._lists
        unknown = rows[self._lengths[rows] < 0]
        for chunk in np.unique(np.searchsorted(lists.chunk_start, unknown, side="right") - 1):
            file = lists.files[lists.chunk_file[chunk]]
            first = lists.chunk_start[chunk]
            last = lists.chunk_start[chunk + 1] if chunk + 1 < len(lists.chunk_start) else lists.num_rows
            if lists.width:
                bounds = np.arange(last - first + 1) * lists.width
            else:
                slot = lists.offset_slot[chunk]
                bounds = file.offsets[slot : slot + last - first + 1].astype(np.int64)
            tokens = file.tokens[lists.token_slot[chunk] + bounds[0] : lists.token_slot[chunk] + bounds[-1]]
            bounds = bounds - bounds[0]
            # one past the last token that is no <pad>, before each row's end
            past = np.concatenate(([0], np.flatnonzero(tokens != PAD) + 1))
            ends = past[np.searchsorted(past, bounds[1:], side="right") - 1]
            self._lengths[first:last] = np.maximum(ends - bounds[:-1], 0)
        return self._lengths[rows].astype(np.int64)


def open_split(dataset_dir: str | Path, split: str, max_records: int | None = None) -> TokenStore:
    """The store of one split ("train", "validation", "test") of a tokenised dataset directory."""
    return TokenStore(split_directory(dataset_dir, split, STEP), max_records)
