"""Steps 0 and 1 in parts: a shard takes every N-th input file, and leaves what it made in OUTPUT_DIR/shards/I-of-N.

Of step 0 these are lines, which whoever merges shuffles; of step 1 pieces (dataset_writer.py) of encoded records.
Their splits depend on the number of all records, so whoever merges draws them, and moves each record to its split.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from common.cli import UserError
from common.files.safe_files import sync, write_json_flushed
from common.flags import Flags, flag
from extras.prepare.dataset_writer import Piece, read_pieces
from extras.prepare.encode import CLUSTERS, WHOLE, directory_name, in_order, split_pieces
from extras.prepare.fetch import Source
from extras.prepare.output_directory import Build, how_changed, read_record
from extras.prepare.sources.records import Lines, hash_names

ENCODED = "encoded"  # directory of a shard's pieces; the JSON file in it has what FileEncoder returned
LINES = "lines"  # directory of a shard's lines, a file for each of its input files
LINE_SCHEMA = pa.schema([("line", pa.large_binary())])
logger = logging.getLogger(__name__)
BLOCK = 1 << 20  # hashes of clusters read at a time


@dataclass
class ShardFlags(Flags):
    """Of both steps."""

    shard: str | None = flag(
        None, "I/N: read every N-th input file from the I-th (from 0) on, for --merge, to OUTPUT_DIR/shards/I-of-N"
    )
    merge: int | None = flag(None, "N: make the output of N complete shards: the same bytes as without shards")

    def check(self) -> None:
        if self.shard is not None:
            Shard.of(self.shard)
            if self.merge is not None:
                raise UserError("--shard and --merge: run all shards, then --merge")
        if self.merge is not None:
            self.require_at_least(1, "merge")


class Shard(NamedTuple):
    """Part `index` of `count`, from 0."""

    index: int
    count: int

    @classmethod
    def of(cls, given: str) -> Shard:
        """From I/N. UserError unless 0 <= I < N."""
        if not (match := re.fullmatch(r"(\d{1,6})/(\d{1,6})", given)) or not int(match[1]) < int(match[2]):
            raise UserError(f"--shard {given}: give I/N, with I from 0 to N - 1, as 0/16")
        return cls(int(match[1]), int(match[2]))

    def directory(self, output_dir: Path) -> Path:
        return output_dir / "shards" / f"{self.index}-of-{self.count}"

    def own(self, sources: list[Source]) -> dict[int, Source]:
        """Its sources, by their numbers among all; logs how many."""
        mine = {number: source for number, source in enumerate(sources) if self.has(number)}
        logger.info("Shard %d of %d: %d of %d files", *self, len(mine), len(sources))
        if not mine:
            logger.warning("%d files in %d shards: this one is empty; fewer do as well", len(sources), self.count)
        return mine

    def has(self, number: int) -> bool:
        """Whether an input file is in it."""
        return number % self.count == self.index


def lines_file(directory: Path, number: int) -> Path:
    """Of an input file, in a shard's LINES."""
    return directory / f"{number:05d}.arrow"


def write_lines(path: Path, batches: Iterable[Lines]) -> None:
    with open(path, "wb") as file, pa.ipc.new_stream(file, LINE_SCHEMA) as stream:
        for lines in batches:
            stream.write_batch(pa.RecordBatch.from_arrays([lines], schema=LINE_SCHEMA))
        file.flush()
        sync(file)


def read_line_file(path: Path) -> Iterator[Lines]:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        yield from (batch.column("line") for batch in stream)


