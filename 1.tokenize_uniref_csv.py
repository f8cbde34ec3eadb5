#!/usr/bin/env python3
"""csv/*.csv (`id,text`) to processed/arrow/{train,validation,test}: ESM-2 token ids, `<cls> residues <eos>`, uint8.

    python 1.tokenize_uniref_csv.py --input_dir DIR/csv --output_dir DIR/processed

`datasets.load_from_disk` opens OUTPUT_DIR/arrow and each split below it. Splits are disjoint, drawn uniformly from all
records and depend on --seed; training records keep the order of the CSV files. Exact copies of held-out proteins are
dropped from training. By default nothing is truncated or padded. data_report.json has lengths, duplicates and unknown
characters. OUTPUT_DIR/arrow is always complete; once it exists the same command does nothing.
"""

import functools
import itertools
import json
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from common.cli import UserError, run
from common.data import GAPS_HELP, Gaps
from common.files.content_hash import combined_hash, content_hash
from common.flags import Flags, Missing, flag, parse_arguments
from extras.prepare.cluster_splits import COMPONENTS, by_table, cluster_records, publish_indices, split_by_clusters
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
from extras.prepare.shards import ENCODED, EncodedFile, Shard, read_shards, split_files, write_results
from extras.prepare.sources import compression as limits
from extras.prepare.sources import csv_records
from extras.prepare.sources.csv_records import count_rows, csv_files
from extras.prepare.sources.records import BadRecords, Policy
from extras.prepare.sources.residues import Changes, Cleaner
from extras.prepare.splits import (
    HELD_OUT,
    HELD_OUT_CLUSTERS,
    SPLITS,
    Joined,
    labels_by_file,
    of_clusters,
    split_labels,
    split_sizes,
)

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
    shard: str | None = flag(
        None, "I/N: encode every N-th input file from the I-th (from 0) on, for --merge, into OUTPUT_DIR/shards/I-of-N"
    )
    merge: int | None = flag(None, "N: make OUTPUT_DIR/arrow of N complete shards: the same bytes as without shards")
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
        if self.shard is not None:
            Shard.of(self.shard)
            if self.merge is not None:
                raise UserError("--shard and --merge: run all shards, then --merge")
        if self.merge is not None:
            self.require_at_least(1, "merge")


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


def describe_shard(args: Arguments, files: list[Path]) -> dict:
    """All that the encoded files depend on, whatever becomes of them."""
    of_encoding = ("max_seq_length", "pad_to_max_length", "line_by_line", "on_bad_record", "gaps", "line_ends_in_text")
    sizes = [[path.name, path.stat().st_size] for path in files]
    return {"input": sizes} | {name: getattr(args, name) for name in of_encoding}


def cleaner_of(path: Path, args: Arguments) -> Cleaner:
    """Of a file, with its own count of bad records."""
    return Cleaner(str(path), args.gaps, BadRecords(args.on_bad_record))


def rows_of(path: Path, cleaner: Cleaner, args: Arguments) -> Iterator[pa.RecordBatch]:
    return csv_records.read_rows(path, cleaner, args.line_ends_in_text, args.max_record_length)


def quick_to_count(files: list[Path]) -> bool:
    """Whether their records can be counted in a fraction of the time that reading them takes."""
    return all(".csv" in path.suffixes for path in files)


def count_records(build: Build, files: list[Path], args: Arguments) -> list[int]:
    """Number of valid records of every file."""
    if (noted := build.done("records")) is None:
        # With "error", the first bad record stops the run when it is encoded.
        cleaners = [cleaner_of(path, args) if args.on_bad_record == "skip" else None for path in files]
        limits_of_rows = args.line_ends_in_text, args.max_record_length
        counts = [count_rows(path, bad, *limits_of_rows) for path, bad in zip(files, cleaners, strict=True)]
        noted = {"counts": counts}
        build.note("records", noted)
    return noted["counts"]


def read_ids(files: list[Path], args: Arguments, counts: list[int]) -> Iterator[pa.Array]:
    """The ids of all records, block by block. counts: gets the number of records of every file."""
    for path in files:
        counts.append(0)
        for rows in rows_of(path, cleaner_of(path, args), args):
            counts[-1] += rows.num_rows
            yield rows.column("id")


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


