"""Tokenise CSV files in parallel threads, each to pieces (dataset_writer.py) for every split.

A directory of pieces gets its final name when it is complete, and is noted in the build's journal: after a kill, only
the files in progress are read again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.data.counter_rng import BYTES, GAMMA, WORD, derive_key, hash_counters, mix
from common.files.safe_files import sync
from common.models.esm2.alphabet import BYTE_TO_ID, CHAIN_END, CLS, EOS, ESM2_TOKENS, TOKENS
from extras.prepare.dataset_writer import Piece, PieceWriters, arrow_schema, features_of, kept_rows, read_pieces
from extras.prepare.output_directory import Build
from extras.prepare.sources.records import characters, hash_names
from extras.prepare.sources.residues import Cleaner
from extras.prepare.splits import SPLITS

# A record's hash of its token ids, its length before truncation, and its split (an index into SPLITS).
KEY = np.dtype([("hash", "<u8"), ("residues", "<u4"), ("split", "<u4")])


HASHED_BYTES = 1 << 19  # at a time: they stay in the processor's cache


def hash_records(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """uint64 [N] hashes of N non-empty records: concatenated token ids [T], offsets int [N + 1] from 0.

    The sum over a record of the hashes of (eight bytes of ids, their position), mixed with its length.
    """
    ids, offsets = ids.view(np.uint8), offsets.astype(np.int64) * ids.itemsize
    firsts = np.searchsorted(offsets, np.arange(0, offsets[-1], HASHED_BYTES))
    bounds = np.unique(np.append(firsts, len(offsets) - 1)).tolist()
    parts = [_hash(ids[offsets[a] : offsets[b]], offsets[a : b + 1] - offsets[a]) for a, b in pairwise(bounds)]
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _hash(ids: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    lengths = np.diff(offsets)
    counts = (lengths + 7) // 8  # of words
    ends = np.cumsum(counts)
    begins = ends - counts
    places = np.arange(ends[-1]) - np.repeat(begins, counts)
    padded = np.concatenate((ids, np.zeros(8, np.uint8)))
    overlapping = np.ndarray(len(padded) - 7, "<u8", padded, strides=(1,))  # a word at every byte
    words = overlapping[np.repeat(offsets[:-1], counts) + 8 * places]
    beyond = (8 * counts - lengths).astype(np.uint64)  # bytes of a last word that are the next record's
    words[ends - 1] &= np.uint64(WORD) >> (np.uint64(8) * beyond)
    words ^= hash_counters(derive_key(BYTES), np.arange(counts.max()))[places]
    return mix(np.add.reduceat(mix(words), begins) + lengths.astype(np.uint64) * np.uint64(GAMMA))


# Bytes for <cls> and <eos> around a text, which is ASCII.
BEGIN, END = b"\x80", b"\x81"
FRAMED_TO_ID = BYTE_TO_ID.copy()
FRAMED_TO_ID[[BEGIN[0], END[0], ord(":")]] = CLS, EOS, CHAIN_END  # of `:` only where chains are kept
FRAMED_TO_ID = FRAMED_TO_ID.tobytes()
Item = TypeVar("Item")
Result = TypeVar("Result")


class Encoded(NamedTuple):
    """Token lists of N records, and counts before padding."""

    rows: pa.RecordBatch  # id: string, input_ids: list<uint8> or list<uint16>
    hashes: np.ndarray  # uint64 [N], of the token ids before truncation
    residues: np.ndarray  # int [N], before truncation
    tokens: int
    unknown: int  # characters without a token
    records_with_unknown: int


def check_tokenizer(name: str) -> None:
    """UserError unless `name` has the built-in alphabet: an ESM-2 checkpoint, or a directory with its vocab.txt."""
    if name.startswith("facebook/esm2_"):
        return
    vocab = Path(name).expanduser() / "vocab.txt"
    if not vocab.is_file():
        raise UserError(f"--tokenizer_name {name}: give a facebook/esm2_* name or a directory with ESM-2's vocab.txt")
    if tuple(vocab.read_text(errors="replace").split()) != TOKENS:
        raise UserError(f"--tokenizer_name {name}: vocab.txt does not hold the 33 ESM-2 tokens in their order")


def encode_rows(
    rows: pa.RecordBatch, max_seq_length: int | None, pad: bool, alphabet: Alphabet = ESM2_TOKENS
) -> Encoded:
    """`<cls> residues <eos>` of every row (`id`, `text`: ASCII).

    At most max_seq_length tokens: <cls>, the first max_seq_length - 2 residues, <eos>, as tokenizers truncate. With
    `pad`, <pad> up to max_seq_length.
    """
    text = rows.column("text").cast(pa.binary())
    ids, offsets = _token_ids(text, alphabet)
    hashes, residues = hash_records(ids, offsets), np.diff(offsets) - 2
    if max_seq_length is not None:
        cut = pc.binary_slice(text, 0, (max_seq_length - 2) * alphabet.width)
        ids, offsets = _token_ids(cut, alphabet)
    unknown_at = np.flatnonzero(ids == alphabet.unknown)
    records_with_unknown = len(np.unique(np.searchsorted(offsets, unknown_at, side="right")))
    tokens = len(ids)
    if pad:
        ids, offsets = _pad(ids, offsets, max_seq_length, alphabet)
    batch = _token_batch(rows.column("id"), ids, offsets)
    return Encoded(batch, hashes, residues, tokens, len(unknown_at), records_with_unknown)


def _token_ids(text: pa.Array, alphabet: Alphabet) -> tuple[np.ndarray, np.ndarray]:
    """`<cls> residues <eos>` of N texts (binary): concatenated ids, and offsets int [N + 1] from 0."""
    if alphabet != ESM2_TOKENS:
        return alphabet.encode_many(*characters(text))
    # Joining whole rows and translating bytes is several times as fast as inserting the ends among the ids.
    data, offsets = characters(pc.binary_join_element_wise(BEGIN, text, END, b""))
    raw = data[offsets[0] : offsets[-1]].tobytes().translate(FRAMED_TO_ID)
    return np.frombuffer(raw, np.uint8), offsets - offsets[0]


def _token_batch(names: pa.Array, ids: np.ndarray, offsets: np.ndarray) -> pa.RecordBatch:
    """A record batch in the schema of the token datasets, of concatenated ids and their offsets."""
    input_ids = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(ids))
    return pa.RecordBatch.from_arrays([names, input_ids], schema=arrow_schema(features_of(ids.dtype)))


class Chunker:
    """Concatenates token lists and cuts them into chunks of `length`; ids are chunk-0, chunk-1, ..."""

    def __init__(self, length: int, pad: bool, alphabet: Alphabet = ESM2_TOKENS) -> None:
        self.length = length
        self.pad = pad
        self.made = 0
        self.alphabet = alphabet
        self.rest = np.empty(0, alphabet.dtype)  # shorter than a chunk

    def add(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The chunks that are now full."""
        tokens = np.concatenate([self.rest, rows.column("input_ids").flatten().to_numpy()])
        full = len(tokens) // self.length
        self.rest = tokens[full * self.length :].copy()
        return self._rows(tokens[: full * self.length], np.arange(full + 1) * self.length)

    def finish(self) -> pa.RecordBatch:
        """The last, shorter chunk (padded if `pad`), or none."""
        rest, self.rest = self.rest, np.empty(0, self.alphabet.dtype)
        offsets = np.array([0, len(rest)] if len(rest) else [0])
        return self._rows(*(_pad(rest, offsets, self.length, self.alphabet) if self.pad else (rest, offsets)))

    def _rows(self, tokens: np.ndarray, offsets: np.ndarray) -> pa.RecordBatch:
        count = len(offsets) - 1
        names = pa.array([f"chunk-{self.made + i}" for i in range(count)], pa.string())
        self.made += count
        return _token_batch(names, tokens, offsets)


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, stop: Event | None = None
) -> Iterator[Result]:
    """`map` over threads: results in the order of the items, with few of them in memory.

    stop: set at an error, Ctrl-C or the end, so that long calls can end early.
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


def _pad(ids: np.ndarray, offsets: np.ndarray, length: int, alphabet: Alphabet) -> tuple[np.ndarray, np.ndarray]:
    """Ids [sum of lengths] and offsets [N + 1] to ids [N * length] with <pad> after each record."""
    lengths = np.diff(offsets)
    padded = np.full((len(lengths), length), alphabet.pad, ids.dtype)
    padded[np.arange(length) < lengths[:, None]] = ids  # row by row, as `ids`
    return padded.reshape(-1), np.arange(len(lengths) + 1) * length


CLUSTER = "cluster"  # column of rows whose input names their clusters
Encode = Callable[[pa.RecordBatch], Encoded]
Progress = Callable[[int, int], None]
Read = Callable[[Path, Cleaner], Iterator[pa.RecordBatch]]
KEYS, CLUSTERS = "keys", "clusters"  # files beside the pieces of an input file: KEY, and the cluster's hash "<u8"
WHOLE = "records"  # name of the pieces of records that have no split yet


def directory_name(number: int) -> str:
    """Name of the directory of an input file's pieces."""
    return f"file-{number:05d}"


