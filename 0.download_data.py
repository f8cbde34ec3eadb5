#!/usr/bin/env python3
"""Proteins to csv/x000.csv, x001.csv, ... (`id,text`): downloaded, shuffled as a whole, in files of exact size.

    python 0.download_data.py --output_dir DIR [--source FILE_DIRECTORY_OR_URL ...]

The source is UniRef50 by default; else files, directories and patterns of FASTA, CSV, TSV, JSON lines (plain or
compressed: gzip, bzip2, xz, zstd), parquet and Arrow; datasets of the Hub (OWNER/NAME or
hf://datasets/OWNER/NAME/PATH); and http(s)://, ftp:// or s3:// URLs. Clusters become a third column, `cluster`.
OUTPUT_DIR/csv is always complete. Stopped at any moment, the same command resumes (downloads
too) and makes the same files; once they exist it does nothing.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common.cli import UserError, run
from common.files.safe_files import write_json_flushed
from common.flags import flag, parse_arguments
from extras.prepare.download import download_directory
from extras.prepare.fetch import describe_sources, fetch, name_sources, parse_sources
from extras.prepare.output_directory import Build, building
from extras.prepare.partitions import PartitionWriter, in_random_order
from extras.prepare.shards import LINES, Shard, ShardFlags, complete_shards, lines_file, read_line_file, write_lines
from extras.prepare.sources.protein_records import (
    RecordFlags,
    all_columns,
    file_of,
    read_lines,
    require_clusters,
)
from extras.prepare.sources.records import BadRecords, Lines, skip
from extras.prepare.sources.residues import Changes

logger = logging.getLogger(__name__)
UNIREF50 = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"
FORMATS = ("csv", "arrow", "fasta", "parquet")
READ = "records read"  # in the journal of the build


@dataclass
class Arguments(ShardFlags, RecordFlags):
    max_records_per_partition: int = flag(500_000, "records in a file; the last has fewer")
    output_dir: str = field(default_factory=os.getcwd, metadata={"help": "files go to OUTPUT_DIR/csv (default: here)"})
    save_csv: bool = flag(True, "write OUTPUT_DIR/csv/xNNN.csv")
    save_arrow: bool = flag(False, "write OUTPUT_DIR/arrow, for datasets.load_from_disk")
    save_fasta: bool = flag(False, "write OUTPUT_DIR/fasta/xNNN.fasta")
    save_parquet: bool = flag(False, "write OUTPUT_DIR/parquet/xNNN.parquet")
    shuffle: bool = flag(True, "one random order over the whole input; False keeps its own")
    source: list[str] = field(
        default_factory=lambda: [UNIREF50],
        metadata={
            "help": "files, directories, patterns, datasets of the Hub, or URLs, read in order (default: UniRef50)"
        },
    )
    md5: list[str] = field(default_factory=list, metadata={"help": "checksums of the sources, in their order"})
    sha256: list[str] = field(default_factory=list, metadata={"help": "SHA-256 checksums, likewise"})
    seed: int = flag(42, "seed of the shuffle")
    overwrite: bool = flag(False, "replace existing outputs")
    verify: bool = flag(False, "read complete outputs and compare their checksums")

    def check(self) -> None:
        self.require_at_least(1, "max_records_per_partition")
        self.require_at_least(0, "seed")
        if not self.formats:
            raise UserError("nothing to write: leave --save_csv True or set another --save_... flag")
        self.sources = parse_sources(self.source, self.md5, self.sha256, self.content)

    @property
    def formats(self) -> list[str]:
        return [name for name in FORMATS if getattr(self, f"save_{name}")]


def describe(args: Arguments) -> dict:
    """All that the output depends on: an output made from the same is reused."""
    given: dict = {"max_records_per_partition": args.max_records_per_partition}
    given |= {"shuffle": args.shuffle, "seed": args.seed if args.shuffle else None}
    if args.on_bad_record == "skip":
        given["on_bad_record"] = "skip"
    return describe_sources(args.sources) | given | args.changing


def describe_shard(args: Arguments, shard: Shard) -> dict:
    """All that a shard's lines depend on, whatever becomes of them."""
    return name_sources(args.sources, shard.has) | {"on_bad_record": args.on_bad_record} | args.changing


def progress(phase: str, total: int, **options) -> tqdm:
    """A bar; in a log file a line every ten seconds."""
    return tqdm(desc=phase, total=total, mininterval=0.5 if sys.stderr.isatty() else 10.0, **options)


@dataclass
class Found:
    """What has been read of some files."""

    records: int = 0
    clustered: int = 0  # records with a cluster
    bad: BadRecords = field(default_factory=BadRecords)
    changes: Changes = field(default_factory=Changes)

    @property
    def state(self) -> dict:
        return asdict(self) | {"bad": self.bad.state, "changes": self.changes.state}

    def add(self, state: dict) -> None:
        self.records += state["records"]
        self.clustered += state["clustered"]
        self.bad.add(state["bad"])
        self.changes.add(state["changes"])


def has_clusters(args: Arguments, paths: list[Path]) -> bool:
    """Whether a file has a column of them: then each line has a field for the cluster."""
    return any(columns is not None and columns.cluster for columns in all_columns(paths, args))


