#!/usr/bin/env python3
r"""Score mutations with a model that you trained or any ESM-2: those of a CSV, or all single ones of a protein.

python score.py --model_name_or_path out/final_model --fasta protein.fasta --mutations mutants.csv \
    --output scored.csv
python score.py --model_name_or_path out/final_model --fasta protein.fasta --all_single_mutants --output matrices
python score.py --model_name_or_path out/e1 --fasta protein.fasta --mutations mutants.csv --homologs family.a3m \
    --output scored.csv

A row's mutations are in the column `mutant`: A24G, A24G:K30R (the sum of the two), or HGVS, p.Ala24Gly; ProteinGym's
tables are taken as they are. masked_marginal: log p(mutant) - log p(wild type) in nats, with the residue masked;
wild_type_marginal: without masks, one pass a protein. Above zero the model prefers the mutant. With homologs, which
some models read, scores are means over contexts, with standard errors. docs/after.md, docs/homologs.md have more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import csv
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.cli import UserError, run
from common.console import slow_bar
from common.files.content_hash import content_hash
from common.files.safe_files import file_name, is_plain_name, read_json, replace_flushed
from common.flags import Missing, flag, parse_arguments
from common.models.family import encoder_family
from common.models.layers.hf_directory import model_files, model_hash
from extras.after.downstream.outputs import Manifest, Output, claimed, locked_file, writing
from extras.after.downstream.results import to_open
from extras.after.inference.contexts import ContextFlags, Contexts, Sources, check_family, mean_over
from extras.after.inference.correlation import Correlation, as_table, correlations
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.exported import exported
from extras.after.inference.mutant_matrix import WARNING, Shares, draw, shares, write_matrix
from extras.after.inference.mutation_scores import (
    ContextOf,
    Variant,
    quoted,
    score,
    single_mutants,
)
from extras.after.inference.mutation_tables import (
    MEASURED,
    MUTANT,
    PROTEIN,
    SEQUENCE,
    Columns,
    measured_of,
    read_rows,
    read_texts,
    variants_of,
)
from extras.prepare.sources.proteins import ProteinFlags

logger = logging.getLogger(__name__)
COLUMNS = {"masked_marginal": True, "wild_type_marginal": False}
ERROR = "_error"  # ends the name of a column of standard errors over contexts
RECORD = "scores.json"  # in a directory of --all_single_mutants
SCRIPT = "score.py"
SETTINGS = (
    *("max_seq_length", "bf16", "mutation_column", "protein_column", "first_residue"),
    *("wild_type_marginal_only", "column_prefix"),
)
SAID = 20  # matrices whose variance is printed


@dataclass
class Arguments(EncoderFlags):
    required = ("fasta", "mutations", "all_single_mutants", "output")

    fasta: str | None = flag(None, "The wild type; or several, which the column `protein` names.")
    mutations: str | None = flag(None, "The CSV.")
    all_single_mutants: bool = flag(False, "Instead of --mutations: a matrix and a heat map of each protein.")
    output: str | None = flag(None, "The CSV with the scores; of --all_single_mutants a directory.")
    mutation_column: str = flag(MUTANT, "The column of the mutations. Without it `mutated_sequence` is compared.")
    protein_column: str = flag(PROTEIN, "The column of the ids in --fasta; needed if it has several.")
    measured_column: str | None = flag(
        None, f"What was measured, to correlate the scores with. Default: {MEASURED}, if the table has it."
    )
    first_residue: int = flag(1, "The number that the CSV gives the first residue.")
    wild_type_marginal_only: bool = flag(False, "Only the cheap score: one pass per window of a protein.")
    column_prefix: str = flag("", "Prefix of the names of the new columns, for example the model's name.")
    overwrite: bool = flag(False, "Replace an existing --output.")
    context: ContextFlags = field(default_factory=ContextFlags)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)

    def missing(self) -> Iterator[Missing]:
        needed = {
            "fasta": "the wild type",
            "mutations": "the CSV, or --all_single_mutants",
            "output": "for the scores",
        }
        for name, what in needed.items():
            if not getattr(self, name) and not (name == "mutations" and self.all_single_mutants):
                yield Missing(f"--{name}", what, {"fasta": "protein.fasta"}.get(name, f"{name}.csv"))

    @property
    def inputs(self) -> list[str]:
        return ["fasta"] if self.all_single_mutants else ["fasta", "mutations"]

    def check(self) -> None:
        if self.all_single_mutants:
            for name in ("mutations", "measured_column"):
                if getattr(self, name):
                    raise UserError(f"--{name}: does not go with --all_single_mutants: drop one of them")
        for name in self.inputs:
            if not Path(getattr(self, name)).is_file():
                raise UserError(f"--{name} {getattr(self, name)}: no such file")
        read = {name: getattr(self, name) for name in self.inputs}
        read |= {"homologs": self.context.homologs, "homologs_fasta": self.context.homologs_fasta}
        for name, value in read.items():
            for path in written(Path(str(self.output))):
                if value and path.exists() and path.samefile(value):
                    raise UserError(f"--output {self.output}: it would replace --{name}: choose another name")
        output = Path(str(self.output))
        kind, is_one = ("directory", output.is_dir()) if self.all_single_mutants else ("file", output.is_file())
        if output.exists() and not is_one:
            raise UserError(f"--output {output}: exists and is not a {kind}: choose another name")
        there = next(path for path in output.absolute().parents if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            raise UserError(f"--output {output}: {there} is not a directory that you can write to: choose another")


def written(output: Path) -> list[Path]:
    """All files that a run writes: the scores, the record of their input, and the partial files of both."""
    final = (output, output.with_name(f"{output.name}.json"))
    return [*final, *(path.with_name(f"{path.name}.partial") for path in final)]


def columns_of(args: Arguments, names: list[str], new: list[str], proteins: dict[str, bytes]) -> Columns:
    """UserError unless the CSV has the required columns and none of the new ones."""
    where = f"--mutations {args.mutations}"
    is_sequence = args.mutation_column == MUTANT and MUTANT not in names and SEQUENCE in names
    there = ", ".join(map(quoted, names))
    if args.mutation_column not in names and not is_sequence:
        raise UserError(f"{where}: no column {args.mutation_column!r}, only {there}: give --mutation_column")
    if args.measured_column and args.measured_column not in names:
        raise UserError(f"{where}: no column {args.measured_column!r}, only {there}: correct --measured_column")
    if args.protein_column not in names and (len(proteins) > 1 or args.protein_column != PROTEIN):
        raise UserError(
            f"--fasta {args.fasta} has {len(proteins)} proteins and {args.mutations} no column "
            f"{args.protein_column!r} to tell them apart: add it, or give a --fasta of one"
        )
    for name in new:
        if name in names:
            raise UserError(f"{where}: it has a column {name!r} already: rename it, or give another --column_prefix")
    protein = args.protein_column if args.protein_column in names else None
    return Columns(SEQUENCE if is_sequence else args.mutation_column, is_sequence, protein, args.first_residue)


def input_hashes(args: Arguments) -> dict[str, str]:
    return {f"{name}_hash": content_hash(getattr(args, name)) for name in args.inputs}


def is_finished(output: Path, record: Path, made_from: dict) -> bool:
    """Whether the file has the scores of this input. UserError if it has any other content."""
    if not output.exists():
        return False
    why = "exists without a record of what it was made from"
    with suppress(OSError, ValueError, KeyError):
        recorded = read_json(record)
        if recorded["made_from"] != made_from:
            why = "was made from other input or arguments"
        elif recorded["sha256"] == content_hash(output):
            return True
        else:
            why = "has changed since it was written"
    raise UserError(f"--output {output}: {why}: give --overwrite to replace it, or another --output")


def write(output: Path, record: Path, header: list[str], rows: list[dict], about: dict) -> None:
    """Write the scores and their record (`about` and a checksum): flushed before they get their names."""
    with writing(output, "--output"), replace_flushed(output) as partial:
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header)
            writer.writeheader()
            writer.writerows(rows)
        # The record first: scores are never beside a record of other input.
        with replace_flushed(record) as path:
            path.write_text(json.dumps(about | {"sha256": content_hash(partial)}, indent=1))


def write_matrices(
    output: Output, proteins: dict[str, bytes], scores: dict[str, list[np.ndarray]], first_residue: int, about: dict
) -> dict[str, Shares]:
    """NAME.SCORE.csv of each protein and score, and NAME.png of the first score; then their record, with what each
    table's variance follows from, which is returned too."""
    variance: dict[str, Shares] = {}
    taken: set[str] = set()
    with output.replaced() as directory:
        for number, (name, text) in enumerate(proteins.items()):
            stem = file_name(name, taken)
            for column, matrices in scores.items():
                write_matrix(directory / f"{stem}.{column}.csv", text, matrices[number], first_residue)
                if not column.endswith(ERROR):
                    variance[f"{stem}.{column}"] = shares(text, matrices[number])
            column = next(iter(scores))
            draw(directory / f"{stem}.png", f"{name[:60]}: {column}", text, scores[column][number], first_residue)
        about = about | {"variance": {name: each._asdict() for name, each in variance.items()}}
        (directory / RECORD).write_text(json.dumps(about, indent=1))
    return variance