def encode(
    args: Arguments, build: Build, root: Path, files: dict[int, Path], labels: Iterator[np.ndarray] | None, total: int
) -> list[dict]:
    """What FileEncoder returns for the files, by their numbers. labels: of each file's records, if they are known;
    total: number of records, 0 if it is not."""
    if args.line_by_line:
        logger.info("Processing line by line")
        truncate, pad = args.max_seq_length, args.pad_to_max_length
    else:
        logger.info("Concatenating records and cutting them into chunks of %d tokens", args.max_seq_length or 1024)
        truncate, pad = None, False
    workers = usable_threads(args.preprocessing_num_workers)
    mininterval = 0.5 if sys.stderr.isatty() else 10.0
    with tqdm(total=total or None, unit=" records", mininterval=mininterval) as bar:

        def progress(records: int, tokens: int) -> None:
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
            bar.update(records)

        rows = functools.partial(encode_rows, max_seq_length=truncate, pad=pad)
        read, cleaner = functools.partial(rows_of, args=args), functools.partial(cleaner_of, args=args)
        encoder = FileEncoder(build, root, rows, read, cleaner, workers, len(files), progress)
        labels = itertools.repeat(None) if labels is None else labels
        return list(encoder.run((*item, of_file) for item, of_file in zip(files.items(), labels, strict=False)))


def encode_shard(args: Arguments, files: list[Path], build: Build, shard: Shard) -> None:
    mine = {number: path for number, path in enumerate(files) if shard.has(number)}
    logger.info("Shard %d of %d: %d of %d files", *shard, len(mine), len(files))
    made = encode(args, build, build.paths[ENCODED], mine, None, 0)
    write_results(build, made, mine)


def encode_first(args: Arguments, files: list[Path], build: Build) -> list[EncodedFile]:
    """The files encoded without their splits: by shards, or now."""
    if args.merge is not None:
        return read_shards(Path(args.output_dir), args.merge, len(files), describe_shard(args, files))
    root = build.scratch / ENCODED
    root.mkdir(exist_ok=True)
    made = encode(args, build, root, dict(enumerate(files)), None, 0)
    return [EncodedFile(number, root, of_file) for number, of_file in enumerate(made)]


def clusters_of(
    args: Arguments, files: list[Path], build: Build, ids: Callable[[], Iterator[pa.Array]], encoded: list[EncodedFile]
) -> tuple[Callable[[Path], Joined], str] | None:
    """How to group the records by clusters, and where these come from; None to draw records one by one."""
    if args.cluster_table:
        return by_table(Path(args.cluster_table), ids, args.seed), f"--cluster_table {args.cluster_table}"
    if args.cluster is not None:
        threads = usable_threads(args.preprocessing_num_workers)
        read = lambda path: rows_of(path, cleaner_of(path, args), args)  # noqa: E731
        table = cluster_records(build, files, read, args.cluster, threads)
        return by_table(table, ids, args.seed, by_number=True), "MMseqs2"
    if encoded and args.line_by_line and all(file.has_clusters for file in encoded):
        clusters = (block for file in encoded for block in file.clusters())
        return functools.partial(of_clusters, clusters, args.seed), "the input's column of clusters"
    return None


class Plan(NamedTuple):
    """Records of each split, and the split of every record of each file, uint8."""

    sizes: tuple[int, ...]
    counts: list[int]  # records of each file
    labels: Iterator[np.ndarray]
    clustered: bool


def plan_splits(args: Arguments, files: list[Path], build: Build, encoded: list[EncodedFile]) -> Plan:
    """Draw the splits of records that are encoded already, or, where none is, are to be counted."""
    sizes_of = functools.partial(
        split_sizes, train=args.train_size, validation=args.validation_size, test=args.test_size
    )
    counts = [file.made["records"] for file in encoded]
    ids = lambda: (block for file in encoded for block in file.ids())  # noqa: E731
    if not encoded:
        ids = functools.partial(read_ids, files, args, counts)
    if clusters := clusters_of(args, files, build, ids, encoded):
        logger.info("Splitting dataset by the clusters of %s", clusters[1])
        sizes, windows = split_by_clusters(build, *clusters, sizes_of, args.train_size is None)
        counts = counts or count_records(build, files, args)  # of a run that was killed after this
    else:
        counts = counts or count_records(build, files, args)
        logger.info("Splitting dataset")
        sizes = sizes_of(sum(counts))
        windows = split_labels(sum(counts), sizes, args.seed)
    logger.info("%s records in %d files", f"{sum(counts):,}", len(files))
    logger.info("train %s, validation %s, test %s records", *(f"{size:,}" for size in sizes))
    return Plan(tuple(sizes), counts, labels_by_file(windows, counts), clusters is not None)


