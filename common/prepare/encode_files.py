"""Tokenise CSV files in parallel, each into pieces of its own for every split; and make the splits of the pieces.

A piece directory appears under its name when it is complete, and is noted: after a kill, only the files that were
being worked on are read again. A piece that is large enough becomes a shard by being renamed; runs of small ones are
copied together. Which is which depends on their sizes alone. Stopped at any moment and called again, `assemble` goes
on with what is left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event, Lock
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.files.dataset_writer import (
    SHARD_BYTES,
    TOKEN_FEATURES,
    ShardWriter,
    arrow_schema,
    shard_name,
    write_dataset_files,
)
from common.files.output_directory import Build, sync, sync_directory
from common.prepare.duplicates import KEY
from common.prepare.encode_records import Encoded, in_order
from common.prepare.splits import SPLITS

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
