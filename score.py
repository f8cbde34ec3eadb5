#!/usr/bin/env python3
r"""Score mutations with a model that you trained or any ESM-2: reads a CSV, and writes it with two more columns.

python score.py --model_name_or_path out/final_model --fasta protein.fasta --mutations mutants.csv \
    --output scored.csv

A row's mutations are in the column `mutant`: A24G, or A24G:K30R, whose score is the sum of the two.
masked_marginal: log p(mutant) - log p(wild type) in nats, with the residue masked; wild_type_marginal: without
masks, one pass a protein. Above zero the model prefers the mutant. docs/after.md has more.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import csv
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from common.cli import UserError, one_line, run
from common.files.json_files import content_hash, replace_flushed
from common.flags import Missing, flag, parse_arguments
from common.models.esm2.config import load_config
from common.models.layers.hf_directory import model_hash
from extras.inference.encoder import Encoder, EncoderFlags, look_through
from extras.inference.mutations import Variant, parse_variant, quoted, score
from extras.sources.fasta import read_fasta

logger = logging.getLogger(__name__)
COLUMNS = {"masked_marginal": True, "wild_type_marginal": False}
PROTEIN = "protein"
LONGEST_LINE = 1 << 20  # characters
SETTINGS = (
    *("max_seq_length", "bf16", "mutation_column", "protein_column", "first_residue"),
    *("wild_type_marginal_only", "column_prefix"),
)


@dataclass
class Arguments(EncoderFlags):
    required = ("fasta", "mutations", "output")

    fasta: str | None = flag(None, "The wild type; or several, which the column `protein` names.")
    mutations: str | None = flag(None, "The CSV.")
    output: str | None = flag(None, "The CSV with the scores.")
    mutation_column: str = flag("mutant", "The column of the mutations.")
    protein_column: str = flag(PROTEIN, "The column of the ids in --fasta; needed if it has several.")
    first_residue: int = flag(1, "The number that the CSV gives the first residue.")
    wild_type_marginal_only: bool = flag(False, "Only the cheap score: one pass per window of a protein.")
    column_prefix: str = flag("", "Prefix of the names of the new columns, for example the model's name.")
    overwrite: bool = flag(False, "Replace an existing --output.")

    def missing(self) -> Iterator[Missing]:
        for name, what in (("fasta", "the wild type"), ("mutations", "the CSV"), ("output", "where the scores go")):
            if not getattr(self, name):
                yield Missing(f"--{name}", what, {"fasta": "protein.fasta"}.get(name, f"{name}.csv"))

    def check(self) -> None:
        for name in ("fasta", "mutations"):
            if not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")
            for path in written(Path(self.output)):
                if path.exists() and path.samefile(getattr(self, name)):
                    raise UserError(f"--output {self.output}: it would replace --{name}: choose another name")
        output = Path(self.output)
        if output.exists() and not output.is_file():
            raise UserError(f"--output {output}: exists and is not a file: choose another name")
        there = next(path for path in output.absolute().parents if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UserError(f"--output {output}: {there} is not a directory that you can write to: choose another")


def written(output: Path) -> list[Path]:
    """All files that a run writes: the scores, the record of their input, and the partial files of both."""
    final = (output, output.with_name(f"{output.name}.json"))
    return [*final, *(path.with_name(f"{path.name}.partial") for path in final)]


def read_lines(file: TextIO, path: str) -> Iterator[str]:
    """The lines of a table. UserError for a line over LONGEST_LINE, which could exhaust the memory."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"--mutations {path}: line {number} is longer than {LONGEST_LINE:,} characters")
        yield line


def read_rows(path: str) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and the rows."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.DictReader(read_lines(file, path))
            rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"--mutations {path}: not a CSV file: {one_line(error)}") from error
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UserError(f"--mutations {path}: row {line} has another number of fields than the header")
    if not rows:
        raise UserError(f"--mutations {path}: it has no rows")
    return list(reader.fieldnames), rows


def read_proteins(path: str) -> dict[str, bytes]:
    """{id: residues}. UserError for a repeated id, and for text that is not protein."""
    totals = look_through(path)
    totals.report(f"--fasta {path}")
    proteins: dict[str, bytes] = {}
    for name, text in read_fasta(path):
        if (name := name.decode()) in proteins:
            raise UserError(f"--fasta {path}: the id {quoted(name)} is repeated: rename one, or remove it")
        proteins[name] = text
    return proteins