def earlier_matrices(output: Path) -> Manifest | None:
    """What a version without manifests left there."""
    try:
        content = read_json(output / RECORD)
        names = (RECORD, *filter(is_plain_name, content["sha256"]))
        return Manifest({"script": SCRIPT} | content["made_from"], True, dict.fromkeys(names))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def log_variance(variance: dict[str, Shares]) -> None:
    """A line each, of at most `SAID` matrices, and a warning of those whose scores say nothing of positions."""
    for name, found in list(variance.items())[:SAID]:
        logger.info("%s: %s", name, found)
    if len(variance) > SAID:
        logger.info("... and of %s more matrices: %s", f"{len(variance) - SAID:,}", RECORD)
    alone = sum(found.of_residues_alone for found in variance.values())
    if alone:
        logger.warning("%d of %d matrices: %s", alone, len(variance), WARNING)


def correlate(
    scores: dict[str, np.ndarray], measured: list[float], proteins: Sequence[str], variants: list[Variant]
) -> dict[str, dict]:
    """{protein: {variants, and of each score: spearman, low, high}} over its rows that have a measurement."""
    found: dict[str, dict] = {}
    for protein in dict.fromkeys(proteins):
        rows = [n for n, name in enumerate(proteins) if name == protein and not math.isnan(measured[n])]
        of_rows = {name: values[rows].tolist() for name, values in scores.items()}
        made = correlations(of_rows, [measured[n] for n in rows], [variants[n] for n in rows])
        found[protein] = {"variants": len(rows)} | {name: each._asdict() for name, each in made.items()}
    return found


