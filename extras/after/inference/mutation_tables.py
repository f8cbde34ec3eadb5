"""Tables of mutations, as CSV: the mutations of each row, its protein, and what was measured."""

from __future__ import annotations

import csv
import io
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from common.cli import UserError, one_line
from extras.after.inference.encoder import alphabet_of
from extras.after.inference.indels import Mutated, edited, has_indel, of_sequence
from extras.after.inference.mutation_scores import (
    Variant,
    amino_acids_of,
    compare,
    parse_variant,
    quoted,
    undo,
    words_of,
)
from extras.prepare.sources.compression import HEAD_BYTES, detect_non_text, open_decompressed, strip_compression
from extras.prepare.sources.proteins import ProteinFlags, read_residues

logger = logging.getLogger(__name__)
MUTANT, PROTEIN = "mutant", "protein"
# ProteinGym's, besides `mutant`.
SEQUENCE, MEASURED = "mutated_sequence", "DMS_score"
SEQUENCES = (SEQUENCE, "sequence")  # columns of whole mutated sequences
# R's and pandas's words for a missing value, in lower case.
MISSING = ("", "na", "n/a", "nan", "-nan", "none", "null", "<na>", "#n/a", "#na", "#n/a n/a")
LONGEST_LINE = 1 << 20  # characters
# {what --leave_out takes: the words for an error}. `_wt` and `_sy` are MaveDB's.
KINDS = {
    "stops": "a stop or frameshift",
    "synonymous": "a synonymous variant",
    "wild_type": "the wild type",
}
NO_RESIDUE = {"_wt": "wild_type", "wt": "wild_type", "": "wild_type"}
NO_RESIDUE |= {"_sy": "synonymous", "p.=": "synonymous", "p.(=)": "synonymous"}
STOP = re.compile(r"\*|Ter|fs")
SAME = re.compile(r"([A-Za-z]|[A-Za-z]{3})-?[0-9]{1,9}(\1|=)")


def is_missing(cell: str) -> bool:
    """Whether a field of a table has no value."""
    return cell.strip().lower() in MISSING


class Columns(NamedTuple):
    """The columns of a table.

    mutant: of its mutations, or of the mutated sequences (is_sequence); protein: of the proteins' ids, if any;
    first_residue: the number of the proteins' first residue; beside: of mutated sequences beside the mutations.
    """

    mutant: str
    is_sequence: bool
    protein: str | None
    first_residue: int = 1
    beside: str | None = None


def read_lines(file: TextIO, where: str) -> Iterator[str]:
    """The lines of a table. UserError for a line over LONGEST_LINE, which could exhaust the memory."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise UserError(f"{where}: line {number} is longer than {LONGEST_LINE:,} characters")
        yield line


def _without_pair(value: Any) -> Any:
    """Without the quotes around a whole value, which R writes in TSV too."""
    is_quoted = isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"'
    return value[1:-1] if is_quoted else value


def _spans_lines(row: dict[Any, Any]) -> bool:
    """Whether a value of a row has a line end."""
    values = (value for cell in row.values() for value in (cell if isinstance(cell, list) else [cell]))
    return any("\n" in value or "\r" in value for value in values if value)


def read_rows(path: str | Path, where: str, has_prose: bool = False) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and the rows of a CSV file, or of a TSV file by its name, plain or compressed; `where`
    begins the errors.

    A row is a line: UserError for a value that goes over a line end, as after a quote that is not closed, and for a
    quote inside a quoted value. In TSV quotes are ordinary characters, but for a pair around a whole value. has_prose:
    columns such as titles are there, where line ends and quotes are in order.
    """
    form: dict[str, Any] = {"strict": not has_prose}
    if strip_compression(str(path).lower()).endswith(".tsv"):
        form |= {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    rows = []
    with open_decompressed(path) as raw, io.TextIOWrapper(raw, newline="", encoding="utf-8-sig") as file:
        if problem := detect_non_text(raw.peek(HEAD_BYTES)[:HEAD_BYTES]):
            raise UserError(f"{where}: not a CSV file: {problem}")
        reader, before = csv.DictReader(read_lines(file, where), **form), 0
        try:
            names = list(reader.fieldnames or [])
            before = reader.line_num
            for row in reader:
                if (
                    not has_prose and reader.line_num - before > 1 and _spans_lines(row)
                ):  # or lines before it are empty
                    raise UserError(
                        f"{where}: line {before + 1}: a value that continues after a line end: is a quote "
                        "not closed? Fix or remove it"
                    )
                before = reader.line_num
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{where}: line {before + 1}: not a CSV file: {one_line(error)}") from error
    if "delimiter" in form:
        names = [_without_pair(name) for name in names]
        rows = [{_without_pair(name): _without_pair(value) for name, value in row.items()} for row in rows]
    for line, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise UserError(f"{where}: row {line} has another number of fields than the header")
    if not rows:
        raise UserError(f"{where}: it has no rows")
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"{where}: the column {quoted(twice[0])} is repeated: rename one")
    return names, rows


