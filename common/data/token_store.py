"""Read one tokenised split, for example `processed/arrow/train`: memory-mapped, without an index of records.

A split is a directory that `datasets.load_from_disk` opens. Its own format is one `list<uint8>` column `input_ids` =
`<cls> residues <eos>`, in ESM-2's ids; those of a family with another alphabet are looked up when they are read, and a
record is longer where that one has more tokens around the residues. Data of another alphabet (step 1's `--alphabet`)
say so in `alphabet.json` beside the splits; ids of more than 256 tokens are uint16. Length and place of a record
follow from the Arrow offsets in the file, so opening costs a few bytes for each record batch and reading costs one
copy of the tokens. Datasets of other tools (wider integers, fixed-size or large lists, trailing `<pad>`) are read too;
their lengths without padding are computed on first use and kept (4 bytes a record).
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.cli import UserError, one_line
from common.data import TokenSet
from common.data.alphabet import ESM2, Alphabet, recorded_alphabet
from common.hooks import extra

COLUMN = "input_ids"


class ArrowLists:
    """The lists of token ids of one split, of proteins or text. state: from `read_state`.

    width: of fixed-size lists, else 0; dtype: of the tokens; has_masks: whether there is a column attention_mask.
    chunk_start, chunk_file, offset_slot, token_slot: int64 [chunks], the first row of each record batch, its file, and
    the indices of its first offset and first token in that file's views.
    """

    def __init__(self, path: Path, state: dict):
        self.files = [ArrowFile(file) for file in arrow_files(path, state["_data_files"])]
        if len({file.kind for file in self.files}) > 1:
            raise UserError(f"{path}: its Arrow files differ in the type of {COLUMN}: tokenise again")
        first = self.files[0]
        self.width, self.has_masks, self.dtype = first.width, first.has_masks, first.tokens.dtype
        rows = np.concatenate([file.chunk_rows for file in self.files])
        self.chunk_start = np.cumsum(rows) - rows
        self.chunk_file = np.repeat(np.arange(len(self.files)), [len(file.chunk_rows) for file in self.files])
        self.offset_slot = np.concatenate([file.offset_slot for file in self.files])
        self.token_slot = np.concatenate([file.token_slot for file in self.files])
        self.num_rows = int(rows.sum())

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """File, index of the first token in that file's `tokens` and stored length of each row, int64 [n] each."""
        chunk = np.searchsorted(self.chunk_start, rows, side="right") - 1
        local, file_of = rows - self.chunk_start[chunk], self.chunk_file[chunk]
        if self.width:
            return file_of, self.token_slot[chunk] + local * self.width, np.full(len(rows), self.width)
        slot = self.offset_slot[chunk] + local
        begin, length = np.empty_like(rows), np.empty_like(rows)
        for number in np.unique(file_of):
            here = np.flatnonzero(file_of == number)
            offsets = self.files[number].offsets
            first = offsets[slot[here]]
            begin[here], length[here] = first, offsets[slot[here] + 1] - first
        return file_of, self.token_slot[chunk] + begin, length

    def gather(self, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n rows, end to end: ids `dtype`, and offsets int64 [n + 1]."""
        files, begin, stored = self.locate(rows)
        assert np.all((starts >= 0) & (lengths >= 0) & (starts + lengths <= stored)), "crop outside its record"
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        ids = np.empty(offsets[-1], dtype=self.dtype)
        bounds, tokens = offsets.tolist(), [file.tokens for file in self.files]
        for i, (file, source) in enumerate(zip(files.tolist(), (begin + starts).tolist(), strict=True)):
            ids[bounds[i] : bounds[i + 1]] = tokens[file][source : source + bounds[i + 1] - bounds[i]]
        return ids, offsets


def split_directory(dataset_dir: str | Path, split: str, step: str) -> Path:
    """The directory of one split ("train", "validation", "test") of a tokenised dataset directory.

    step: the script that writes such, for messages."""
    directory = Path(dataset_dir)
    if not directory.is_dir():
        if directory.exists():
            raise UserError(f"{directory}: a file, not the directory that {step} writes: train on it by --dataset")
        raise UserError(f"{directory}: no such directory: tokenise first ({step})")
    if (directory / "state.json").is_file():
        if message := extra().untokenised(directory):
            raise UserError(f"{directory}: {message}")
        raise UserError(f"{directory}: is one split: give the directory that holds train, validation and test")
    if not (directory / split).is_dir():
        raise UserError(
            f"{directory}: no split {split}: it holds {', '.join(_splits(directory)) or 'no split at all'}"
        )
    return directory / split


def _splits(directory: Path) -> list[str]:
    return sorted(child.parent.name for child in directory.glob("*/state.json"))


def read_state(directory: Path, step: str) -> dict:
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise UserError(f"{directory}: {what}: tokenise first ({step})")
    state_file = directory / "state.json"
    if not state_file.is_file():
        if splits := _splits(directory):
            raise UserError(
                f"{directory}: holds the splits {', '.join(splits)}: name one, {directory / splits[0]} say"
            )
        fault = "Arrow files but no state.json" if any(directory.glob("*.arrow")) else "no Arrow files"
        raise UserError(f"{directory}: {fault}: not a directory that datasets' save_to_disk completed: tokenise first")
    try:
        return {"_data_files": [], **json.loads(state_file.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise UserError(f"{state_file}: not a dataset's state ({one_line(error)}): tokenise again") from error


def arrow_files(directory: Path, entries: list[dict]) -> list[Path]:
    files = [directory / entry["filename"] for entry in entries]
    if not files:
        raise UserError(f"{directory}: the dataset is empty: its state.json lists no Arrow files")
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: listed in state.json but not there: tokenise or copy the dataset again")
    return files


def indices_mapping(directory: Path, state: dict) -> np.ndarray | None:
    """Rows in the order of records, uint64 [records]: written beside the table by datasets 1.x after a select."""
    entries = state.get("_indices_data_files")
    if not entries:
        return None
    tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in arrow_files(directory, entries)]
    return pa.concat_tables(tables).column("indices").to_numpy()


class ArrowFile:
    """The `input_ids` column of one memory-mapped Arrow stream, as NumPy views of the file and indices into them.

    tokens: the whole file as the values' type; offsets: the whole file as the offsets' type; width: of fixed-size
    lists, else 0; chunk_rows, offset_slot, token_slot: int64 [chunks], rows of a record batch, and the indices in the
    views of its first offset and of the token that offset 0 stands for.
    """

    def __init__(self, path: Path):
        try:
            with open(path, "rb") as file:  # an empty file cannot be mapped
                size = os.fstat(file.fileno()).st_size
                # Not pyarrow's memory_map, reading from which loads the whole file.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            raw = pa.py_buffer(mapped)  # the views below keep it alive
            _advise(mapped, "MADV_RANDOM")  # no readahead: one page of each record batch is read
            schema = pa.ipc.open_stream(raw).schema
            self.kind = _type_of_lists(path, schema)
            self.width = self.kind.list_size if pa.types.is_fixed_size_list(self.kind) else 0
            self.has_masks = "attention_mask" in schema.names
            self._token_type = np.dtype(self.kind.value_type.to_pandas_dtype())
            self._offset_type = np.dtype(np.int64 if pa.types.is_large_list(self.kind) else np.int32)
            options = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(COLUMN)])
            batches = pa.ipc.open_stream(raw, options=options)
            chunks = [self._describe(path, raw, batch.column(0)) for batch in batches if len(batch)]
        except pa.ArrowInvalid as error:
            raise UserError(f"{path}: no complete Arrow stream: tokenise again ({one_line(error)})") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise UserError(f"{path}: cut short: tokenise again ({one_line(error)})") from error
        _advise(mapped, "MADV_NORMAL")
        self.chunk_rows, self.offset_slot, self.token_slot = np.array(chunks, dtype=np.int64).reshape(-1, 3).T
        types = self._token_type, self._offset_type
        self.tokens, self.offsets = (np.frombuffer(raw, each, raw.size // each.itemsize) for each in types)

    def _describe(self, path: Path, raw: pa.Buffer, lists: pa.Array) -> tuple[int, int, int]:
        values = lists.values
        if lists.null_count or values.null_count:
            raise UserError(f"{path}: {COLUMN} holds nulls: tokenise again")
        if len(values) == 0:  # only empty lists: no buffer to point to
            return len(lists), self._slot(path, raw, lists, self._offset_type), 0
        token_slot = self._slot(path, raw, values, self._token_type)
        if self.width:
            return len(lists), 0, token_slot + lists.offset * self.width
        return len(lists), self._slot(path, raw, lists, self._offset_type), token_slot

    @staticmethod
    def _slot(path: Path, raw: pa.Buffer, array: pa.Array, dtype: np.dtype) -> int:
        """Where the array's offsets (of a list) or values begin in the file, counted in elements."""
        position = array.buffers()[1].address - raw.address
        if not 0 <= position < raw.size or position % dtype.itemsize:
            raise UserError(f"{path}: compressed Arrow: save it with datasets' save_to_disk")
        return position // dtype.itemsize + array.offset


def _type_of_lists(path: Path, schema: pa.Schema) -> Any:
    if COLUMN not in schema.names:
        raise UserError(f"{path}: no column {COLUMN}: {extra().untokenised(path.parent, schema.names)}")
    kind, types = schema.field(COLUMN).type, pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_integer(kind.value_type):
        raise UserError(f"{path}: {COLUMN} is {kind}, not a list of integers")
    return kind


def _advise(mapped: mmap.mmap | bytes, advice: str) -> None:
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, advice):
        mapped.madvise(getattr(mmap, advice))


