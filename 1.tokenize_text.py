#!/usr/bin/env python3
"""Text to OUTPUT_DIR/text/{train,validation}: token ids of documents, each ended by the end-of-text token.

    python 1.tokenize_text.py --dataset texts.jsonl --tokenizer bytes --output_dir DIR

1.tokenize_uniref_csv.py for decoders: takes the --dataset of the training scripts, which then train on --dataset_dir
DIR/text with random access and exact resume. Two bytes a token, or four for a vocabulary of more than 65,536. Without
a validation split, --validation_size of the documents are held out. OUTPUT_DIR/text is always complete; once it exists
the same command does nothing.
"""

import hashlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from common.cli import UserError, run
from common.files.safe_files import write_json_flushed
from common.flags import Flags, Missing, flag, parse_arguments
from extras.families.text.store import TOKENS, describe_tokens
from extras.families.text.tokenizers import BYTES, Tokenizer, load_tokenizer
from extras.prepare.dataset_writer import Piece, assemble, write_dataset_dict
from extras.prepare.encode import usable_threads
from extras.prepare.output_directory import Build, building
from extras.prepare.sources import compression as limits
from extras.prepare.sources.find_files import Source, open_source, with_contents
from extras.prepare.sources.formats import documents
from extras.prepare.sources.sequence_files import check_columns, units_of
from extras.prepare.tokenize_units import UnitOfText, token_features, tokenize_units

logger = logging.getLogger(__name__)
UNITS = 64  # of a split: with fewer files, parquet files are divided into row groups


@dataclass
class Arguments(Flags):
    dataset: str | None = flag(
        None, "file, directory or glob of parquet, JSON lines, CSV or plain text, or a Hub dataset"
    )
    dataset_config_name: str | None = flag(None, "of a dataset with several configurations, the one to read")
    text_column: str = flag("text", "the column, or JSON field, that holds the documents")
    streaming: bool = flag(True, "read a Hub dataset in place; False: download it first")
    tokenizer: str = flag(BYTES, "`bytes` (built in), or a directory or Hub name that AutoTokenizer opens")
    output_dir: str = flag("processed", "the splits go to OUTPUT_DIR/text")
    train_split: str = flag("train", "the split to train on")
    val_split: str = flag("validation", "the split to evaluate on")
    validation_size: float = flag(0.005, "fraction of the documents held out if there is no --val_split")
    max_record_length: int = flag(limits.LONGEST_DOCUMENT, limits.HELP)
    preprocessing_num_workers: int = flag(8, "processes; the result is the same for any")
    seed: int = flag(42, "seed of the choice of held-out documents")
    overwrite: bool = flag(False, "replace an existing output")
    verify: bool = flag(False, "read a complete output and compare its checksums")

    def missing(self) -> Iterator[Missing]:
        if not self.dataset:
            yield Missing("--dataset", "the text to tokenise", "texts.jsonl")

    def check(self) -> None:
        self.require_at_least(1, "preprocessing_num_workers")
        limits.check_record_length(self.max_record_length)
        self.require_at_least(0, "seed")
        if not 0 <= self.validation_size < 1:
            raise UserError(f"--validation_size {self.validation_size}: a fraction of the documents, 0 to below 1")
        if self.train_split == self.val_split:
            raise UserError(f"--train_split and --val_split are both {self.train_split}")


def describe(args: Arguments, source: Source, tokenizer: Tokenizer) -> dict:
    """All that the output depends on: an output made from the same is reused."""
    splits = (args.train_split, args.val_split)
    listing = repr([source.identity(split) for split in splits])
    deciding = ("dataset_config_name", "text_column", "train_split", "val_split", "validation_size", "seed")
    return {
        "text": hashlib.sha256(listing.encode()).hexdigest(),
        "tokenizer": tokenizer.identity,
        **{name: getattr(args, name) for name in deciding},
    }


def units_to_make(args: Arguments, source: Source, revision: str | None) -> list[UnitOfText]:
    """The units of work. They do not depend on the number of processes, so that a run with another number resumes."""
    held_out = 0.0 if args.val_split in source.splits else args.validation_size
    splits = [split for split in (args.train_split, args.val_split) if split in source.splits]
    units = [(unit, split) for split in splits for unit in units_of(source.splits[split], wanted=UNITS)]
    settings = (args.tokenizer, revision, args.seed)
    return [
        UnitOfText(unit, number, split, *settings, held_out if split == args.train_split else 0.0, args.val_split)
        for number, (unit, split) in enumerate(units)
    ]


def tokenize(args: Arguments, units: list[UnitOfText], tokenizer: Tokenizer, build: Build) -> None:
    directory, workers = build.paths["text"], usable_threads(args.preprocessing_num_workers)
    totals = dict.fromkeys(("documents", "tokens", "bytes"), 0)
    made = []
    with tqdm(total=len(units), unit=" units", mininterval=0.5 if sys.stderr.isatty() else 10.0) as bar:
        for result in tokenize_units(units, tokenizer, build, workers):
            made.append(result["pieces"])
            totals = {name: count + result[name] for name, count in totals.items()}
            bar.set_postfix_str(f"{totals['tokens']:,} tokens", refresh=False)
            bar.update(1)
    splits = [split for split in (args.train_split, args.val_split) if any(of_unit.get(split) for of_unit in made)]
    if args.train_split not in splits:
        raise UserError(f"--dataset {args.dataset}: no document in its split {args.train_split}")
    for split in splits:
        if not build.done(f"split {split}"):
            pieces = chain.from_iterable(of_unit.get(split, ()) for of_unit in made)
            assemble(directory / split, [Piece(*piece) for piece in pieces], build.scratch, token_features(tokenizer))
            build.note(f"split {split}", True)
    write_dataset_dict(directory, splits)
    write_json_flushed(directory / TOKENS, describe_tokens(tokenizer), sort_keys=True)
    build.results |= totals
    logger.info(
        "%s documents, %s tokens, %.2f bytes of text a token: %s",
        *(f"{totals['documents']:,}", f"{totals['tokens']:,}", totals["bytes"] / totals["tokens"], ", ".join(splits)),
    )


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    tokenizer, revision = load_tokenizer(args.tokenizer)
    tokenizer.encode([""])  # one of proteins refuses text
    source = open_source(
        *(args.dataset, args.streaming),
        content=documents(args.text_column, args.max_record_length),
        configuration=args.dataset_config_name,
        train=args.train_split,
    )
    for split in (args.train_split, args.val_split):
        check_columns(source.splits.get(split, ()))
    source = with_contents(source, args.train_split, args.val_split)
    made_from = describe(args, source, tokenizer)
    with building(Path(args.output_dir), ["text"], made_from, args.overwrite, args.verify) as build:
        if not build.paths:
            return
        tokenize(args, units_to_make(args, source, revision), tokenizer, build)
    logger.info("Save complete")


if __name__ == "__main__":
    run(main, resumable=True)