def read_texts(fasta: str, model: str, flags: ProteinFlags) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(texts in the model's alphabet, their amino acids) of a FASTA file, by id; the same but for a declared one."""
    alphabet = alphabet_of(model)
    texts = read_residues(fasta, flags=flags, alphabet=alphabet)
    return texts, {name: amino_acids_of(text, alphabet) for name, text in texts.items()}


def columns_of(args: Any, names: list[str], rows: Sequence[dict[str, str]], proteins: dict[str, bytes]) -> Columns:
    """The columns of a table. args: score.py's flags. UserError unless the CSV has those that it needs."""
    where, there = f"--mutations {args.mutations}", ", ".join(map(quoted, names))
    mutant = args.mutation_column
    if mutant == MUTANT and mutant not in names:
        mutant = next((name for name in SEQUENCES if name in names), mutant)
    if mutant not in names:
        raise UserError(f"{where}: no column {mutant!r}, only {there}: give --mutation_column")
    if args.measured_column and args.measured_column not in names:
        raise UserError(f"{where}: no column {args.measured_column!r}, only {there}: correct --measured_column")
    if args.protein_column not in names and (len(proteins) > 1 or args.protein_column != PROTEIN):
        raise UserError(
            f"--fasta {args.fasta} has {len(proteins)} proteins and {args.mutations} no column "
            f"{args.protein_column!r} to tell them apart: add it, or give a --fasta of one"
        )
    protein = args.protein_column if args.protein_column in names else None
    return columns_by(mutant, names, rows, protein, args.first_residue)


def columns_by(
    mutant: str, names: list[str], rows: Sequence[dict[str, str]], protein: str | None = None, first_residue: int = 1
) -> Columns:
    """The columns of a table whose variants are in `mutant`."""
    beside = SEQUENCE if SEQUENCE in names and mutant != SEQUENCE else None
    # ProteinGym's tables of insertions and deletions may repeat the sequence as `mutant`.
    repeats = beside is not None and all(row[mutant] == row[beside] for row in rows)
    return Columns(mutant, mutant in SEQUENCES or repeats, protein, first_residue, beside)


def kind_of(cell: str) -> str | None:
    """Which of `KINDS` a mutation is, as A24G or HGVS; None of those that change residues alone."""
    words = words_of(cell)
    if any(map(STOP.search, words)):
        return "stops"
    is_same = bool(words) and all(map(SAME.fullmatch, words))
    return NO_RESIDUE.get(cell.strip().lower(), "synonymous" if is_same else None)


def kept_lines(
    kinds: Sequence[str], column: str, rows: Sequence[dict[str, str]], path: str | Path
) -> tuple[list[int], dict[str, int]]:
    """(line numbers of the rows that are of none of these kinds, {kind: rows that are}); says how many.

    UserError for other rows that have no score, with the flag that leaves them out, and if no row is left.
    """
    kept, left_out = [], Counter(dict.fromkeys(kinds, 0))
    for line, cell in enumerate((row[column] for row in rows), 2):
        kind = kind_of(cell)
        if kind in kinds:
            left_out[kind] += 1
        elif kind == "stops" or cell.strip() in ("_wt", "_sy"):
            raise UserError(
                f"{path}, row {line}: {quoted(cell)} is {KINDS[kind]}, which has no score: give --leave_out {kind}"
            )
        else:
            kept.append(line)
    if kinds:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in left_out.items())
        logger.info("%s: left out: %s; scored: %s rows", path, counts, f"{len(kept):,}")
    if not kept:
        raise UserError(f"{path}: --leave_out {' '.join(kinds)} leaves no row: give fewer")
    return kept, dict(left_out)


