#!/usr/bin/env python3
"""Proteins to csv/x000.csv, x001.csv, ... (`id,text`): downloaded, shuffled as a whole, in files of exact size.

    python 0.download_data.py --output_dir DIR [--source FILE_DIRECTORY_OR_URL ...]

The source is UniRef50 by default; else files, directories and patterns of FASTA, CSV, TSV, JSON lines (plain or
compressed: gzip, bzip2, xz, zstd), parquet and Arrow; datasets of the Hub (OWNER/NAME or
hf://datasets/OWNER/NAME/PATH); and http(s)://, ftp:// or s3:// URLs. Clusters become a third column, `cluster`.
OUTPUT_DIR/csv is always complete. Stopped at any moment, the same command resumes (downloads
too) and makes the same files; once they exist it does nothing.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from common.cli import UserError, run
from common.flags import flag, parse_arguments
from extras.prepare.download import download_directory
from extras.prepare.fetch import describe_sources, fetch, parse_sources
from extras.prepare.output_directory import Build, building
from extras.prepare.partitions import PartitionWriter, in_random_order
from extras.prepare.sources.protein_records import (
    RecordFlags,
    all_columns,
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
class Arguments(RecordFlags):
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


def progress(phase: str, total: int, **options) -> tqdm:
    """A bar; in a log file a line every ten seconds."""
    return tqdm(desc=phase, total=total, mininterval=0.5 if sys.stderr.isatty() else 10.0, **options)


def read_records(args: Arguments, build: Build, downloads: Path) -> Iterator[Lines]:
    """Fetch all sources and yield their records; their number is noted at the end."""
    paths = fetch(args.sources, downloads)
    sizes = [path.stat().st_size for path in paths]
    bad_records, changes = BadRecords(args.on_bad_record), Changes()
    with_clusters = any(columns is not None and columns.cluster for columns in all_columns(paths, args))
    records = clustered = before = 0
    with progress("Reading", sum(sizes), unit="B", unit_scale=True, postfix="0 records/s") as bar:
        began = time.monotonic()
        for path, size in zip(paths, sizes, strict=True):
            logger.info("Reading %s", path)
            position = [0]
            cleaner = args.cleaner(path, bad_records)
            for lines, of_clusters in read_lines(path, cleaner, args, with_clusters, position.append):
                records += len(lines)
                clustered += of_clusters
                rate = records / (time.monotonic() - began)
                bar.set_postfix_str(f"{records:,} records, {rate:,.0f} records/s", refresh=False)
                bar.update(before + position[-1] - bar.n)
                yield lines
            before += size
            changes.add(cleaner.changes)
    if with_clusters and records:
        require_clusters(f"--source {' '.join(args.source)}", clustered)
    build.note(READ, {"records": records, "bad": bad_records.state, "changes": changes.state})


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
                raise UserError(f"{read['bad']['first'][0]} (and no other record is valid)")
            build.results |= {"records": writer.close(), "skipped_records": read["bad"]["count"]}
            changes = Changes(**read.get("changes", {}))  # none in a build that an earlier version began
            build.results["changes"] = changes.state
        changes.report("--source")
        BadRecords(args.on_bad_record, **read["bad"]).report()
    logger.info("Save complete")


if __name__ == "__main__":
    run(main, resumable=True)