class FileEncoder:
    """Tokenises files in parallel threads.

    build: whose journal notes each file, with pieces below `root`; encode: rows to token lists; read: `read_rows`;
    cleaner: of a path, for its texts; workers: threads in total, shared by up to `files` files at a time; progress:
    called with the number of new records and the total number of tokens.
    """

    def __init__(
        self,
        build: Build,
        root: Path,
        encode: Encode,
        read: Read,
        cleaner: Callable[[Path], Cleaner],
        workers: int,
        files: int,
        progress: Progress,
    ):
        self.build, self.root, self.encode, self.read, self.progress = build, root, encode, read, progress
        self.cleaner = cleaner
        self.at_once = max(1, min(workers, files))
        self.threads_a_file = workers // self.at_once
        self.lock, self.stop = Lock(), Event()
        self.tokens = 0

    def run(self, files: Iterable[tuple[int, Path, np.ndarray | None]]) -> Iterator[dict]:
        """The result of `_make` for every (number, file, labels), in order."""
        return in_order(self._note, files, self.at_once, self.stop)

    def _note(self, item: tuple[int, Path, np.ndarray | None]) -> dict | None:
        number, path, labels = item
        key = f"encoded {number}"
        result = self.build.done(key)
        if result is not None:
            self._advance(result.get("records", 0), result["tokens"])  # none in a build of an earlier version
            return result
        try:
            result = self._make(path, labels, number)
        except BaseException:
            self.stop.set()
            raise
        if result is not None:
            with self.lock:
                self.build.note(key, result)
        return result

    def _make(self, path: Path, labels: np.ndarray | None, number: int) -> dict | None:
        """Pieces by split name, or of WHOLE, and counts. None if stopped.

        labels: the split of every record, uint8 [records]: an index into SPLITS, or UNUSED; None: decided later.
        """
        writers = PieceWriters(self.root, directory_name(number))
        counts = {"records": 0, "tokens": 0, "unknown": 0, "records_with_unknown": 0}
        clustered = None  # records with a cluster, where there is a column of them
        cleaner = self.cleaner(path)
        blocks = in_order(self._encode_block, _labelled(path, labels, self.read(path, cleaner)), self.threads_a_file)
        with open(writers.part / KEYS, "wb") as file, open(writers.part / CLUSTERS, "wb") as clusters:
            for block in blocks:
                if self.stop.is_set():
                    return None
                block.keys.tofile(file)
                block.clusters.tofile(clusters)
                if block.clustered is not None:
                    clustered = (clustered or 0) + block.clustered
                counts["records"] += block.records
                for name, part in block.parts:
                    writers[name].write(part.rows)
                    for count in ("tokens", "unknown", "records_with_unknown"):
                        counts[count] += getattr(part, count)
                self._advance(block.records, sum(part.tokens for _, part in block.parts))
            sync(file)
            sync(clusters)
        said = {"changes": cleaner.changes.state, "bad": cleaner.bad_records.state, "clustered": clustered}
        return counts | said | {"pieces": writers.close()}

    def _encode_block(self, item: tuple[pa.RecordBatch, np.ndarray | None]) -> _Block:
        rows, labels = item
        if labels is None:
            encoded = self.encode(rows)
            keys = np.zeros(rows.num_rows, KEY)
            keys["hash"], keys["residues"] = encoded.hashes, encoded.residues
            return _Block(rows.num_rows, [(WHOLE, encoded)], keys, *_clusters(rows))
        keys = np.zeros(len(labels), KEY)
        keys["split"] = labels
        parts = []
        for split in np.unique(labels[labels < len(SPLITS)]):
            mask = labels == split
            part = self.encode(rows.filter(pa.array(mask)))
            keys["hash"][mask], keys["residues"][mask] = part.hashes, part.residues
            parts.append((SPLITS[split], part))
        return _Block(len(labels), parts, keys[labels < len(SPLITS)], np.empty(0, np.uint64), None)

    def _advance(self, records: int, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens
            self.progress(records, self.tokens)


class _Block(NamedTuple):
    """Encoded rows: their number, the tokens by split, KEY of all used rows in order, and `_clusters`."""

    records: int
    parts: list[tuple[str, Encoded]]
    keys: np.ndarray
    clusters: np.ndarray
    clustered: int | None


def _clusters(rows: pa.RecordBatch) -> tuple[np.ndarray, int | None]:
    """Hashes of the rows' clusters, uint64 [n], and how many have one; a row without is a cluster with all rows of its
    id. Without a column of clusters: (empty, None)."""
    if CLUSTER not in rows.schema.names:
        return np.empty(0, np.uint64), None
    column = rows.column(CLUSTER)
    return hash_names(pc.coalesce(column, rows.column("id"))), rows.num_rows - column.null_count


def split_pieces(made: dict, labels: np.ndarray, root: Path, scratch: Path, number: int) -> dict[str, list[Piece]]:
    """The pieces by split of an input file that was encoded before its splits were known, and its KEYS, in `scratch`.

    made: of `FileEncoder`, below `root`; labels: as there. The same bytes as if they had been known.
    """
    writers = PieceWriters(scratch, directory_name(number))
    keys = np.fromfile(root / directory_name(number) / KEYS, KEY)
    assert len(keys) == len(labels)
    keys["split"] = labels
    with open(writers.part / KEYS, "wb") as file:
        keys[labels < len(SPLITS)].tofile(file)
        sync(file)
    first = 0
    for rows in read_pieces([Piece(*piece) for piece in made["pieces"].get(WHOLE, ())], root):
        of_rows = labels[first : first + rows.num_rows]
        first += rows.num_rows
        for split in np.unique(of_rows[of_rows < len(SPLITS)]):
            writers[SPLITS[split]].write(kept_rows(rows, of_rows == split))
    return writers.close()


def usable_threads(requested: int) -> int:
    """At most one thread a processor: more only take memory."""
    return max(1, min(requested, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))


def _labelled(
    path: Path, labels: np.ndarray | None, blocks: Iterator[pa.RecordBatch]
) -> Iterator[tuple[pa.RecordBatch, np.ndarray | None]]:
    """Blocks of rows with their labels, if there are any."""
    if labels is None:
        for rows in blocks:
            yield rows, None
        return
    first = 0
    for rows in blocks:
        last = first + rows.num_rows
        if last <= len(labels):
            yield rows, labels[first:last]
        first = last
    if first != len(labels):
        raise UserError(f"{path}: changed while it was read: start again when it is complete")