def check_new(path: str, names: list[str], new: list[str]) -> None:
    """UserError for a new column that the CSV has already."""
    for name in new:
        if name in names:
            raise UserError(
                f"--mutations {path}: it has a column {name!r} already: rename it, or give another --column_prefix"
            )


def variants_of(
    columns: Columns,
    rows: Sequence[dict[str, str]],
    proteins: dict[str, bytes],
    path: str | Path,
    fasta: str,
    texts: dict[str, bytes] | None = None,
    lines: Sequence[int] | None = None,
) -> list[Variant | Mutated]:
    """The variant of each row. texts: of the proteins, in the model's alphabet; default: residues. lines: the rows'
    numbers, if they are not all of the file's.

    UserError names the first row with an unknown protein or an invalid mutation."""
    variants: list[Variant | Mutated] = []
    for line, row in zip(lines or range(2, len(rows) + 2), rows, strict=True):
        where = f"{path}, row {line}"
        name, cell = name_of(columns, row, proteins, where, fasta), row[columns.mutant]
        protein = proteins[name]
        if columns.is_sequence:
            variants.append(of_sequence(cell, protein, where))
        elif has_indel(cell):
            variants.append(variant := edited(cell, protein, where, columns.first_residue))
            if columns.beside and row[columns.beside].strip().upper().encode() != variant.sequence:
                raise UserError(
                    f"{where}: {quoted(cell)} does not make its {columns.beside}: correct it, or drop a column"
                )
        else:
            variants.append(parse_variant(cell, protein, where, columns.first_residue))
        if texts is not None and texts[name] != protein:
            if isinstance(variants[-1], Mutated):
                raise UserError(f"{where}: {quoted(cell)}: only substitutions have scores in this model's alphabet")
            variants[-1] = variants[-1]._replace(protein=texts[name])
    return variants


def substitutions_of(
    columns: Columns, rows: Sequence[dict[str, str]], proteins: dict[str, bytes], path: str | Path, fasta: str
) -> list[Variant]:
    """As `variants_of`, and UserError for insertions and deletions too."""
    variants = []
    for line, row in enumerate(rows, 2):
        where = f"{path}, row {line}"
        protein, cell = proteins[name_of(columns, row, proteins, where, fasta)], row[columns.mutant]
        variants.append(
            compare(cell, protein, where)
            if columns.is_sequence
            else parse_variant(cell, protein, where, columns.first_residue)
        )
    return variants


def name_of(columns: Columns, row: dict[str, str], proteins: dict[str, bytes], where: str, fasta: str) -> str:
    """The id of a row's wild type. UserError for an id that the FASTA file does not have."""
    name = row[columns.protein] if columns.protein else next(iter(proteins))
    if name not in proteins:
        raise UserError(
            f"{where}: the {columns.protein} {quoted(name)} is not in {fasta}: correct it, or rename the column "
            "if it is about something else"
        )
    return name


def wild_type_of(rows: Sequence[dict[str, str]], path: Path) -> bytes:
    """The one protein whose mutations the rows are. UserError names the first row that comes of another."""
    wild_type = b""
    for line, row in enumerate(rows, 2):
        of_row = undo(row[MUTANT], row[SEQUENCE], f"{path}, row {line}")
        if wild_type and of_row != wild_type:
            raise UserError(
                f"{path}, row {line}: {quoted(row[MUTANT])}: without it {SEQUENCE} is another protein than in row 2: "
                f"correct it, or put the proteins into {path.with_suffix('.fasta').name}, and a column {PROTEIN!r}"
            )
        wild_type = of_row
    return wild_type


def measured_of(
    column: str,
    rows: Sequence[dict[str, str]],
    path: str | Path,
    otherwise: str = "leave it empty, or name another --measured_column",
    lines: Sequence[int] | None = None,
) -> list[float]:
    """The numbers of a column; NaN where nothing was measured. UserError, which ends with `otherwise`, for anything
    else than finite numbers. lines: as of `variants_of`."""
    values = []
    for line, row in zip(lines or range(2, len(rows) + 2), rows, strict=True):
        cell = row[column].strip()
        try:
            value = math.nan if is_missing(cell) else float(cell)
        except ValueError:
            value = math.inf
        if math.isinf(value):
            raise UserError(f"{path}, row {line}: {column} {quoted(cell)} is not a number: correct it, {otherwise}")
        values.append(value)
    return values