class EncodedFile(NamedTuple):
    """An input file that was encoded without splits: its number, where its pieces are, what FileEncoder returned."""

    number: int
    root: Path
    made: dict[str, Any]

    def ids(self) -> Iterator[pa.Array]:
        """Of its records, block by block."""
        pieces = [Piece(*piece) for piece in self.made["pieces"].get(WHOLE, ())]
        return (rows.column("id") for rows in read_pieces(pieces, self.root))

    def clusters(self) -> Iterator[np.ndarray]:
        """Hashes of its records' clusters, uint64 [n], block by block; by their ids where it names none."""
        if not self.names_clusters:
            yield from map(hash_names, self.ids())
            return
        with open(self.root / directory_name(self.number) / CLUSTERS, "rb") as file:
            while len(hashes := np.fromfile(file, np.uint64, BLOCK)):
                yield hashes

    @property
    def names_clusters(self) -> bool:
        """Whether it has a column of clusters."""
        return self.made["clustered"] is not None


def write_results(build: Build, made: Iterable[dict], numbers: Iterable[int]) -> None:
    """Complete a shard: what FileEncoder returned for its input files."""
    made = dict(zip(map(str, numbers), made, strict=True))
    build.results |= {"files": len(made), "records": sum(of_file["records"] for of_file in made.values())}
    write_json_flushed(build.paths[ENCODED] / f"{ENCODED}.json", made, sort_keys=False)


def complete_shards(output_dir: Path, count: int, name: str, made_from: Callable[[Shard], dict]) -> list[Path]:
    """The directories `name` of all shards. UserError unless each is complete and was made from what is here now."""
    shards = [Shard(index, count) for index in range(count)]
    records = [read_record(shard.directory(output_dir) / name) for shard in shards]
    if missing := [str(shard.index) for shard, record in zip(shards, records, strict=True) if record is None]:
        raise UserError(
            f"--merge {count}: {len(missing)} of {count} shards are not complete below {output_dir / 'shards'}: run "
            f"--shard I/{count} for I = {', '.join(missing[:10])}{', ...' if len(missing) > 10 else ''}"
        )
    directories = [shard.directory(output_dir) / name for shard in shards]
    for shard, record, directory in zip(shards, records, directories, strict=True):
        now = made_from(shard)
        if differing := sorted(key for key, value in now.items() if record["made_from"].get(key) != value):
            raise UserError(
                f"--merge {count}: {shard.directory(output_dir)} is of another run ({', '.join(differing)} differ): "
                "remove it, and run that shard again with these arguments"
            )
        if change := how_changed(directory, record):
            again = f"run --shard {shard.index}/{count} again with --overwrite"
            raise UserError(f"--merge {count}: {directory}: {change} since it was written: {again}")
    return directories


def read_shards(output_dir: Path, count: int, files: int, made_from: Callable[[Shard], dict]) -> list[EncodedFile]:
    """All input files, in order. UserError as `complete_shards`."""
    roots = complete_shards(output_dir, count, ENCODED, made_from)
    made = [json.loads((root / f"{ENCODED}.json").read_text()) for root in roots]
    return [EncodedFile(n, roots[n % count], made[n % count][str(n)]) for n in range(files)]


def split_files(
    build: Build, encoded: list[EncodedFile], labels: Iterable[np.ndarray], workers: int
) -> Iterator[dict[str, list[Piece]]]:
    """The pieces by split of each file, in order, in the build's scratch directory; files of this build are removed.

    labels: of each file's records, uint8 (splits.py).
    """

    def split(item: tuple[EncodedFile, np.ndarray]) -> dict[str, list[Piece]]:
        file, of_records = item
        if (noted := build.done(_note(file))) is not None:
            return {name: [Piece(*piece) for piece in pieces] for name, pieces in noted.items()}
        return split_pieces(file.made, of_records, file.root, build.scratch, file.number)

    for file, pieces in zip(encoded, in_order(split, zip(encoded, labels, strict=True), workers), strict=True):
        if build.done(_note(file)) is None:
            build.note(_note(file), pieces)
        if file.root.is_relative_to(build.scratch):
            shutil.rmtree(file.root / directory_name(file.number), ignore_errors=True)
        yield pieces


def _note(file: EncodedFile) -> str:
    return f"split {file.number}"
