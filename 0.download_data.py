"""FASTA to csv/x000.csv, x001.csv, ... (`id,text`): downloaded if need be, shuffled as a whole, exactly partitioned.

    python 0.download_data.py --output_dir DIR [--source FILE_OR_URL ...]

The source is UniRef50 by default; plain or gzipped FASTA files, http(s)://, ftp:// or s3:// URLs otherwise. What is
under OUTPUT_DIR/csv is always complete. Stopped at any moment and started again, the same command gives the same files
(a download goes on where it broke off); once they are there it does nothing.
"""

import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from common.cli import UserError, parse_arguments, run
from common.download import download_directory
from common.fasta import read_fasta
from common.fetch import describe_sources, fetch, parse_sources
from common.output_directory import building
from common.partitions import PartitionWriter, batches_of_lines, in_random_order

logger = logging.getLogger(__name__)
UNIREF50 = "https://ftp.uniprot.org/pub/databases/uniprot/uniref/uniref50/uniref50.fasta.gz"


@dataclass
class Arguments:
    max_records_per_partition: int = field(default=500_000, metadata={"help": "records in a file; the last has fewer"})
    output_dir: str = field(default_factory=os.getcwd, metadata={"help": "files go to OUTPUT_DIR/csv (default: here)"})
    save_csv: bool = field(default=True, metadata={"help": "write OUTPUT_DIR/csv/xNNN.csv"})
    save_arrow: bool = field(default=False, metadata={"help": "write OUTPUT_DIR/arrow, for datasets.load_from_disk"})
    save_fasta: bool = field(default=False, metadata={"help": "write OUTPUT_DIR/fasta/xNNN.fasta"})
    save_parquet: bool = field(default=False, metadata={"help": "write OUTPUT_DIR/parquet/xNNN.parquet"})
    shuffle: bool = field(
        default=True, metadata={"help": "one random order over the whole input; False keeps its own"}
    )
    source: list[str] = field(
        default_factory=lambda: [UNIREF50],
        metadata={"help": "FASTA files (plain or .gz), http(s), ftp or s3 URLs, read in order (default: UniRef50)"},
    )
    md5: list[str] = field(default_factory=list, metadata={"help": "checksums of the sources, in their order"})
    sha256: list[str] = field(default_factory=list, metadata={"help": "likewise"})
    seed: int = field(default=42, metadata={"help": "of the shuffle"})
    overwrite: bool = field(default=False, metadata={"help": "replace outputs made from other input or arguments"})

    def __post_init__(self) -> None:
        if self.max_records_per_partition < 1:
            raise UserError(f"--max_records_per_partition {self.max_records_per_partition}: must be at least 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must not be negative")
        if not self.formats:
            raise UserError("nothing to write: leave --save_csv True or set another --save_... flag")
        self.sources = parse_sources(self.source, self.md5, self.sha256)

    @property
    def formats(self) -> list[str]:
        return [name for name in ("csv", "arrow", "fasta", "parquet") if getattr(self, f"save_{name}")]


def describe(args: Arguments) -> dict:
    """What decides the output: an output directory made from the same is not made again."""
    made_from = describe_sources(args.sources) | {"max_records_per_partition": args.max_records_per_partition}
    made_from |= {"shuffle": args.shuffle, "seed": args.seed if args.shuffle else None}
    return made_from


def progress(records: Iterable, what: str) -> tqdm:
    """A bar on a terminal; in a log file, a line now and then."""
    return tqdm(records, desc=what, unit=" records", mininterval=0.5 if sys.stderr.isatty() else 10.0)


def main() -> None:
    logger.info("Parsing arguments")
    (args,) = parse_arguments(__doc__, Arguments)
    output_dir = Path(args.output_dir)
    with (
        building(output_dir, args.formats, describe(args), args.overwrite) as build,
        download_directory(output_dir / ".download") as downloads,
    ):
        if not build.paths:
            return
        paths = fetch(args.sources, downloads)
        logger.info("Reading FASTA file %s", ", ".join(map(str, paths)))
        records = chain.from_iterable(map(read_fasta, paths))
        batches = batches_of_lines(progress(records, "Reading"))
        if args.shuffle:
            batches = in_random_order(batches, build.scratch, args.seed)
        logger.info("Generating %s files", " and ".join(build.paths))
        writer = PartitionWriter(build.paths, output_dir, args.max_records_per_partition)
        for batch in batches:
            writer.write(batch)
        build.results["records"] = writer.close()
    logger.info("Save complete")


if __name__ == "__main__":
    run(main)
