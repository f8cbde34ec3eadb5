"""Tokenise CSV files in parallel, each into pieces of its own for every split; and make the splits of the pieces.

A piece directory appears under its name when it is complete, and is noted: after a kill, only the files that were
being worked on are read again. A piece that is large enough becomes a shard by being renamed; runs of small ones are
copied together. Which is which depends on their sizes alone. Stopped at any moment and called again, `assemble` goes
on with what is left.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.cli import UserError
from common.files.alphabet import BYTE_TO_ID, CLS, EOS, PAD, TOKENS, UNK
from common.files.json_files import sync, sync_directory
from extras.prepare.dataset_writer import (
    SHARD_BYTES,
    TOKEN_FEATURES,
    ShardWriter,
    arrow_schema,
    shard_name,
    write_dataset_files,
)
from extras.prepare.duplicates import KEY, hash_records
from extras.prepare.output_directory import Build
from extras.prepare.splits import SPLITS
from extras.sources.records import characters

# Protein text to token lists, many records at a time: encode, truncate, pad, or concatenate and cut into chunks.

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


Encode = Callable[[pa.RecordBatch], Encoded]
Progress = Callable[[int, int], None]
Read = Callable[[Path], Iterator[pa.RecordBatch]]
SMALL_BYTES = 64 << 20
KEYS = "keys"  # beside the pieces of a file: the KEY of each of its records


def directory_name(number: int) -> str:
    """Of the pieces of a file, below the build's scratch directory."""
    return f"file-{number:05d}"


class Piece(NamedTuple):
    """An Arrow stream file; path: below the directory that holds the pieces."""

    path: str
    rows: int
    bytes: int


class FileEncoder:
    """Tokenises one file a call; calls may run in several threads.

    encode: rows to token lists; read: `read_rows`, of a path; workers: threads in all, of which each of `files` at
    work has its share; progress: called with the records just done and the tokens done in all.
    """

    def __init__(self, build: Build, encode: Encode, read: Read, workers: int, files: int, progress: Progress):
        self.build, self.encode, self.read, self.progress = build, encode, read, progress
        self.at_once = min(workers, files)
        self.threads_a_file = workers // self.at_once
        self.lock, self.stop = Lock(), Event()
        self.tokens = 0

    def run(self, files: Iterable[tuple[Path, np.ndarray]]) -> Iterator[dict]:
        """What `_make` returns for every (file, labels), in order."""
        items = ((number, *item) for number, item in enumerate(files))
        return in_order(self._note, items, self.at_once, self.stop)

    def _note(self, item: tuple[int, Path, np.ndarray]) -> dict | None:
        number, path, labels = item
        key = f"encoded {number}"
        found = self.build.done(key)
        if found is not None:
            self._advance(len(labels), found["tokens"])
            return found
        try:
            found = self._make(path, labels, self.build.scratch / directory_name(number))
        except BaseException:
            self.stop.set()
            raise
        if found is not None:
            with self.lock:
                self.build.note(key, found)
        return found

    def _make(self, path: Path, labels: np.ndarray, directory: Path) -> dict | None:
        """Pieces of the splits (by name), and counts. None when told to stop.

        labels: the split of every record, uint8 [records]: an index into SPLITS, or beyond for none.
        """
        part = directory.with_suffix(".part")
        for left in (part, directory):
            shutil.rmtree(left, ignore_errors=True)
        writers = [ShardWriter(part / split, arrow_schema(TOKEN_FEATURES)) for split in SPLITS]
        counts = {"tokens": 0, "unknown": 0, "records_with_unknown": 0}
        blocks = in_order(self._encode_block, _labelled(path, labels, self.read), self.threads_a_file)
        with open(part / KEYS, "wb") as file:
            for rows, encoded, keys in blocks:
                if self.stop.is_set():
                    return None
                keys.tofile(file)
                for split, found in encoded:
                    writers[split].write(found.rows)
                    counts["tokens"] += found.tokens
                    counts["unknown"] += found.unknown
                    counts["records_with_unknown"] += found.records_with_unknown
                self._advance(rows, sum(found.tokens for _, found in encoded))
            sync(file)
        for writer in writers:
            writer.end()
        part.rename(directory)
        sync_directory(directory.parent)
        pieces = {
            split: [Piece(f"{directory.name}/{split}/{shard.name}", *sizes) for shard, *sizes in writer.ended]
            for split, writer in zip(SPLITS, writers, strict=True)
        }
        return counts | {"pieces": pieces}

    def _encode_block(
        self, item: tuple[pa.RecordBatch, np.ndarray]
    ) -> tuple[int, list[tuple[int, Encoded]], np.ndarray]:
        """Records of a block, what each split has of them, and KEY of all that are in a split, in their order."""
        rows, labels = item
        keys = np.zeros(len(labels), KEY)
        keys["split"] = labels
        encoded = []
        for split in np.unique(labels[labels < len(SPLITS)]):
            mask = labels == split
            found = self.encode(rows.filter(pa.array(mask)))
            keys["hash"][mask], keys["residues"][mask] = found.hashes, found.residues
            encoded.append((split, found))
        return len(labels), encoded, keys[labels < len(SPLITS)]

    def _advance(self, records: int, tokens: int) -> None:
        with self.lock:
            self.tokens += tokens
            self.progress(records, self.tokens)