def tokenize(args: Arguments, files: list[Path], build: Build) -> None:
    logger.info("Loading files from %s", args.input_dir)
    # Records whose number is not known are encoded first, all of them, and counted on the way. With --train_size most
    # may be left out: they are counted by a pass over the input, and so are those whose clusters a table must name.
    first = args.merge is not None or not (quick_to_count(files) or args.train_size is not None or args.clustered)
    encoded = encode_first(args, files, build) if first else []
    plan = plan_splits(args, files, build, encoded)
    if encoded:
        made = [file.made for file in encoded]
        split = split_files(build, encoded, plan.labels, usable_threads(args.preprocessing_num_workers))
    else:
        made = encode(args, build, build.scratch, dict(enumerate(files)), plan.labels, sum(plan.counts))
        split = ({name: [Piece(*piece) for piece in of] for name, of in file["pieces"].items()} for file in made)
    pieces = [{name: of_file.get(name, []) for name in SPLITS} for of_file in split]
    finish(args, build, plan, made, pieces)


def finish(args: Arguments, build: Build, plan: Plan, made: list[dict], pieces: list[dict[str, list[Piece]]]) -> None:
    """Leave copies out, make the splits' directories of the pieces of each file, and write what is known of them."""
    changes, bad_records = Changes(), BadRecords(args.on_bad_record)
    for of_file in made:  # an earlier version noted neither
        changes.add(of_file.get("changes", {}))
        bad_records.add(of_file.get("bad", {}))
    workers = usable_threads(args.preprocessing_num_workers)
    duplicates = mark_copies(build, len(made), plan.sizes)
    pieces = drop_copies(build, pieces, workers)
    chunks = None if args.line_by_line else args.max_seq_length or 1024
    for split in SPLITS:
        chunker = Chunker(chunks, args.pad_to_max_length) if chunks else None
        finish_split(build, split, [piece for of_file in pieces for piece in of_file[split]], chunker)
    if plan.clustered:
        publish_indices(build, open_copies(build))
    write_dataset_dict(build.paths["arrow"], list(SPLITS))

    sizes = np.subtract(plan.sizes, duplicates.left_out).tolist()
    build.results |= {"records": sum(sizes), **dict(zip(SPLITS, sizes, strict=True))}
    build.results |= {
        "copies_left_out": dict(zip(SPLITS, duplicates.left_out, strict=True)),
        "duplicates_kept": dict(zip(SPLITS, duplicates.repeated, strict=True)),
        "unknown_characters": sum(of_file["unknown"] for of_file in made),
        "records_with_unknown": sum(of_file["records_with_unknown"] for of_file in made),
        "bad_records": bad_records.count,
        "changes": changes.state,
    }
    note_relatives(args, build, sizes)
    truncate = args.max_seq_length if args.line_by_line else None
    write_report(build, key_files(build, len(made)), open_copies(build), truncate)
    changes.report(f"--input_dir {args.input_dir}")
    bad_records.report()


def main() -> None:
    logger.info("Parsing arguments")
    args = parse_arguments(__doc__, Arguments)
    files = csv_files(Path(args.input_dir))
    output_dir, names, made_from = Path(args.output_dir), ["arrow"], describe(args, files)
    shard = Shard.of(args.shard) if args.shard else None
    if shard:
        output_dir, names, made_from = shard.directory(output_dir), [ENCODED], describe_shard(args, files)
    with building(output_dir, names, made_from, args.overwrite, args.verify) as build:
        if not build.paths:
            return
        if shard:
            encode_shard(args, files, build, shard)
        else:
            tokenize(args, files, build)
    logger.info("Save complete")


if __name__ == "__main__":
    run(main, resumable=True)
