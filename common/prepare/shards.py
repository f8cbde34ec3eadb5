"""From the pieces a dataset was made in (one input file each, say) to its shards, without reading most of them again.

A piece that is large enough becomes a shard by being renamed; runs of small ones are copied together. Which is which
depends on their sizes alone. Stopped at any moment and called again, it goes on with what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from common.files.dataset_writer import SHARD_BYTES, ShardWriter, arrow_schema, shard_name, write_dataset_files

SMALL_BYTES = 64 << 20


class Piece(NamedTuple):
    """An Arrow stream file; path: below the directory that holds the pieces."""

    path: str
    rows: int
    bytes: int


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
    """The record batches of the pieces, memory-mapped."""
    for piece in pieces:
        with pa.memory_map(str(root / piece.path)) as file, pa.ipc.open_stream(file) as stream:
            yield from stream


def _copy_together(pieces: list[Piece], root: Path, features: dict) -> Path:
    writer = ShardWriter(root / "shard", arrow_schema(features), shard_bytes=None)
    for batch in read_pieces(pieces, root):
        writer.write(batch)
    writer.end_shard()
    return writer.ended[0][0]
