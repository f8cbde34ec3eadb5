"""Records to exactly numbered partitions, in several formats at once; a killed run goes on after the last whole one.

Records come as lines of bytes, `id TAB text NEWLINE` (extras/sources/records.py).
"""

from __future__ import annotations

import csv
import io
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from common.files.json_files import sync
from extras.prepare.dataset_writer import TEXT_FEATURES, arrow_schema, shard_name, write_dataset_files
from extras.prepare.output_directory import Build
from extras.sources.records import Lines, columns, view

logger = logging.getLogger(__name__)
WRITTEN = "partitions written"  # in the journal of the build
WAITING = 64  # batches (of about 2 MB) that may wait to be written


class PartitionWriter:
    """Cuts a stream of lines into partitions of exactly `max_records` (the last: what is left), in several formats.

    Each partition has a thread that writes it, so that the next one begins while the last one is still on its way to
    the disk. It is noted in the build's journal once it is there in all formats, and those before it are noted.
    `written` is the number of records in those; a new writer of the same build expects the records after them.
    """

    def __init__(self, build: Build, final_parent: Path, max_records: int) -> None:
        """The keys of `build.paths` are formats: csv, fasta, parquet, arrow; final_parent: for the log."""
        self.build = build
        self.final_parent = final_parent
        self.max_records = max_records
        self.number, self.written = build.done(WRITTEN) or (0, 0)  # number: of the partition being filled
        self.filled = 0  # records in it
        self._before = self.written  # records in the partitions before this one
        self._room = threading.Semaphore(WAITING)
        self._partition: _Partition | None = None
        self._noted = Future()  # the partition before this one
        self._noted.set_result(None)
        self._pools: list[ThreadPoolExecutor] = []

    def __enter__(self) -> PartitionWriter:
        return self

    def __exit__(self, *error) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=any(error))

    def write(self, lines: Lines) -> None:
        while len(lines):
            if self._partition is None:
                pool = ThreadPoolExecutor(1)
                self._pools = [*self._pools[-1:], pool]  # those before have nothing left to do
                self._partition = _Partition(self.build.paths, self.number, pool, self._room)
            now, lines = lines[: self.max_records - self.filled], lines[self.max_records - self.filled :]
            self._partition.write(now)
            self.filled += len(now)
            if self.filled == self.max_records:
                self._end_partition()

    def close(self) -> int:
        """Finish; returns the number of records written, by killed runs before this one too."""
        if self.filled:  # an input that is an exact multiple ends without an empty file
            self._end_partition()
        self._noted.result()
        if "arrow" in self.build.paths:
            _name_shards(self.build.paths["arrow"], self.number, self.written)
        return self.written

    def _end_partition(self) -> None:
        self._noted.result()  # of the one before the last: at most two are under way
        for name, file_name in self._partition.names().items():
            logger.info("Writing %d records to %s", self.filled, self.final_parent / name / file_name)
        self.number += 1
        self._before += self.filled
        self.filled = 0
        self._noted = self._partition.end(self._note, self._noted, self.number, self._before)
        self._partition = None

    def _note(self, before: Future, number: int, written: int) -> None:
        before.result()
        self.build.note(WRITTEN, [number, written])
        self.written = written


class _Partition:
    """One partition in all its formats; everything happens in the one thread of `pool`."""

    def __init__(self, directories: dict[str, Path], number: int, pool: ThreadPoolExecutor, room) -> None:
        self.paths = {name: FORMATS[name].path(directory, number) for name, directory in directories.items()}
        self.pool, self.room = pool, room
        self.files: list[_File] = []
        self.pool.submit(self._open)

    def names(self) -> dict[str, str]:
        """What to call the files in the log, by format."""
        return {name: FORMATS[name].title(path) for name, path in self.paths.items()}

    def write(self, lines: Lines) -> None:
        """Soon; waits while too much is waiting. What goes wrong is told by `end`."""
        self.room.acquire()
        self.pool.submit(self._write, lines)

    def end(self, then: Callable, *arguments) -> Future:
        """Flush all files to the disk, then call `then`. The result tells what has gone wrong."""
        return self.pool.submit(self._end, then, arguments)

    def _open(self) -> None:
        self.failure: Exception | None = None
        try:
            for name, path in self.paths.items():
                self.files.append(FORMATS[name](path))
        except OSError as error:
            self.failure = error

    def _write(self, lines: Lines) -> None:
        try:
            if self.failure is None:
                for file in self.files:
                    file.add(lines)
        except Exception as error:
            self.failure = error
        finally:
            self.room.release()

    def _end(self, then: Callable, arguments: tuple) -> None:
        if self.failure is not None:
            raise self.failure
        for file in self.files:
            file.end()
        then(*arguments)


class _File:
    """A partition in one format."""

    suffix = ""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb")  # noqa: SIM115
        self.begin()

    @classmethod
    def path(cls, directory: Path, number: int) -> Path:
        return directory / f"x{number:03d}.{cls.suffix}"

    @staticmethod
    def title(path: Path) -> str:
        return path.name

    def begin(self) -> None: ...

    def add(self, lines: Lines) -> None: ...

    def end(self) -> None:
        with self.file:
            sync(self.file)


class _Csv(_File):
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


class _Fasta(_File):
    suffix = "fasta"

    def add(self, lines: Lines) -> None:
        text = view(lines)[0].tobytes()
        self.file.write(b">" + text[:-1].replace(b"\n", b"\n>").replace(b"\t", b"\n") + b"\n")


class _Batches(_File):
    """Record batches, written by `writer`."""

    def add(self, lines: Lines) -> None:
        self.writer.write_batch(pa.RecordBatch.from_arrays(columns(lines).columns, schema=arrow_schema(TEXT_FEATURES)))

    def end(self) -> None:
        self.writer.close()
        super().end()


class _Arrow(_Batches):
    """One `datasets` directory, a shard per partition."""

    @classmethod
    def path(cls, directory: Path, number: int) -> Path:
        return directory / f"data-{number:05d}.arrow"

    @staticmethod
    def title(path: Path) -> str:
        return path.name.replace(".arrow", "-of-*.arrow")  # how many there will be is known at the end

    def begin(self) -> None:
        self.writer = pa.ipc.new_stream(self.file, arrow_schema(TEXT_FEATURES))


class _Parquet(_Batches):
    suffix = "parquet"

    def begin(self) -> None:
        self.writer = pa.parquet.ParquetWriter(self.file, arrow_schema(TEXT_FEATURES))


FORMATS = {"csv": _Csv, "fasta": _Fasta, "parquet": _Parquet, "arrow": _Arrow}


def _name_shards(directory: Path, partitions: int, records: int) -> None:
    for number in range(partitions):
        if _Arrow.path(directory, number).exists():  # else a run that was killed here has renamed it
            _Arrow.path(directory, number).rename(directory / shard_name(number, partitions))
    write_dataset_files(directory, TEXT_FEATURES, partitions, records)