def check_columns(args: Arguments, names: list[str], new: list[str], proteins: dict[str, bytes]) -> None:
    """UserError unless the CSV has the required columns and none of the new ones."""
    where = f"--mutations {args.mutations}"
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"{where}: the column {quoted(twice[0])} is repeated: rename one")
    if args.mutation_column not in names:
        there = ", ".join(map(quoted, names))
        raise UserError(f"{where}: no column {args.mutation_column!r}, only {there}: give --mutation_column")
    if args.protein_column not in names and (len(proteins) > 1 or args.protein_column != PROTEIN):
        raise UserError(
            f"--fasta {args.fasta} has {len(proteins)} proteins and {args.mutations} no column "
            f"{args.protein_column!r} to tell them apart: add it, or give a --fasta of one"
        )
    for name in new:
        if name in names:
            raise UserError(f"{where}: it has a column {name!r} already: rename it, or give another --column_prefix")


def variants_of(args: Arguments, names: list[str], rows: list[dict[str, str]], proteins: dict) -> list[Variant]:
    """The variant of each row. UserError names the first row with an unknown protein or an invalid mutation."""
    variants = []
    for line, row in enumerate(rows, 2):
        where = f"{args.mutations}, row {line}"
        name = row[args.protein_column] if args.protein_column in names else next(iter(proteins))
        if name not in proteins:
            raise UserError(
                f"{where}: the {args.protein_column} {quoted(name)} is not in {args.fasta}: correct it, or rename the "
                "column if it is about something else"
            )
        variants.append(parse_variant(row[args.mutation_column], proteins[name], where, args.first_residue))
    return variants


def input_hashes(args: Arguments) -> dict[str, str]:
    return {f"{name}_hash": content_hash(getattr(args, name)) for name in ("fasta", "mutations")}


def is_finished(output: Path, record: Path, made_from: dict) -> bool:
    """Whether `output` has the scores of this input. UserError if it has any other content."""
    if not output.exists():
        return False
    try:
        recorded = json.loads(record.read_text())
        recorded_input, digest = recorded["made_from"], recorded["sha256"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        why = "exists without a record of what it was made from"
    else:
        if recorded_input == made_from and digest == content_hash(output):
            return True
        changed = recorded_input == made_from
        why = "has changed since it was written" if changed else "was made from other input or arguments"
    raise UserError(f"--output {output}: {why}: give --overwrite to replace it, or another --output")


def write(output: Path, record: Path, header: list[str], rows: list[dict], about: dict) -> None:
    """Write the scores and their record (`about` and a checksum): flushed before they get their names."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with replace_flushed(output) as partial:
            with open(partial, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, header)
                writer.writeheader()
                writer.writerows(rows)
            # The record first: scores are never beside a record of other input.
            with replace_flushed(record) as path:
                path.write_text(json.dumps(about | {"sha256": content_hash(partial)}, indent=1))
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}: make room, or choose another --output") from error


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    columns = {
        f"{args.column_prefix}{name}": masked
        for name, masked in COLUMNS.items()
        if not (masked and args.wild_type_marginal_only)
    }
    hashes = input_hashes(args)
    names, rows = read_rows(args.mutations)
    proteins = read_proteins(args.fasta)
    check_columns(args, names, list(columns), proteins)
    variants = variants_of(args, names, rows, proteins)
    output, record, *_ = written(Path(args.output))
    load_config(args.model_name_or_path)  # for its error messages
    hashes["model_hash"] = model_hash(args.model_name_or_path)
    made_from = hashes | {name: getattr(args, name) for name in SETTINGS}
    if not args.overwrite and is_finished(output, record, made_from):
        logger.info("%s was made from the same input and arguments: nothing to do", output)
        return
    encoder = Encoder(args)
    if hashes != input_hashes(args) | {"model_hash": model_hash(args.model_name_or_path)}:
        raise UserError("the model, --fasta or --mutations changed while they were read: start again")
    with tqdm(unit=" tokens", unit_scale=True, mininterval=0.5 if sys.stderr.isatty() else 10.0) as bar:
        scores = {name: score(encoder, variants, masked, bar.update) for name, masked in columns.items()}
    scored = [row | {name: f"{scores[name][n]:.6f}" for name in columns} for n, row in enumerate(rows)]
    about = {"made_from": made_from, "model_name_or_path": args.model_name_or_path}
    write(output, record, [*names, *columns], scored, about)
    logger.info("%s variants scored: %s", f"{len(rows):,}", output)


if __name__ == "__main__":
    run(main)
