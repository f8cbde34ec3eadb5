"""csv/*.csv (`id,text`) to processed/arrow/{train,validation,test}: ESM-2 token ids, `<cls> residues <eos>`, uint8.

    python 1.tokenize_uniref_csv.py --input_dir DIR/csv --output_dir DIR/processed

`datasets.load_from_disk` opens OUTPUT_DIR/arrow and each split below it. Splits are disjoint, drawn uniformly from all
records and depend on --seed; training records keep the order of the CSV files. Nothing is truncated or padded unless
asked for. What is under OUTPUT_DIR/arrow is always complete; once it is there the same command does nothing.
"""

import hashlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from common.cli import UserError, parse_arguments, run
from common.csv_records import count_rows, csv_files, read_rows
from common.encode_records import Chunker, check_tokenizer, encode_rows, in_order
from common.output_directory import building
from common.splits import SPLITS, split_labels, split_sizes
from common.token_writer import TOKEN_FEATURES, DatasetWriter, write_dataset_dict

logger = logging.getLogger(__name__)


@dataclass
class Arguments:
    input_dir: str = field(default="csv", metadata={"help": "directory of the CSV files"})
    output_dir: str = field(default="processed", metadata={"help": "the splits go to OUTPUT_DIR/arrow"})
    train_size: float | None = field(
        default=None, metadata={"help": "records, or a fraction; default: all that is left"}
    )
    validation_size: float = field(default=50_000, metadata={"help": "records, or a fraction below 1"})
    test_size: float = field(default=50_000, metadata={"help": "records, or a fraction below 1"})
    max_seq_length: int | None = field(
        default=None, metadata={"help": "truncate to so many tokens; default: keep all"}
    )
    pad_to_max_length: bool = field(default=False, metadata={"help": "pad every record to --max_seq_length"})
    preprocessing_num_workers: int = field(default=8, metadata={"help": "threads; the result is the same for any"})
    tokenizer_name: str = field(
        default="facebook/esm2_t30_150M_UR50D",
        metadata={"help": "any facebook/esm2_*, or a directory with its vocab.txt"},
    )
    line_by_line: bool = field(
        default=True, metadata={"help": "False: concatenate records and cut into chunks of --max_seq_length (or 1024)"}
    )
    seed: int = field(default=42, metadata={"help": "of the choice of splits"})
    overwrite: bool = field(default=False, metadata={"help": "replace an output made from other input or arguments"})

    def __post_init__(self) -> None:
        check_tokenizer(self.tokenizer_name)
        if self.max_seq_length is not None and self.max_seq_length < 3:
            raise UserError(f"--max_seq_length {self.max_seq_length}: at least 3 (<cls>, a residue, <eos>)")
        if self.pad_to_max_length and self.max_seq_length is None:
            raise UserError("--pad_to_max_length True needs --max_seq_length")
        if self.preprocessing_num_workers < 1:
            raise UserError(f"--preprocessing_num_workers {self.preprocessing_num_workers}: at least 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must not be negative")


def describe(args: Arguments, files: list[Path]) -> dict:
    """What decides the output: an output directory made from the same is not made again."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    deciding = (
        "train_size",
        "validation_size",
        "test_size",
        "max_seq_length",
        "pad_to_max_length",
        "line_by_line",
        "seed",
    )
    listing = {"files": len(stats), "bytes": sum(size for _, size, _ in stats)}
    return {
        "input": listing | {"listing": hashlib.sha256(repr(stats).encode()).hexdigest()},
        **{name: getattr(args, name) for name in deciding},
    }


def rows_by_split(files: list[Path], records: int, sizes: tuple, seed: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(split, its rows) of every block of the input, in order."""
    labels_ahead = np.empty(0, np.uint8)
    windows = split_labels(records, sizes, seed)
    for path in files:
        for rows in read_rows(path):
            while len(labels_ahead) < rows.num_rows:
                labels_ahead = np.concatenate([labels_ahead, next(windows)])
            labels, labels_ahead = labels_ahead[: rows.num_rows], labels_ahead[rows.num_rows :]
            for split in range(len(SPLITS)):
                yield split, rows.filter(pa.array(labels == split))


def main() -> None:
    logger.info("Parsing arguments")
    (args,) = parse_arguments(__doc__, Arguments)
    files = csv_files(Path(args.input_dir))
    with building(Path(args.output_dir), ["arrow"], describe(args, files), args.overwrite) as build:
        if not build.paths:
            return
        logger.info("Loading csv files from %s", args.input_dir)
        records = sum(count_rows(path) for path in files)
        logger.info("%s records in %d files", f"{records:,}", len(files))
        logger.info("Splitting dataset")
        sizes = split_sizes(records, args.train_size, args.validation_size, args.test_size)
        logger.info("train %s, validation %s, test %s records", *(f"{size:,}" for size in sizes))

        writers = [DatasetWriter(build.paths["arrow"] / split, TOKEN_FEATURES) for split in SPLITS]
        chunkers = None
        if args.line_by_line:
            logger.info("Processing line by line")
        else:
            length = args.max_seq_length or 1024
            logger.info("Concatenating records and cutting them into chunks of %d tokens", length)
            chunkers = [Chunker(length, args.pad_to_max_length) for _ in SPLITS]
        truncate, pad = (args.max_seq_length, args.pad_to_max_length) if args.line_by_line else (None, False)
        tokens = unknown = records_with_unknown = 0
        items = rows_by_split(files, records, sizes, args.seed)
        bar = tqdm(total=sum(sizes), unit=" records", mininterval=0.5 if sys.stderr.isatty() else 10.0)
        with bar:
            encode = lambda item: (item[0], encode_rows(item[1], truncate, pad))  # noqa: E731
            for split, encoded in in_order(encode, items, args.preprocessing_num_workers):
                writers[split].write(chunkers[split].add(encoded.rows) if chunkers else encoded.rows)
                tokens += encoded.tokens
                unknown += encoded.unknown
                records_with_unknown += encoded.records_with_unknown
                bar.update(encoded.rows.num_rows)
        for split, writer in enumerate(writers):
            if chunkers:
                writer.write(chunkers[split].finish())
            writer.close()
        write_dataset_dict(build.paths["arrow"], list(SPLITS))
        written = sum(writer.bytes for writer in writers)
        build.results |= {"records": sum(sizes), "tokens": tokens, "bytes": written, "unknown_characters": unknown}
        build.results |= {"records_with_unknown": records_with_unknown, **dict(zip(SPLITS, sizes, strict=True))}
        logger.info("%s tokens, %.0f bytes a record", f"{tokens:,}", written / sum(sizes))
        if unknown:
            logger.warning(
                "%s characters in %s records are no residues: <unk>", f"{unknown:,}", f"{records_with_unknown:,}"
            )
    logger.info("Save complete")


if __name__ == "__main__":
    run(main)
