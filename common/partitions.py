"""Records to exactly numbered partitions, in several formats at once; a killed run goes on after the last whole one.

Records come as lines of bytes, `id TAB text NEWLINE` (see `record_lines`).
"""

from __future__ import annotations

import csv
import io
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from common.output_directory import Build, sync
from common.record_lines import Lines, columns, view
from common.token_writer import TEXT_FEATURES, arrow_schema, shard_name, write_dataset_files

logger = logging.getLogger(__name__)
WRITTEN = "partitions written"  # in the journal of the build


class PartitionWriter:
    """Cuts a stream of lines into partitions of exactly `max_records` (the last: what is left), in several formats.

    A partition is noted in the build's journal once it is on the disk in all formats, while the next one is written.
    `written` is the number of records in those; a new writer of the same build expects the records after them.
    """

    def __init__(self, build: Build, final_parent: Path, max_records: int) -> None:
        """The keys of `build.paths` are formats: csv, fasta, parquet, arrow; final_parent: for the log."""
        self.build = build
        self.final_parent = final_parent
        self.max_records = max_records
        self.number, self.written = build.done(WRITTEN) or (0, 0)  # number: of the partition being written
        self.filled = 0  # records in it
        self.formats = {name: FORMATS[name](path) for name, path in build.paths.items()}
        self._before = self.written  # records in the partitions before this one
        self._flushing = Future()  # the partition before this one
        self._flushing.set_result(None)

    def __enter__(self) -> PartitionWriter:
        self._pool = ThreadPoolExecutor(1)
        return self

    def __exit__(self, *error) -> None:
        self._pool.shutdown()

    def write(self, lines: Lines) -> None:
        while len(lines):
            now, lines = lines[: self.max_records - self.filled], lines[self.max_records - self.filled :]
            for output in self.formats.values():
                output.write(self.number, now)
            self.filled += len(now)
            if self.filled == self.max_records:
                self._end_partition()

    def close(self) -> int:
        """Finish; returns the number of records written, by killed runs before this one too."""
        if self.filled:  # an input that is an exact multiple ends without an empty file
            self._end_partition()
        self._flushing.result()
        for output in self.formats.values():
            output.close(self.number, self.written)
        return self.written

    def _end_partition(self) -> None:
        files = []
        for name, output in self.formats.items():
            file_name, file = output.end_partition()
            files.append(file)
            logger.info("Writing %d records to %s", self.filled, self.final_parent / name / file_name)
        self.number += 1
        self._before += self.filled
        self.filled = 0
        self._flushing.result()
        self._flushing = self._pool.submit(self._flush, files, self.number, self._before)

    def _flush(self, files: list, number: int, written: int) -> None:
        for file in files:
            with file:
                sync(file)
        self.build.note(WRITTEN, [number, written])
        self.written = written


class _Files:
    """A file per partition, opened at its first record."""

    suffix = ""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file = None

    def path(self, number: int) -> Path:
        return self.directory / f"x{number:03d}.{self.suffix}"

    def write(self, number: int, lines: Lines) -> None:
        if self.file is None:
            self.file = open(self.path(number), "wb")  # noqa: SIM115
            self.begin()
        self.add(lines)

    def end_partition(self) -> tuple[str, io.BufferedWriter]:
        """The file, whole but not flushed, and the name to call it by."""
        self.end()
        file, self.file = self.file, None
        return Path(file.name).name, file

    def begin(self) -> None: ...

    def add(self, lines: Lines) -> None: ...

    def end(self) -> None: ...

    def close(self, partitions: int, records: int) -> None: ...


class _Csv(_Files):
    suffix = "csv"

    def begin(self) -> None:
        self.file.write(b"id,text\n")

    def add(self, lines: Lines) -> None:
        text = view(lines)[0].tobytes()
        if b"," not in text and b'"' not in text:  # nothing to quote: the tab is the only thing to change
            self.file.write(text.replace(b"\t", b","))
            return
        quoted = io.StringIO()
        csv.writer(quoted, lineterminator="\n").writerows(
            line.split("\t") for line in text.decode("ascii").splitlines()
        )
        self.file.write(quoted.getvalue().encode("ascii"))


class _Fasta(_Files):
    suffix = "fasta"

    def add(self, lines: Lines) -> None:
        text = view(lines)[0].tobytes()
        self.file.write(b">" + text[:-1].replace(b"\n", b"\n>").replace(b"\t", b"\n") + b"\n")


class _Parquet(_Files):
    suffix = "parquet"

    def begin(self) -> None:
        self.writer = pa.parquet.ParquetWriter(self.file, arrow_schema(TEXT_FEATURES))

    def add(self, lines: Lines) -> None:
        self.writer.write_batch(_record_batch(lines))

    def end(self) -> None:
        self.writer.close()


class _Arrow(_Files):
    """One `datasets` directory, a shard per partition."""

    def path(self, number: int) -> Path:
        return self.directory / f"data-{number:05d}.arrow"

    def begin(self) -> None:
        self.writer = pa.ipc.new_stream(self.file, arrow_schema(TEXT_FEATURES))

    def add(self, lines: Lines) -> None:
        self.writer.write_batch(_record_batch(lines))

    def end(self) -> None:
        self.writer.close()

    def end_partition(self) -> tuple[str, io.BufferedWriter]:
        name, file = super().end_partition()
        return name.replace(".arrow", "-of-*.arrow"), file  # how many there will be is known at the end

    def close(self, partitions: int, records: int) -> None:
        for number in range(partitions):
            if self.path(number).exists():  # else a run that was killed here has renamed it
                self.path(number).rename(self.directory / shard_name(number, partitions))
        write_dataset_files(self.directory, TEXT_FEATURES, partitions, records)


FORMATS = {"csv": _Csv, "fasta": _Fasta, "parquet": _Parquet, "arrow": _Arrow}


def _record_batch(lines: Lines) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(columns(lines).columns, schema=arrow_schema(TEXT_FEATURES))
