"""Write a `datasets` directory (Arrow IPC stream shards and three JSON files) without `datasets`, piece by piece.

The format is that of `Dataset.save_to_disk` of datasets 5.2; `datasets.load_from_disk` opens it. Input files are
tokenised to pieces, shards of one input file. `assemble` makes a dataset of them: a large piece becomes a shard by a
rename, runs of small ones are copied into one. Killed and called again, it resumes with the remaining pieces.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from common.files.content_hash import combined_hash
from common.files.safe_files import sync, sync_directory, write_json_flushed

ROWS_PER_BATCH = 10_000
SHARD_BYTES = 500 << 20

_STRING = {"dtype": "string", "_type": "Value"}
TEXT_FEATURES = {"id": _STRING, "text": _STRING}
CLUSTER_FEATURES = TEXT_FEATURES | {"cluster": _STRING}


def features_of(dtype: np.dtype) -> dict:
    """The features of token datasets with ids of this type."""
    return {
        "id": _STRING,
        "input_ids": {"feature": {"dtype": np.dtype(dtype).name, "_type": "Value"}, "_type": "List"},
    }


TOKEN_FEATURES = features_of(np.dtype(np.uint8))

LISTS = {"List": pa.list_, "LargeList": pa.large_list}  # of 32-bit and of 64-bit offsets


def arrow_schema(features: dict) -> pa.Schema:
    """The Arrow schema of `features`, with the metadata that `datasets` reads its types from."""

    def arrow_type(feature: dict) -> pa.DataType:
        if feature["_type"] in LISTS:
            return LISTS[feature["_type"]](arrow_type(feature["feature"]))
        return pa.type_for_alias(feature["dtype"])

    fields = [pa.field(name, arrow_type(feature)) for name, feature in features.items()]
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


class ShardWriter:
    """Write record batches to `data-00000.arrow`, ... in an own directory: flushed Arrow IPC streams.

    Rows are regrouped into record batches of ROWS_PER_BATCH (the last of a shard may be shorter), so that a small
    split does not become thousands of tiny pieces. A shard ends after `shard_bytes` or at `end_shard`.
    """

    def __init__(self, directory: Path, schema: pa.Schema | None, shard_bytes: int | None = SHARD_BYTES) -> None:
        """schema: None for that of the first rows."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.schema = schema
        self.shard_bytes = shard_bytes
        self.ended: list[tuple[Path, int, int]] = []  # path, rows, bytes of the shards that have ended
        self._rows_in_shard = 0
        self._file = self._stream = None
        self._pending: deque[pa.RecordBatch] = deque()
        self._pending_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; the columns are those of the schema."""
        if not batch.num_rows:
            return
        self.schema = self.schema or batch.schema
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        if self._pending_rows >= ROWS_PER_BATCH:
            self._flush(self._pending_rows - self._pending_rows % ROWS_PER_BATCH)

    def write_unchanged(self, batch: pa.RecordBatch) -> None:
        """Add rows as one record batch, without a copy. Not after `write`, whose rows may be pending."""
        self.schema = self.schema or batch.schema
        if self._stream is None:
            self._open()
        self._stream.write_batch(batch)
        self._rows_in_shard += batch.num_rows
        if self.shard_bytes is not None and self._file.tell() >= self.shard_bytes:
            self._close_shard()

    def end_shard(self) -> None:
        """End the current shard, empty or not."""
        self._flush(self._pending_rows)
        if self._stream is None:
            self._open()
        self._close_shard()

    def end(self) -> None:
        """End the current shard if anything was written to it."""
        if self._stream is not None or self._pending:
            self.end_shard()

    def _flush(self, rows: int) -> None:
        """Write the first `rows` pending rows, ROWS_PER_BATCH a batch."""
        for size in (*[ROWS_PER_BATCH] * (rows // ROWS_PER_BATCH), rows % ROWS_PER_BATCH):
            taken = 0
            parts = []
            while taken < size:
                batch = self._pending.popleft()
                parts.append(batch.slice(0, size - taken))
                if (left := batch.slice(size - taken)).num_rows:
                    self._pending.appendleft(left)
                taken += parts[-1].num_rows
            if parts:
                # A copy: of a slice, Arrow would write the bytes after it as padding.
                copied = pa.concat_batches(parts) if len(parts) > 1 else parts[0].take(np.arange(size))
                self.write_unchanged(copied)
        self._pending_rows -= rows

    def _open(self) -> None:
        self._file = open(self.directory / f"data-{len(self.ended):05d}.arrow", "wb")  # noqa: SIM115
        self._stream = pa.ipc.new_stream(self._file, self.schema)

    def _close_shard(self) -> None:
        self._stream.close()
        sync(self._file)
        self.ended.append((Path(self._file.name), self._rows_in_shard, self._file.tell()))
        self._file.close()
        self._file = self._stream = None
        self._rows_in_shard = 0


class DatasetWriter(ShardWriter):
    """A whole dataset: `close` renames the shards to `data-00000-of-00003.arrow` and writes the JSON files."""

    def __init__(self, directory: Path, features: dict, shard_bytes: int | None = SHARD_BYTES) -> None:
        super().__init__(directory, arrow_schema(features), shard_bytes)
        self.features = features

    def close(self) -> None:
        self.end()
        if not self.ended:  # `datasets` cannot open a dataset without a shard
            self.end_shard()
        shards = len(self.ended)
        for number, (path, _, _) in enumerate(self.ended):
            path.rename(self.directory / shard_name(number, shards))
        write_dataset_files(self.directory, self.features, shards, sum(rows for _, rows, _ in self.ended))


def shard_name(number: int, shards: int) -> str:
    return f"data-{number:05d}-of-{shards:05d}.arrow"


def write_dataset_files(directory: Path, features: dict, shards: int, rows: int) -> None:
    """The JSON files of a dataset whose shards have their final names."""
    names = [shard_name(number, shards) for number in range(shards)]
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": combined_hash(directory / name for name in names),
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    write_json_flushed(directory / "state.json", state, sort_keys=True)
    write_json_flushed(directory / "dataset_info.json", info, sort_keys=True)


def add_to_state(directory: Path, added: dict) -> None:
    """Keys of our own in a finished split's state.json, which `datasets` ignores."""
    path = directory / "state.json"
    write_json_flushed(path, json.loads(path.read_text()) | added, sort_keys=True)