STEP = "1.tokenize_uniref_csv.py"  # the script that writes splits
CHAINS = "_chains"  # in state.json: whether records may have several chains
EXTENDS = "_extends"  # in state.json: fingerprints of the splits whose records this one begins with (prepare.extend)


class TokenStore:
    """Random access to the token ids of one split. Cheap to fork; pickles as its arguments.

    path: directory of one split; tokens: of the model's family; max_records: use only the first ones.
    UserError for any other directory. Token ids are checked when they are read, and translated to those of `tokens`.
    """

    def __init__(self, path: str | Path, tokens: TokenSet, max_records: int | None = None):
        self.path, self.tokens, self.max_records = Path(path), tokens, max_records
        state = read_state(self.path, STEP)
        self._check_alphabet()
        self._more = tokens.num_special - tokens.stored.num_special if isinstance(tokens, Alphabet) else 0
        self._lists = lists = ArrowLists(self.path, state)
        self._mapping = indices_mapping(self.path, state)

        self._num_records = lists.num_rows if self._mapping is None else len(self._mapping)
        if self._num_records == 0:
            raise UserError(f"{self.path}: the dataset is empty")
        if max_records is not None:
            if max_records < 1:
                raise UserError(f"{self.path}: the number of records to use must be at least 1, not {max_records}")
            self._num_records = min(self._num_records, max_records)
        self.fingerprint = f"{state.get('_fingerprint')}-{self._num_records}"
        self.has_chains = bool(state.get(CHAINS))
        self.extends = tuple(state.get(EXTENDS, ())) if max_records is None else ()

        is_padded = lists.width > 0 or lists.dtype != tokens.stored.dtype or lists.has_masks
        if not is_padded:
            # uint8 rows that another tool padded, without masks, differ from ours in their last tokens only
            first = zip(*lists.locate(self._rows(np.arange(min(self._num_records, 256)))), strict=True)
            ends = [lists.files[file].tokens[begin + length - 1] for file, begin, length in first if length]
            is_padded = tokens.stored.pad in ends
        # Of padded datasets only: int32 [rows], -1 where not yet known.
        self._lengths = np.full(lists.num_rows, -1, dtype=np.int32) if is_padded else None

    def __reduce__(self):
        return type(self), (self.path, self.tokens, self.max_records)

    def __len__(self) -> int:
        return self._num_records

    def lengths(self, records: np.ndarray) -> np.ndarray:
        """Tokens (with those around the residues, without padding) int64 [n] of the records int64 [n]."""
        rows = self._rows(records)
        lengths = self._lists.locate(rows)[2] if self._lengths is None else self._stripped_lengths(self._lengths, rows)
        return lengths + self._more if self._more else lengths

    def gather(self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [start, start + length) of each of n records, end to end.

        Returns ids, `tokens.dtype` [sum(lengths)], and offsets int64 [n + 1]. Raises UserError for an id outside the
        vocabulary, for `<pad>` inside a sequence, and for data in another alphabet than that of prepared data.
        """
        if self._more:
            return self._gather_longer(records, starts, lengths)
        ids, offsets = self._gather_stored(records, starts, lengths)
        if isinstance(self.tokens, Alphabet) and (prepared := self.tokens.prepared) is not None:
            first = np.flatnonzero((starts == 0) & (lengths > 0))
            self._check_end(ids[offsets[first]], records[first], prepared.begin, "begins", "<cls>")
        return self.tokens.of_stored(ids), offsets

    def _gather_stored(
        self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`gather` in the ids of the stored alphabet."""
        ids, offsets = self._lists.gather(self._rows(records), starts, lengths)
        self._check(ids, records, offsets)
        return ids.astype(self.tokens.stored.dtype, copy=False), offsets

    def _gather_longer(
        self, records: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`gather` for an alphabet with more tokens around the residues than the stored one.

        Token p of such a sequence is stored as p - (tokens after `begin`); those that are not stored lie in between.
        """
        tokens, whole = self.tokens, self.lengths(records)
        assert isinstance(tokens, Alphabet)
        assert np.all((starts >= 0) & (lengths >= 0) & (starts + lengths <= whole)), "crop outside its record"
        inner, last = len(tokens.after_begin), whole - self._more - 1  # last: index of the last stored token
        for n in np.flatnonzero(last < 1):
            raise UserError(f"{self.path}: record {records[n]}: has no <cls> and <eos>: tokenise again ({STEP})")
        from_stored, to_stored = (np.clip(at - inner, 0, last) for at in (starts, starts + lengths - 1))
        taken = np.where(lengths > 0, to_stored - from_stored + 1, 0)
        stored, bounds = self._gather_stored(records, from_stored, taken)
        has_begin, has_end = (np.flatnonzero((taken > 0) & of) for of in (from_stored == 0, to_stored == last))
        self._check_end(stored[bounds[has_begin]], records[has_begin], tokens.stored.begin, "begins", "<cls>")
        self._check_end(stored[bounds[has_end + 1] - 1], records[has_end], tokens.stored.end, "ends", "<eos>")

        offsets = np.append(0, np.cumsum(lengths))
        position = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)  # of each token in its sequence
        place = np.clip(position - inner, 0, np.repeat(last, lengths)) - np.repeat(from_stored, lengths)
        ids = tokens.of_stored(stored[place + np.repeat(bounds[:-1], lengths)])
        for n, token in enumerate(tokens.after_begin, 1):
            ids[position == n] = token
        behind = np.repeat(whole, lengths) - position  # 1 for the last token
        for n, token in enumerate(reversed(tokens.before_end), 2):
            ids[behind == n] = token
        return ids, offsets

    def _check_end(self, ids: np.ndarray, records: np.ndarray, expected: int, how: str, name: str) -> None:
        """UserError unless the first or last token of each record is that of ESM-2's alphabet."""
        for n in np.flatnonzero(ids != expected):
            raise UserError(
                f"{self.path}: record {records[n]}: {how} with token id {ids[n]}, not with ESM-2's {name}, "
                f"{expected}; ids are translated from ESM-2's: tokenise again ({STEP})"
            )

    def _check_alphabet(self) -> None:
        """UserError unless the splits are in the alphabet that `tokens` are, or are translated from."""
        stored = self.tokens.stored
        if not isinstance(stored, Alphabet) or not stored.name:
            return
        recorded = recorded_alphabet(self.path.parent)
        if recorded is None and stored.name == ESM2:
            return
        if recorded != stored:
            name = recorded.name if recorded else ESM2
            other = " of this name" if name == stored.name else ""
            raise UserError(
                f"{self.path}: tokenised in the alphabet {name}, and the model's is another one{other}, "
                f"{stored.name}: tokenise in the model's, or take a model of this one"
            )

    def _check(self, ids: np.ndarray, records: np.ndarray, offsets: np.ndarray) -> None:
        size, pad = self.tokens.stored.vocab_size, self.tokens.stored.pad
        wrong = (ids >= size) | (ids < 0) | (ids == pad)
        if wrong.any():
            position = int(wrong.argmax())
            record = int(records[np.searchsorted(offsets, position, side="right") - 1])
            token = ids[position]
            what = "<pad> inside its sequence" if token == pad else f"token id {token}, the model has 0-{size - 1}"
            raise UserError(f"{self.path}: record {record}: {what}: tokenise again with the model's alphabet")

    def _rows(self, records: np.ndarray) -> np.ndarray:
        """Stored rows of records: the same unless the dataset carries an indices mapping."""
        records = np.asarray(records, dtype=np.int64)
        if len(records) and not (records.min() >= 0 and records.max() < self._num_records):
            raise IndexError(f"records are numbered 0 to {self._num_records - 1}")
        return records if self._mapping is None else self._mapping[records].astype(np.int64)

    def _stripped_lengths(self, known: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Lengths without trailing <pad> of stored rows, whole chunks at a time; kept in `known`."""
        lists = self._lists
        unknown = rows[known[rows] < 0]
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
            # one past the last token other than <pad> before each row's end
            past = np.concatenate(([0], np.flatnonzero(tokens != self.tokens.stored.pad) + 1))
            ends = past[np.searchsorted(past, bounds[1:], side="right") - 1]
            known[first:last] = np.maximum(ends - bounds[:-1], 0)
        return known[rows].astype(np.int64)


def open_split(dataset_dir: str | Path, split: str, tokens: TokenSet, max_records: int | None = None) -> TokenStore:
    """The store of one split ("train", "validation", "test") of a tokenised dataset directory."""
    return TokenStore(split_directory(dataset_dir, split, STEP), tokens, max_records)


def open_for_model(
    dataset_dir: str | Path, split: str, tokens: TokenSet, max_records: int | None = None
) -> TokenStore:
    """`open_split`, as a model with these tokens sees its records. UserError if they may have several chains, and it
    reads single ones."""
    if tokens.chains == "linker":
        return extra().chains().LinkedStore(split_directory(dataset_dir, split, STEP), tokens, max_records)
    store = open_split(dataset_dir, split, tokens, max_records)
    if store.has_chains and not tokens.chains:
        raise UserError(
            f"{store.path}: its records may have several chains: say what an encoder reads between them, --chains "
            "separator or --chains linker; decoders and sets need a record of each chain"
        )
    return store
