#!/usr/bin/env python3
"""csv/*.csv (`id,text`) to processed/arrow/{train,validation,test}: ESM-2 token ids, `<cls> residues <eos>`, uint8.

    python 1.tokenize_uniref_csv.py --input_dir DIR/csv --output_dir DIR/processed

`datasets.load_from_disk` opens OUTPUT_DIR/arrow and each split below it. Splits are disjoint, drawn uniformly from all
records and depend on --seed; training records keep the order of the CSV files. Exact copies of held-out proteins are
dropped from training. By default nothing is truncated or padded. data_report.json has lengths, duplicates and unknown
characters. OUTPUT_DIR/arrow is always complete; once it exists the same command does nothing.
"""

import functools
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from common.cli import UserError, run
from common.data import GAPS_HELP, Gaps
from common.files.content_hash import combined_hash, content_hash
from common.flags import Flags, Missing, flag, parse_arguments
from extras.prepare.cluster_splits import COMPONENTS, cluster_records, publish_indices, split_by_clusters
from extras.prepare.dataset_writer import (
    TOKEN_FEATURES,
    DatasetWriter,
    Piece,
    assemble,
    read_pieces,
    write_dataset_dict,
)
from extras.prepare.duplicates import drop_copies, key_files, mark_copies, open_copies, write_report
from extras.prepare.encode import (
    Chunker,
    FileEncoder,
    check_tokenizer,
    encode_rows,
    usable_threads,
)
from extras.prepare.output_directory import Build, building, read_record
from extras.prepare.relatives import IDENTITY, SEARCHED, count_relatives
from extras.prepare.sources import compression as limits
from extras.prepare.sources import csv_records
from extras.prepare.sources.csv_records import count_rows, csv_files
from extras.prepare.sources.records import BadRecords, Policy
from extras.prepare.sources.residues import Changes, Cleaner
from extras.prepare.splits import HELD_OUT, HELD_OUT_CLUSTERS, SPLITS, labels_by_file, split_labels, split_sizes

logger = logging.getLogger(__name__)


@dataclass
class Arguments(Flags):
    input_dir: str = flag("csv", "directory of the CSV files")
    output_dir: str = flag("processed", "the splits go to OUTPUT_DIR/arrow")
    train_size: float | None = flag(None, "records, or a fraction; default: all remaining records")
    validation_size: float | None = flag(
        None, "records, or a fraction below 1; default: 50,000, with test at most a tenth unless --train_size is given"
    )
    test_size: float | None = flag(None, "as --validation_size")
    max_seq_length: int | None = flag(None, "truncate to so many tokens; default: keep all")
    pad_to_max_length: bool = flag(False, "pad every record to --max_seq_length")
    preprocessing_num_workers: int = flag(8, "threads; the result is the same for any")
    tokenizer_name: str = flag(
        "facebook/esm2_t30_150M_UR50D", "any facebook/esm2_*, or a directory with its vocab.txt"
    )
    line_by_line: bool = flag(True, "False: concatenate records and cut into chunks of --max_seq_length (or 1024)")
    cluster_table: str | None = flag(
        None, "table of ur50_id, ur90_id (parquet, CSV, TSV): split by clusters and index them"
    )
    cluster: float | None = flag(
        None, "cluster at this identity (0.5) with MMseqs2, which must be installed, and split as --cluster_table does"
    )
    gaps: Gaps | None = flag(None, GAPS_HELP, choices=get_args(Gaps))
    on_bad_record: Policy = flag(
        "error",
        "stop at a row without text, not ASCII or not of two columns, or skip and count",
        choices=get_args(Policy),
    )
    line_ends_in_text: bool = flag(False, "quoted texts may span lines; line ends are removed")
    max_record_length: int = flag(limits.LONGEST_PROTEIN, limits.HELP)
    count_relatives: bool = flag(
        True, "search held-out proteins in training, up to 100,000 proteins, with MMseqs2 if it is installed"
    )
    seed: int = flag(42, "seed of the choice of splits")
    overwrite: bool = flag(False, "replace an existing output")
    verify: bool = flag(False, "read a complete output and compare its checksums")

    def missing(self) -> Iterator[Missing]:
        if self.pad_to_max_length and self.max_seq_length is None:
            yield Missing("--max_seq_length", "--pad_to_max_length True needs it", "512")

    @property
    def clustered(self) -> bool:
        return self.cluster is not None or self.cluster_table is not None

    def check(self) -> None:
        check_tokenizer(self.tokenizer_name)
        if self.max_seq_length is not None and self.max_seq_length < 3:
            raise UserError(f"--max_seq_length {self.max_seq_length}: at least 3 (<cls>, a residue, <eos>)")
        self.require_at_least(1, "preprocessing_num_workers")
        clusters = "--cluster_table" if self.cluster_table else "--cluster"
        if self.clustered and not self.line_by_line:
            raise UserError(f"{clusters} needs --line_by_line True: a chunk belongs to no cluster")
        if self.clustered and self.line_ends_in_text:
            raise UserError(f"--line_ends_in_text does not go with {clusters}: remove the line ends first")
        if self.cluster is not None and self.cluster_table:
            raise UserError("--cluster and --cluster_table: give one of them")
        if self.cluster is not None and not 0 < self.cluster <= 1:
            raise UserError(f"--cluster {self.cluster}: an identity above 0 and up to 1, as 0.5")
        limits.check_record_length(self.max_record_length)
        self.require_at_least(0, "seed")