def read_files(args: Arguments, paths: list[Path], with_clusters: bool, found: Found) -> Iterator[Lines]:
    """The records of files. found: gets what was read."""
    sizes = [path.stat().st_size for path in paths]
    before = 0
    with progress("Reading", sum(sizes), unit="B", unit_scale=True, postfix="0 records/s") as bar:
        began = time.monotonic()
        for path, size in zip(paths, sizes, strict=True):
            logger.info("Reading %s file %s", file_of(path, args.content).kind.upper(), path)
            position = [0]
            cleaner = args.cleaner(path, found.bad)
            for lines, of_clusters in read_lines(path, cleaner, args, with_clusters, position.append):
                found.records += len(lines)
                found.clustered += of_clusters
                rate = found.records / (time.monotonic() - began)
                bar.set_postfix_str(f"{found.records:,} records, {rate:,.0f} records/s", refresh=False)
                bar.update(before + position[-1] - bar.n)
                yield lines
            before += size
            found.changes.add(cleaner.changes)


def read_records(args: Arguments, build: Build, downloads: Path) -> Iterator[Lines]:
    """All records, of the sources or of their shards; their number is noted at the end."""
    found = Found(bad=BadRecords(args.on_bad_record))
    if args.merge is not None:
        with_clusters, batches = read_shards(args, found)
    else:
        paths = fetch(args.sources, downloads)
        with_clusters = has_clusters(args, paths)
        batches = read_files(args, paths, with_clusters, found)
    yield from batches
    if with_clusters and found.records:
        require_clusters(f"--source {' '.join(args.source)}", found.clustered)
    build.note(READ, found.state)


def read_shards(args: Arguments, found: Found) -> tuple[bool, Iterator[Lines]]:
    """Whether lines have a field for the cluster; and the records of all sources in order, as the shards left them."""
    roots = complete_shards(Path(args.output_dir), args.merge, LINES, partial(describe_shard, args))
    made = [json.loads((root / f"{LINES}.json").read_text()) for root in roots]
    if len({of_shard["with_clusters"] for of_shard in made}) > 1:
        raise UserError(f"--merge {args.merge}: only some sources have a column of clusters: shards need one in all")
    for of_shard in made:
        for state in of_shard["files"].values():
            found.add(state)
    files = (lines_file(roots[number % args.merge], number) for number in range(len(args.sources)))
    return made[0]["with_clusters"], (lines for file in files for lines in read_line_file(file))


def write_shard(args: Arguments, shard: Shard) -> None:
    """The lines of the shard's sources, a file for each."""
    directory = shard.directory(Path(args.output_dir))
    with (
        building(directory, [LINES], describe_shard(args, shard), args.overwrite, args.verify) as build,
        download_directory(directory / ".download") as downloads,
        logging_redirect_tqdm(),
    ):
        if not build.paths:
            return
        mine = shard.own(args.sources)
        paths = dict(zip(mine, fetch(list(mine.values()), downloads), strict=True))
        here = [source.path for source in args.sources if not source.is_url]
        with_clusters = has_clusters(args, [*here, *paths.values()])
        for number, path in paths.items():
            if build.done(f"read {number}") is None:
                found = Found(bad=BadRecords(args.on_bad_record))
                write_lines(lines_file(build.paths[LINES], number), read_files(args, [path], with_clusters, found))
                build.note(f"read {number}", found.state)
        made = {"with_clusters": with_clusters, "files": {number: build.done(f"read {number}") for number in mine}}
        write_json_flushed(build.paths[LINES] / f"{LINES}.json", made, sort_keys=False)


def with_bar(batches: Iterator[Lines], build: Build, written: int) -> Iterator[Lines]:
    """The same lines with a bar, started at the first: the number of records is known when all have been read."""
    if (first := next(batches, None)) is None:
        return
    with progress("Writing", build.done(READ)["records"], initial=written, unit=" records") as bar:
        for lines in chain([first], batches):
            bar.update(len(lines))
            yield lines


def main() -> None:
    logger.info("Parsing arguments")
    args = parse_arguments(__doc__, Arguments)
    if args.shard:
        write_shard(args, Shard.of(args.shard))
        logger.info("Save complete")
        return
    output_dir = Path(args.output_dir)
    with (
        building(output_dir, args.formats, describe(args), args.overwrite, args.verify, FORMATS) as build,
        download_directory(output_dir / ".download") as downloads,
        logging_redirect_tqdm(),
    ):
        if not build.paths:
            return
        with PartitionWriter(build, output_dir, args.max_records_per_partition) as writer:
            records = read_records(args, build, downloads)
            if args.shuffle:
                records = in_random_order(records, build, args.seed, lambda: writer.written)
                records = with_bar(records, build, writer.written)
            else:
                records = skip(records, writer.written)
            logger.info("Generating %s files", " and ".join(build.paths))
            read = build.done(READ)
            if read is None or writer.written < read["records"]:  # else killed when all records were written
                with closing(records):  # its bar, before an error is printed
                    for lines in records:
                        writer.write(lines)
                read = build.done(READ)
            if not read["records"]:
                if bad := read["bad"]["first"]:
                    raise UserError(f"{bad[0]} (and no other record is valid)")
                raise UserError(f"--source {' '.join(args.source)}: no records")
            build.results |= {"records": writer.close(), "skipped_records": read["bad"]["count"]}
            changes = Changes(**read.get("changes", {}))  # none in a build that an earlier version began
            build.results["changes"] = changes.state
        changes.report("--source")
        BadRecords(args.on_bad_record, **read["bad"]).report()
    logger.info("Save complete")


if __name__ == "__main__":
    run(main, resumable=True)