def log_correlations(column: str, found: dict[str, dict]) -> None:
    """A table of one protein, or the means of several."""
    total = sum(each["variants"] for each in found.values())
    names = list(dict.fromkeys(name for each in found.values() for name in each if name != "variants"))
    if not names:
        logger.warning("%s: too few different values to correlate with", column)
    elif len(found) == 1:
        (of_one,) = found.values()
        table = as_table({name: Correlation(**of_one[name]) for name in names})
        title = f"Spearman correlation with {column}, {total:,} variants (95 % bootstrap interval over the variants):"
        logger.info("%s", "\n".join([title, *table]))
    else:
        title = f"Spearman correlation with {column}, {total:,} variants, mean ± standard error over proteins:"
        rows = [mean_row(name, [each[name]["spearman"] for each in found.values() if name in each]) for name in names]
        logger.info("%s", "\n".join([title, *rows]))


def mean_row(name: str, values: list[float]) -> str:
    error = f" ± {np.std(values, ddof=1) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"  {name}  {np.mean(values):.3f}{error}  ({len(values)} proteins)"


def all_columns(args: Arguments) -> list[str]:
    """The columns that are written: scores, and with several contexts their standard errors."""
    names, has_errors = list(new_columns(args)), bool(args.context.homologs) and args.context.contexts > 1
    return names + [f"{name}{ERROR}" for name in names if has_errors]


def new_columns(args: Arguments) -> dict[str, bool]:
    """{name: whether positions are masked}."""
    return {
        f"{args.column_prefix}{name}": masked
        for name, masked in COLUMNS.items()
        if not (masked and args.wild_type_marginal_only)
    }


def identity(args: Arguments, hashes: dict[str, str], model: str) -> dict[str, Any]:
    """What decides the scores: the flags, and the content of model and input. UserError as `load_config`."""
    if args.context.homologs:
        check_family(model)
    encoder_family(model).load_config(model)
    made_from = hashes | {"model_hash": model_hash(model)} | {name: getattr(args, name) for name in SETTINGS}
    made_from |= args.proteins.given | args.context.given
    return made_from | ({"measured_column": args.measured_column} if args.measured_column else {})


def load(
    args: Arguments, made_from: dict[str, Any], model: str, proteins: dict[str, bytes]
) -> tuple[Encoder, list[ContextOf | None]]:
    """The model, and of each context what reads it: one that is None without homologs.

    proteins: that are scored. UserError if model or input have changed since `made_from`.
    """
    encoder = Encoder(replace(args, model_name_or_path=model))
    contexts: list[ContextOf | None] = [None]
    if args.context.homologs:
        contexts = [*Contexts(args.context, encoder, Sources(args.context, proteins).of).readers(proteins)]
    now = input_hashes(args) | {"model_hash": model_hash(model)} | args.context.hashes(proteins)
    if any(made_from[name] != digest for name, digest in now.items()):
        inputs = " or ".join(f"--{name}" for name in [*args.inputs, *(["homologs"] if args.context.homologs else [])])
        raise UserError(f"the model, {inputs} changed while they were read: start again")
    return encoder, contexts