def describe(args: Arguments, files: list[Path]) -> dict:
    """All that the output depends on: an output made from the same is reused."""
    deciding = (
        "train_size",
        "validation_size",
        "test_size",
        "max_seq_length",
        "pad_to_max_length",
        "line_by_line",
        "seed",
    )
    about_input = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    # Earlier versions recorded the default as HELD_OUT; the same number given as a flag is used exactly.
    held_out = ("validation_size", "test_size")
    given = [name for name in held_out if getattr(args, name) == HELD_OUT]
    optional = {"said": given} if given else {}
    if args.on_bad_record != "error":
        optional["on_bad_record"] = args.on_bad_record
    if args.gaps is not None:
        optional["gaps"] = args.gaps
    if args.line_ends_in_text:
        optional["line_ends_in_text"] = True
    if args.cluster_table:
        table = Path(args.cluster_table)
        optional["cluster_table"] = content_hash(table) if table.is_file() else None
    by_clusters = {"held_out_clusters": HELD_OUT_CLUSTERS} if args.clustered else {}
    if args.cluster is not None:
        optional["cluster"] = args.cluster
        by_clusters["mmseqs_flags"] = COMPONENTS
    now = {
        "input": about_input | {"content": combined_hash(files)},
        **{name: getattr(args, name) for name in deciding},
        **{name: HELD_OUT for name in held_out if getattr(args, name) is None},
        **optional,
        **by_clusters,
    }
    if by_clusters and not args.overwrite:
        output = Path(args.output_dir) / "arrow"
        of_0_4 = json.loads(json.dumps({name: value for name, value in now.items() if name not in by_clusters}))
        if (read_record(output) or {}).get("made_from") == of_0_4:
            logger.warning(
                "%s was split by an earlier version: relatives may stand on both sides, and one family may fill a "
                "held-out split: --overwrite makes it anew",
                output,
            )
            return of_0_4
    return now


def cleaner_of(path: Path, args: Arguments) -> Cleaner:
    """Of a file, with its own count of bad records."""
    return Cleaner(str(path), args.gaps, BadRecords(args.on_bad_record))


def rows_of(path: Path, cleaner: Cleaner, args: Arguments) -> Iterator[pa.RecordBatch]:
    return csv_records.read_rows(path, cleaner, args.line_ends_in_text, args.max_record_length)


def count_records(build: Build, files: list[Path], args: Arguments) -> tuple[list[int], BadRecords]:
    """Number of valid records of every file, and the bad ones."""
    if (noted := build.done("records")) is None:
        bad_records = BadRecords(args.on_bad_record)
        # With "error", the first bad record stops the run when it is encoded.
        cleaners = [
            Cleaner(str(path), args.gaps, bad_records) if args.on_bad_record == "skip" else None for path in files
        ]
        limits_of_rows = args.line_ends_in_text, args.max_record_length
        counts = [count_rows(path, bad, *limits_of_rows) for path, bad in zip(files, cleaners, strict=True)]
        noted = {"counts": counts, "bad": bad_records.state}
        build.note("records", noted)
    return noted["counts"], BadRecords(args.on_bad_record, **noted["bad"])


def finish_split(build: Build, split: str, pieces: list[Piece], chunker: Chunker | None) -> None:
    """Make the split's directory from its pieces, once."""
    directory = build.paths["arrow"] / split
    if build.done(f"finished {split}"):
        return
    if chunker is None:
        assemble(directory, pieces, build.scratch, TOKEN_FEATURES)
    else:
        shutil.rmtree(directory, ignore_errors=True)
        writer = DatasetWriter(directory, TOKEN_FEATURES)
        for rows in read_pieces(pieces, build.scratch):
            writer.write(chunker.add(rows))
        writer.write(chunker.finish())
        writer.close()
    build.note(f"finished {split}", True)