def usable_threads(asked: int) -> int:
    """More threads than processors only take memory."""
    return max(1, min(asked, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))


def _labelled(path: Path, labels: np.ndarray, read: Read) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Blocks of rows with their labels."""
    first = 0
    for rows in read(path):
        last = first + rows.num_rows
        if last <= len(labels):
            yield rows, labels[first:last]
        first = last
    if first != len(labels):
        raise UserError(f"{path}: changed while it was read: start again when it is complete")


def group_pieces(pieces: list[Piece]) -> list[list[Piece]]:
    """Neighbours that make up a shard: a piece of SMALL_BYTES alone, smaller ones together up to about SHARD_BYTES."""
    groups: list[list[Piece]] = []
    room = 0  # in the last group
    for piece in pieces:
        if piece.bytes >= SMALL_BYTES:
            groups.append([piece])
            room = 0
            continue
        if room < piece.bytes:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(piece)
        room -= piece.bytes
    return groups


def assemble(directory: Path, pieces: list[Piece], root: Path, features: dict) -> None:
    """Make `directory` a dataset of the pieces' rows in their order; the pieces are used up.

    root: what the pieces' paths start from, on the same file system. A dataset without rows has one empty shard,
    because `datasets` cannot open one without any.
    """
    directory.mkdir(parents=True, exist_ok=True)
    groups = group_pieces(pieces) or [[]]
    for number, group in enumerate(groups):
        shard = directory / shard_name(number, len(groups))
        if not shard.exists():
            if len(group) == 1:
                (root / group[0].path).rename(shard)
            else:
                _copy_together(group, root, features).rename(shard)
        for piece in group:
            (root / piece.path).unlink(missing_ok=True)
    write_dataset_files(directory, features, len(groups), sum(piece.rows for piece in pieces))


def read_pieces(pieces: list[Piece], root: Path) -> Iterator[pa.RecordBatch]:
    """The record batches of the pieces, one in memory at a time."""
    for piece in pieces:
        with pa.OSFile(str(root / piece.path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream


def filter_pieces(pieces: list[Piece], kept: np.ndarray, root: Path, directory: Path) -> list[Piece]:
    """New pieces in `directory`, of the rows that are `kept` (bool, one for each row); paths are below `root`."""
    part = directory.with_suffix(".part")
    for left in (part, directory):
        shutil.rmtree(left, ignore_errors=True)
    writer = ShardWriter(part, arrow_schema(TOKEN_FEATURES))
    first = 0
    for rows in read_pieces(pieces, root):
        chosen = kept[first : first + rows.num_rows]
        first += rows.num_rows
        if not chosen.all():
            # Few are left out: to copy what lies between them is ten times as fast as a filter of lists.
            bounds = np.flatnonzero(np.diff(np.concatenate(([0], chosen.view(np.int8), [0])))).reshape(-1, 2)
            runs = [rows.slice(begin, end - begin) for begin, end in bounds.tolist()]
            rows = pa.concat_batches(runs) if runs else rows[:0]
        if rows.num_rows:
            writer.write_unchanged(rows)
    assert first == len(kept)
    writer.end()
    part.rename(directory)
    sync_directory(directory.parent)
    name = directory.relative_to(root)
    return [Piece(f"{name}/{shard.name}", *sizes) for shard, *sizes in writer.ended]


def _copy_together(pieces: list[Piece], root: Path, features: dict) -> Path:
    writer = ShardWriter(root / "shard", arrow_schema(features), shard_bytes=None)
    for batch in read_pieces(pieces, root):
        writer.write(batch)
    writer.end_shard()
    return writer.ended[0][0]
