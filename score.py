#!/usr/bin/env python3
r"""Scores of mutations, by a model that you have trained or any ESM-2: a CSV in, the same with two columns more out.

python score.py --model_name_or_path out/final_model --fasta protein.fasta --mutations mutants.csv \
    --output scored.csv

A row's mutations stand in the column `mutant`: A24G, or A24G:K30R. masked_marginal: log p(mutant) - log p(wild type)
in nats, with the mutated residues hidden; wild_type_marginal: with all of them seen, in one pass. Above zero the model
likes the mutant better. docs/after.md has more.
"""

from __future__ import annotations

import common  # noqa: F401  # isort: skip  (before torch: see there)
import csv
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.cli import Missing, UserError, flag, parse_arguments, run
from common.inference.encoder import Encoder, EncoderFlags
from common.inference.mutations import Variant, parse_variant, score, window_of
from common.sources.fasta import read_fasta

logger = logging.getLogger(__name__)
COLUMNS = {"masked_marginal": True, "wild_type_marginal": False}


@dataclass
class Arguments(EncoderFlags):
    needed = ("fasta", "mutations", "output")

    fasta: str | None = flag(None, "The wild type; or several, which the column `protein` tells apart.")
    mutations: str | None = flag(None, "The CSV.")
    output: str | None = flag(None, "The CSV with the scores.")
    mutation_column: str = flag("mutant", "The column of the mutations.")
    protein_column: str = flag("protein", "The column of the ids in --fasta; needed where it has several.")
    first_residue: int = flag(1, "The number that the CSV gives the first residue.")
    wild_type_marginal_only: bool = flag(False, "Only the cheap score: one pass a protein.")

    def missing(self) -> Iterator[Missing]:
        for name, what in (("fasta", "the wild type"), ("mutations", "the CSV"), ("output", "where the scores go")):
            if not getattr(self, name):
                yield Missing(f"--{name}", what, {"fasta": "protein.fasta"}.get(name, f"{name}.csv"))

    def check(self) -> None:
        for name in ("fasta", "mutations"):
            if not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")


def read_rows(path: str) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and the rows."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.DictReader(file)
            rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"--mutations {path}: no CSV: {error}") from error
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UserError(f"--mutations {path}: row {line} has not as many fields as the header")
    if not rows:
        raise UserError(f"--mutations {path}: there is no row in it")
    return list(reader.fieldnames), rows


def variants_of(args: Arguments, names: list[str], rows: list[dict[str, str]]) -> list[Variant]:
    proteins = {name.decode(): text for name, text in read_fasta(args.fasta)}
    if args.mutation_column not in names:
        raise UserError(
            f"--mutations {args.mutations}: no column {args.mutation_column!r}: there are {', '.join(names)}"
        )
    if len(proteins) > 1 and args.protein_column not in names:
        raise UserError(
            f"--fasta {args.fasta} has {len(proteins)} proteins and {args.mutations} no column "
            f"{args.protein_column!r} to tell them apart: add it, or give a --fasta of one"
        )
    found = []
    for line, row in enumerate(rows, 2):
        where = f"{args.mutations}, row {line}"
        name = row[args.protein_column] if len(proteins) > 1 else next(iter(proteins))
        if name not in proteins:
            raise UserError(f"{where}: {name!r} is not in {args.fasta}")
        variant = parse_variant(row[args.mutation_column] or "", proteins[name], where, args.first_residue)
        try:
            window_of(variant, args.max_seq_length)
        except ValueError as error:
            raise UserError(f"{where}: {error}: raise --max_seq_length") from None
        found.append(variant)
    return found


def main() -> None:
    (args,) = parse_arguments(__doc__, Arguments)
    names, rows = read_rows(args.mutations)
    variants = variants_of(args, names, rows)
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(args)
    columns = [name for name in COLUMNS if not (args.wild_type_marginal_only and COLUMNS[name])]
    with tqdm(unit=" tokens", unit_scale=True, mininterval=0.5 if sys.stderr.isatty() else 10.0) as bar:
        scores = {name: score(encoder, variants, COLUMNS[name], bar.update) for name in columns}
    partial = output.with_name(f"{output.name}.partial")
    with open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, [*(name for name in names if name not in columns), *columns], extrasaction="ignore"
        )
        writer.writeheader()
        for number, row in enumerate(rows):
            writer.writerow(row | {name: f"{scores[name][number]:.6f}" for name in columns})
    partial.rename(output)
    logger.info("%s variants scored: %s", f"{len(rows):,}", output)


if __name__ == "__main__":
    run(main)