def note_relatives(args: Arguments, build: Build, sizes: list[int]) -> None:
    """Count the held-out proteins that have a relative in training, once, for the record. sizes: of the splits."""
    held_out = [split for split, size in zip(SPLITS[1:], sizes[1:], strict=True) if size]
    if not (args.count_relatives and args.line_by_line and sizes[0] and held_out):
        return
    if sizes[0] > SEARCHED and args.cluster is None:
        again = f"python -m extras.prepare.relatives {args.output_dir}"
        logger.info("Relatives of held-out proteins in train, of %s: count them by %s", f"{sizes[0]:,}", again)
        return
    if (counts := build.done("relatives")) is None:
        threads = usable_threads(args.preprocessing_num_workers)
        identity = IDENTITY if args.cluster is None else args.cluster
        scratch = build.scratch / "relatives"
        counts = count_relatives(build.paths["arrow"], held_out, identity, scratch, threads)
        build.note("relatives", counts)
    build.results["relatives"] = counts


def tokenize(args: Arguments, files: list[Path], build: Build) -> None:
    logger.info("Loading csv files from %s", args.input_dir)
    sizes_of = functools.partial(
        split_sizes, train=args.train_size, validation=args.validation_size, test=args.test_size
    )
    if args.clustered:
        if args.cluster is None:
            table = Path(args.cluster_table)
        else:
            threads = usable_threads(args.preprocessing_num_workers)
            read = lambda path: rows_of(path, cleaner_of(path, args), args)  # noqa: E731
            table = cluster_records(build, files, read, args.cluster, threads)
        logger.info("Splitting dataset by the clusters of %s", args.cluster_table or "MMseqs2")
        counts, sizes, labels, bad_records = split_by_clusters(
            *(build, files, table, sizes_of, args.train_size is None, args.seed, args.on_bad_record),
            by_number=args.cluster is not None,
            max_record=args.max_record_length,
            gaps=args.gaps,
        )
    else:
        counts, bad_records = count_records(build, files, args)
        logger.info("Splitting dataset")
        sizes = sizes_of(sum(counts))
        labels = split_labels(sum(counts), sizes, args.seed)
    records = sum(counts)
    logger.info("%s records in %d files", f"{records:,}", len(files))
    logger.info("train %s, validation %s, test %s records", *(f"{size:,}" for size in sizes))

    truncate, pad, chunkers = args.max_seq_length, args.pad_to_max_length, [None] * len(SPLITS)
    if args.line_by_line:
        logger.info("Processing line by line")
    else:
        length = args.max_seq_length or 1024
        logger.info("Concatenating records and cutting them into chunks of %d tokens", length)
        chunkers = [Chunker(length, pad) for _ in SPLITS]
        truncate, pad = None, False
    workers = usable_threads(args.preprocessing_num_workers)
    with tqdm(total=records, unit=" records", mininterval=0.5 if sys.stderr.isatty() else 10.0) as bar:

        def progress(records: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(records)

        encode = functools.partial(encode_rows, max_seq_length=truncate, pad=pad)
        read, cleaner = functools.partial(rows_of, args=args), functools.partial(cleaner_of, args=args)
        encoder = FileEncoder(build, encode, read, cleaner, workers, len(files), progress)
        made = list(encoder.run(zip(files, labels_by_file(labels, counts), strict=True)))
    unknown, with_unknown = (sum(of_file[key] for of_file in made) for key in ("unknown", "records_with_unknown"))
    changes = Changes()
    for of_file in made:
        changes.add(of_file.get("changes", {}))  # none of a file that an earlier version encoded
    duplicates = mark_copies(build, len(files), sizes)
    pieces = [
        {split: [Piece(*piece) for piece in of_file["pieces"].get(split, ())] for split in SPLITS} for of_file in made
    ]
    pieces = drop_copies(build, pieces, workers)
    for split, chunker in zip(SPLITS, chunkers, strict=True):
        finish_split(build, split, [piece for of_file in pieces for piece in of_file[split]], chunker)
    if args.clustered:
        publish_indices(build, open_copies(build))
    write_dataset_dict(build.paths["arrow"], list(SPLITS))

    sizes = np.subtract(sizes, duplicates.left_out).tolist()
    build.results |= {"records": sum(sizes), **dict(zip(SPLITS, sizes, strict=True))}
    build.results |= {
        "copies_left_out": dict(zip(SPLITS, duplicates.left_out, strict=True)),
        "duplicates_kept": dict(zip(SPLITS, duplicates.repeated, strict=True)),
        "unknown_characters": unknown,
        "records_with_unknown": with_unknown,
        "bad_records": bad_records.count,
        "changes": changes.state,
    }
    note_relatives(args, build, sizes)
    write_report(build, key_files(build, len(files)), open_copies(build), truncate)
    changes.report(f"--input_dir {args.input_dir}")
    bad_records.report()


def main() -> None:
    logger.info("Parsing arguments")
    args = parse_arguments(__doc__, Arguments)
    files = csv_files(Path(args.input_dir))
    with building(Path(args.output_dir), ["arrow"], describe(args, files), args.overwrite, args.verify) as build:
        if not build.paths:
            return
        tokenize(args, files, build)
    logger.info("Save complete")


if __name__ == "__main__":
    run(main, resumable=True)
