"""Protein text to token lists, many records at a time: encode, truncate, pad, or concatenate and cut into chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.files.alphabet import BYTE_TO_ID, CLS, EOS, PAD, TOKENS, UNK
from common.files.dataset_writer import TOKEN_FEATURES, arrow_schema
from common.files.records import characters
from common.prepare.duplicates import hash_records

# Bytes that stand for <cls> and <eos> around a text, which is ASCII.
BEGIN, END = b"\x80", b"\x81"
FRAMED_TO_ID = BYTE_TO_ID.copy()
FRAMED_TO_ID[[BEGIN[0], END[0]]] = CLS, EOS
FRAMED_TO_ID = FRAMED_TO_ID.tobytes()
Item = TypeVar("Item")
Result = TypeVar("Result")


class Encoded(NamedTuple):
    """Token lists of N records, and what was met in them (before padding)."""

    rows: pa.RecordBatch  # id: string, input_ids: list<uint8>
    hashes: np.ndarray  # uint64 [N], of the token ids before truncation
    residues: np.ndarray  # int [N], before truncation
    tokens: int
    unknown: int  # characters that are no token
    records_with_unknown: int


def check_tokenizer(name: str) -> None:
    """UserError unless `name` stands for the built-in alphabet: an ESM-2 checkpoint, or a directory with its vocab."""
    if name.startswith("facebook/esm2_"):
        return
    vocab = Path(name).expanduser() / "vocab.txt"
    if not vocab.is_file():
        raise UserError(f"--tokenizer_name {name}: give a facebook/esm2_* name or a directory with ESM-2's vocab.txt")
    if tuple(vocab.read_text(errors="replace").split()) != TOKENS:
        raise UserError(f"--tokenizer_name {name}: vocab.txt does not hold the 33 ESM-2 tokens in their order")


def encode_rows(rows: pa.RecordBatch, max_seq_length: int | None, pad: bool) -> Encoded:
    """`<cls> residues <eos>` of every row (`id`, `text`: ASCII).

    At most max_seq_length tokens: <cls>, the first max_seq_length - 2 residues, <eos>, as tokenizers truncate. With
    `pad`, <pad> up to max_seq_length.
    """
    text = rows.column("text").cast(pa.binary())
    ids, offsets = _token_ids(text)
    hashes, residues = hash_records(ids, offsets), np.diff(offsets) - 2
    if max_seq_length is not None:
        ids, offsets = _token_ids(pc.binary_slice(text, 0, max_seq_length - 2))
    unknown_at = np.flatnonzero(ids == UNK)
    records_with_unknown = len(np.unique(np.searchsorted(offsets, unknown_at, side="right")))
    tokens = len(ids)
    if pad:
        ids, offsets = _pad(ids, offsets, max_seq_length)
    batch = _token_batch(rows.column("id"), ids, offsets)
    return Encoded(batch, hashes, residues, tokens, len(unknown_at), records_with_unknown)


def _token_ids(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """`<cls> residues <eos>` of each of N texts (binary): ids uint8 end to end, and offsets int32 [N + 1] from 0."""
    # Copies of whole rows and one look-up a byte: several times as fast as placing the ends among the ids.
    data, offsets = characters(pc.binary_join_element_wise(BEGIN, text, END, b""))
    raw = data[offsets[0] : offsets[-1]].tobytes().translate(FRAMED_TO_ID)
    return np.frombuffer(raw, np.uint8), offsets - offsets[0]


def _token_batch(names: pa.Array, ids: np.ndarray, offsets: np.ndarray) -> pa.RecordBatch:
    """A record batch in the schema of the token datasets, of ids uint8 end to end and where each record begins."""
    input_ids = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
    return pa.RecordBatch.from_arrays([names, input_ids], schema=arrow_schema(TOKEN_FEATURES))


class Chunker:
    """Concatenates token lists and cuts them into chunks of `length`; ids are chunk-0, chunk-1, ..."""

    def __init__(self, length: int, pad: bool) -> None:
        self.length = length
        self.pad = pad
        self.made = 0
        self.rest = np.empty(0, np.uint8)  # shorter than a chunk

    def add(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The chunks that are now full."""
        tokens = np.concatenate([self.rest, rows.column("input_ids").flatten().to_numpy()])
        full = len(tokens) // self.length
        self.rest = tokens[full * self.length :].copy()
        return self._rows(tokens[: full * self.length], np.arange(full + 1) * self.length)

    def finish(self) -> pa.RecordBatch:
        """What is left: one shorter chunk (padded, if asked for), or none."""
        rest, self.rest = self.rest, np.empty(0, np.uint8)
        offsets = np.array([0, len(rest)] if len(rest) else [0])
        return self._rows(*(_pad(rest, offsets, self.length) if self.pad else (rest, offsets)))

    def _rows(self, tokens: np.ndarray, offsets: np.ndarray) -> pa.RecordBatch:
        count = len(offsets) - 1
        names = pa.array([f"chunk-{self.made + i}" for i in range(count)], pa.string())
        self.made += count
        return _token_batch(names, tokens, offsets)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, stop: Event | None = None
) -> Iterator[Result]:
    """`map` over threads: results in the order of the items, few of them in memory at a time.

    stop: set when no more results are wanted (an error, Ctrl-C, the end), for long calls to look at.
    """
    with ThreadPoolExecutor(workers) as pool:
        running: deque = deque()
        try:
            for item in items:
                running.append(pool.submit(function, item))
                if len(running) > 2 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            if stop is not None:
                stop.set()
            for future in running:
                future.cancel()


def _pad(ids: np.ndarray, offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [sum of lengths] and offsets [N + 1] to ids [N * length] with <pad> after each record."""
    lengths = np.diff(offsets)
    padded = np.full((len(lengths), length), PAD, np.uint8)
    padded[np.arange(length) < lengths[:, None]] = ids  # row by row: the order of `ids`
    return padded.reshape(-1), np.arange(len(lengths) + 1) * length