def each_column(
    args: Arguments, contexts: Sequence[ContextOf | None], compute: Callable[..., np.ndarray]
) -> dict[str, np.ndarray]:
    """{column: `compute(masked, done, planned, context_of)`}, means over the contexts; then, of several contexts,
    {column_error: standard errors of the means}. A bar each."""
    scores, errors = {}, {}
    for name, masked in new_columns(args).items():
        results = []
        for number, context_of in enumerate(contexts, 1):
            title = f"{name}, context {number} of {len(contexts)}" if len(contexts) > 1 else name
            with slow_bar(None, "tokens", desc=title) as bar:
                results.append(compute(masked, bar.update, bar.reset, context_of))
        scores[name], error = mean_over(results)
        errors |= {} if error is None else {f"{name}{ERROR}": error}
    return scores | errors


def score_table(args: Arguments) -> None:
    new, hashes = all_columns(args), input_hashes(args)
    path = str(args.mutations)
    names, rows = read_rows(path, f"--mutations {path}")
    texts, proteins = read_texts(str(args.fasta), str(args.model_name_or_path), args.proteins)
    columns = columns_of(args, names, new, proteins)
    variants = variants_of(columns, rows, proteins, path, str(args.fasta), texts)
    scored = {variant.protein for variant in variants}
    used = {name: text for name, text in texts.items() if text in scored}
    hashes |= args.context.hashes(used)
    measured_column = args.measured_column or (MEASURED if MEASURED in names else None)
    measured = measured_of(measured_column, rows, path) if measured_column else []
    output, record, *_ = written(Path(str(args.output)))
    with ExitStack() as stack:
        model = exported(str(args.model_name_or_path), stack)
        made_from = identity(args, hashes, model)
        if output.exists() and any(path.samefile(output) for path in model_files(model)):
            raise UserError(f"--output {output}: it would replace a file of the model: choose another name")
        stack.enter_context(locked_file(output, "--output"))
        if not args.overwrite and is_finished(output, record, made_from):
            logger.info("%s was made from the same input and arguments: nothing to do", output)
            return
        encoder, contexts = load(args, made_from, model, used)
        scores = each_column(args, contexts, lambda *how: np.array(score(encoder, variants, *how)))
        about: dict[str, Any] = {"made_from": made_from, "model_name_or_path": args.model_name_or_path}
        if measured_column:
            ids = [row[columns.protein] if columns.protein else next(iter(proteins)) for row in rows]
            found = correlate({name: scores[name] for name in new_columns(args)}, measured, ids, variants)
            log_correlations(measured_column, found)
            of_proteins = {"intervals_over": "variants", "proteins": found}
            about["correlations"] = {"measured_column": measured_column} | of_proteins
        with_scores = [row | {name: f"{scores[name][n]:.6f}" for name in new} for n, row in enumerate(rows)]
        write(output, record, [*names, *new], with_scores, about)
    logger.info("Written: %s (%s variants)", output, f"{len(rows):,}")


def score_all(args: Arguments) -> None:
    hashes, directory = input_hashes(args), Path(str(args.output))
    texts, proteins = read_texts(str(args.fasta), str(args.model_name_or_path), args.proteins)
    hashes |= args.context.hashes(proteins)
    inputs = {"--model_name_or_path": args.model_name_or_path, "--fasta": args.fasta}
    inputs |= {"--homologs": args.context.homologs, "--homologs_fasta": args.context.homologs_fasta}
    with ExitStack() as stack:
        model = exported(str(args.model_name_or_path), stack)
        made_from = {"script": SCRIPT} | identity(args, hashes, model)
        earlier = earlier_matrices(directory)
        claim = claimed(directory, inputs, made_from, args.overwrite, earlier, "--output")
        if (output := stack.enter_context(claim)) is None:
            return
        encoder, contexts = load(args, made_from, model, proteins)
        scores = each_column(
            args, contexts, lambda *how: np.concatenate(single_mutants(encoder, texts.values(), *how))
        )
        ends = np.cumsum([len(residues) for residues in proteins.values()])[:-1]
        matrices = {name: np.split(values, ends) for name, values in scores.items()}
        about = {"made_from": made_from, "model_name_or_path": args.model_name_or_path}
        log_variance(write_matrices(output, proteins, matrices, args.first_residue, about))
    logger.info("Written: %s", to_open(directory))


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    (score_all if args.all_single_mutants else score_table)(args)


if __name__ == "__main__":
    run(main)
