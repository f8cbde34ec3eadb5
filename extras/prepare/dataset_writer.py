"""Write a `datasets` directory (Arrow IPC stream shards and three JSON files) without going through `datasets`.

The form is that of `Dataset.save_to_disk` of datasets 5.2; `datasets.load_from_disk` opens it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from common.files.hashing import combined_hash
from common.files.json_files import sync, write_json_flushed

ROWS_PER_BATCH = 10_000
SHARD_BYTES = 500 << 20

_STRING = {"dtype": "string", "_type": "Value"}
TEXT_FEATURES = {"id": _STRING, "text": _STRING}
TOKEN_FEATURES = {"id": _STRING, "input_ids": {"feature": {"dtype": "uint8", "_type": "Value"}, "_type": "List"}}

LISTS = {"List": pa.list_, "LargeList": pa.large_list}  # of 32-bit and of 64-bit offsets


def arrow_schema(features: dict) -> pa.Schema:
    """The Arrow schema of `features`, with the metadata by which `datasets` recognises its types."""

    def arrow_type(feature: dict) -> pa.DataType:
        if feature["_type"] in LISTS:
            return LISTS[feature["_type"]](arrow_type(feature["feature"]))
        return pa.type_for_alias(feature["dtype"])

    fields = [pa.field(name, arrow_type(feature)) for name, feature in features.items()]
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": features}})})


class ShardWriter:
    """Writes record batches to `data-00000.arrow`, ... in a directory of its own: flushed Arrow IPC streams.

    Rows are regrouped into record batches of ROWS_PER_BATCH (the last of a shard may be shorter), so that a small
    split does not become thousands of tiny pieces. A shard ends after `shard_bytes` or at `end_shard`.
    """

    def __init__(self, directory: Path, schema: pa.Schema, shard_bytes: int | None = SHARD_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.schema = schema
        self.shard_bytes = shard_bytes
        self.ended: list[tuple[Path, int, int]] = []  # path, rows, bytes of the shards that have ended
        self._rows_in_shard = 0
        self._file = self._stream = None
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; the columns are those of the schema."""
        if not batch.num_rows:
            return
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        if self._pending_rows >= ROWS_PER_BATCH:
            self._flush(self._pending_rows - self._pending_rows % ROWS_PER_BATCH)

    def write_unchanged(self, batch: pa.RecordBatch) -> None:
        """Add rows as a record batch of its own: nothing is copied. Not after a `write`, whose rows may be waiting."""
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
        if not rows:
            return
        table = pa.Table.from_batches(self._pending, self.schema)
        now, later = table.slice(0, rows).combine_chunks(), table.slice(rows)
        self._pending = later.to_batches()
        self._pending_rows = later.num_rows
        for batch in now.to_batches(max_chunksize=ROWS_PER_BATCH):
            # A copy: of a slice of something longer, what comes after it would be written as padding.
            self.write_unchanged(batch.take(np.arange(batch.num_rows)))

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
    """A whole dataset: `close` gives the shards their names, `data-00000-of-00003.arrow`, and adds the JSON files."""

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
    """The JSON files of a dataset whose shards stand in their places."""
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


def write_dataset_dict(directory: Path, splits: list[str]) -> None:
    """Make `load_from_disk(directory)` give a DatasetDict of the splits below it."""
    write_json_flushed(directory / "dataset_dict.json", {"splits": splits}, sort_keys=True)