def write_dataset_dict(directory: Path, splits: list[str]) -> None:
    """Make `load_from_disk(directory)` give a DatasetDict of the splits below it."""
    write_json_flushed(directory / "dataset_dict.json", {"splits": splits}, sort_keys=True)


SMALL_BYTES = 64 << 20


class Piece(NamedTuple):
    """An Arrow stream file; path: below the directory that holds the pieces."""

    path: str
    rows: int
    bytes: int


def group_pieces(pieces: list[Piece]) -> list[list[Piece]]:
    """Consecutive pieces that become a shard: one of SMALL_BYTES or more alone, smaller ones up to SHARD_BYTES."""
    groups: list[list[Piece]] = []
    free = 0  # bytes left in the last group
    for piece in pieces:
        if piece.bytes >= SMALL_BYTES:
            groups.append([piece])
            free = 0
            continue
        if free < piece.bytes:
            groups.append([])
            free = SHARD_BYTES
        groups[-1].append(piece)
        free -= piece.bytes
    return groups


def assemble(directory: Path, pieces: list[Piece], root: Path, features: dict) -> None:
    """Make `directory` a dataset of the pieces' rows, in order; moves or removes the pieces.

    root: the directory that the pieces' paths are relative to, on the same file system. An empty dataset has one empty
    shard: `datasets` cannot open one without any.
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


class PieceWriters:
    """Shard writers of a directory of pieces, one for each split; the directory gets its name when it is complete."""

    def __init__(self, root: Path, name: str, features: dict | None = None) -> None:
        """root: what the pieces' paths are relative to; features: None for those of the first rows.

        Removes what a killed run left under this name.
        """
        self.root, self.directory = root, root / name
        self.schema = arrow_schema(features) if features else None
        self.part = self.directory.with_suffix(".part")
        for left in (self.part, self.directory):
            shutil.rmtree(left, ignore_errors=True)
        self.part.mkdir()
        self.writers: dict[str, ShardWriter] = {}

    def __getitem__(self, split: str) -> ShardWriter:
        if split not in self.writers:
            self.writers[split] = ShardWriter(self.part / split, self.schema)
        return self.writers[split]

    def close(self) -> dict[str, list[Piece]]:
        """The pieces by split."""
        for writer in self.writers.values():
            writer.end()
        self.part.rename(self.directory)
        sync_directory(self.directory.parent)
        final = self.directory.relative_to(self.root)
        return {
            split: [Piece(str(final / split / shard.name), *sizes) for shard, *sizes in writer.ended]
            for split, writer in self.writers.items()
        }


def kept_rows(rows: pa.RecordBatch, kept: np.ndarray) -> pa.RecordBatch:
    """The rows that are `kept` (bool, one for each row, some true)."""
    if kept.all():
        return rows
    # Most or few are: copying the runs between is ten times as fast as filtering lists.
    bounds = np.flatnonzero(np.diff(np.concatenate(([0], kept.view(np.int8), [0])))).reshape(-1, 2)
    return pa.concat_batches([rows.slice(begin, end - begin) for begin, end in bounds.tolist()])


def filter_pieces(pieces: list[Piece], kept: np.ndarray, root: Path, name: str) -> list[Piece]:
    """New pieces in root/name, of the rows that are `kept` (bool, one for each row)."""
    writers, first = PieceWriters(root, name), 0
    for rows in read_pieces(pieces, root):
        chosen = kept[first : first + rows.num_rows]
        first += rows.num_rows
        if chosen.any():
            writers[""].write_unchanged(kept_rows(rows, chosen))
    assert first == len(kept)
    return writers.close().get("", [])


def _copy_together(pieces: list[Piece], root: Path, features: dict) -> Path:
    writer = ShardWriter(root / "shard", arrow_schema(features), shard_bytes=None)
    for batch in read_pieces(pieces, root):
        writer.write(batch)
    writer.end_shard()
    return writer.ended[0][0]
