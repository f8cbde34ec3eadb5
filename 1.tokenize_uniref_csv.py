#!/usr/bin/env python3
"""csv/*.csv (`id,text`) to processed/arrow/{train,validation,test}: ESM-2 token ids, `<cls> residues <eos>`, uint8.

    python 1.tokenize_uniref_csv.py --input_dir DIR/csv --output_dir DIR/processed
    python 1.tokenize_uniref_csv.py --source FILES_OR_OWNER/NAME_OR_URL ... --output_dir DIR/processed

Any input of step 0 goes in without it, too: FASTA, CSV, TSV, JSON lines, parquet, Arrow, datasets of the Hub.
`datasets.load_from_disk` opens OUTPUT_DIR/arrow and each split below it. Splits are disjoint, drawn uniformly from all
records and depend on --seed; training records keep the order of the CSV files. Exact copies of held-out proteins are
dropped from training. By default nothing is truncated or padded. data_report.json has lengths, duplicates and unknown
characters. OUTPUT_DIR/arrow is always complete; once it exists the same command does nothing.
"""

import logging
from functools import partial
from pathlib import Path

from common.cli import run
from common.flags import parse_arguments
from extras.prepare.download import download_directory
from extras.prepare.fetch import Source, directory_sources, fetch, parse_sources
from extras.prepare.output_directory import building
from extras.prepare.shards import ENCODED, Shard, read_shards
from extras.prepare.sources.protein_records import all_columns
from extras.prepare.tokenize_flags import TokenizeFlags, describe, describe_shard
from extras.prepare.tokenize_proteins import encode_shard, split_and_finish, tokenize

logger = logging.getLogger(__name__)


def encode_part(args: TokenizeFlags, sources: list[Source], shard: Shard, downloads: Path) -> None:
    """--shard: only its own files are fetched."""
    made_from = describe_shard(args, sources, shard)
    with building(shard.directory(Path(args.output_dir)), [ENCODED], made_from, args.overwrite, args.verify) as build:
        if not build.paths:
            return
        mine = shard.own(sources)
        files = fetch(list(mine.values()), downloads)
        all_columns(files, args)
        encode_shard(args, dict(zip(mine, files, strict=True)), build)


def make_splits(args: TokenizeFlags, sources: list[Source], downloads: Path) -> None:
    """OUTPUT_DIR/arrow, of the sources or of all their shards."""
    output_dir = Path(args.output_dir)
    with building(output_dir, ["arrow"], describe(args, sources), args.overwrite, args.verify) as build:
        if not build.paths:
            return
        if args.merge is not None:
            encoded = read_shards(output_dir, args.merge, len(sources), partial(describe_shard, args, sources))
            files = fetch(sources, downloads) if args.cluster is not None else []
            split_and_finish(args, files, build, encoded)
            return
        files = fetch(sources, downloads)
        columns = all_columns(files, args)
        tokenize(args, files, build, any(of_file is not None and of_file.cluster for of_file in columns))


def main() -> None:
    logger.info("Parsing arguments")
    args = parse_arguments(__doc__, TokenizeFlags)
    if args.source:
        if args.input_dir != TokenizeFlags.input_dir:
            logger.info("--source replaces --input_dir %s", args.input_dir)
        sources = parse_sources(args.source, content=args.content)
    else:
        sources = directory_sources(args.input_dir, args.content)
    shard = Shard.of(args.shard) if args.shard else None
    output_dir = shard.directory(Path(args.output_dir)) if shard else Path(args.output_dir)
    with download_directory(output_dir / ".download") as downloads:
        if shard:
            encode_part(args, sources, shard, downloads)
        else:
            make_splits(args, sources, downloads)
    logger.info("Save complete")


if __name__ == "__main__":
    run(main, resumable=True)
