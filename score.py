#!/usr/bin/env python3
r"""Score variants with a model that you trained or any ESM-2: those of a CSV, or all single mutants of a protein.

python score.py --model_name_or_path out/final_model --fasta protein.fasta --mutations mutants.csv \
    --output scored.csv
python score.py --model_name_or_path out/final_model --fasta protein.fasta --all_single_mutants --output matrices
python score.py --model_name_or_path out/e1 --fasta protein.fasta --mutations mutants.csv --homologs family.a3m \
    --output scored.csv

A row's mutations are in the column `mutant`: A24G, A24G:K30R (the sum of the two), or HGVS, p.Ala24Gly; ProteinGym's
tables are taken as they are. masked_marginal: log p(mutant) - log p(wild type) in nats, with the residue masked;
wild_type_marginal: without masks, one pass a protein. Above zero the model prefers the mutant. With homologs, which
some models read, scores are means over contexts, with standard errors.
Insertions and deletions are A24_K27del, A24_G25insKL and the like, or sequences in the column `mutated_sequence`:
score.py --sequences indels.csv. They and all variants under a protein decoder get likelihoods of whole sequences, as
sums and means over residues. docs/after.md, docs/homologs.md have more.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from common.cli import UserError, run
from common.figures import FigureFlags
from common.files.content_hash import content_hash
from common.flags import Missing, flag, parse_arguments
from common.models.family import encoder_family
from common.models.layers.hf_directory import model_files, model_hash
from extras.after.adapting.one_protein import AdaptFlags, by_adapted, joined
from extras.after.downstream.outputs import claimed, locked_file
from extras.after.downstream.results import to_open
from extras.after.inference.causal import Causal, CausalFlags, directions_of, is_decoder, refuse_flags_of_encoders
from extras.after.inference.chains import named_chains, of_all_chains
from extras.after.inference.contexts import ContextFlags, Contexts, Sources, check_family
from extras.after.inference.correlation import correlate, log_correlations
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.exported import exported
from extras.after.inference.indels import Variants
from extras.after.inference.mutation_scores import ContextOf
from extras.after.inference.mutation_tables import (
    KINDS,
    MEASURED,
    MUTANT,
    PROTEIN,
    Columns,
    check_new,
    columns_of,
    kept_lines,
    measured_of,
    read_rows,
    read_texts,
    variants_of,
)
from extras.after.inference.score_columns import Scores, each_column, of_single_mutants, of_variants
from extras.after.inference.scored_files import (
    SCRIPT,
    earlier_matrices,
    is_finished,
    log_variance,
    write,
    write_matrices,
    written,
)
from extras.prepare.sources.proteins import ProteinFlags

logger = logging.getLogger(__name__)
SETTINGS = (
    *("max_seq_length", "bf16", "mutation_column", "protein_column", "first_residue"),
    *("wild_type_marginal_only", "column_prefix"),
)


@dataclass
class Arguments(EncoderFlags):
    required = ("fasta", "mutations", "all_single_mutants", "output")

    fasta: str | None = flag(None, "The wild type; or several, which the column `protein` names.")
    mutations: str | None = flag(None, "The CSV, of mutations or of whole mutated sequences.", "sequences")
    all_single_mutants: bool = flag(
        False, "Instead of --mutations: a matrix and a heat map of each protein, and its best and worst."
    )
    output: str | None = flag(None, "The CSV with the scores; of --all_single_mutants a directory.")
    mutation_column: str = flag(MUTANT, "The column of the mutations. Without it `mutated_sequence` or `sequence`.")
    protein_column: str = flag(PROTEIN, "The column of the ids in --fasta; needed if it has several.")
    measured_column: str | None = flag(
        None, f"What was measured, to correlate the scores with. Default: {MEASURED}, if the table has it."
    )
    first_residue: int = flag(1, "The number that the CSV gives the first residue.")
    leave_out: list[str] | None = flag(
        None, "Rows to leave out, as of MaveDB: stops (and frameshifts), synonymous, wild_type; they are counted."
    )
    wild_type_marginal_only: bool = flag(
        False, "Only the cheap score of an encoder: one pass per window of a protein, nothing masked.", "one_pass"
    )
    column_prefix: str = flag("", "Prefix of the names of the new columns, for example the model's name.")
    overwrite: bool = flag(False, "Replace an existing --output.")
    changed: ClassVar[dict[str, Any]] = {
        "model_name_or_path": flag(
            None,
            "A run's output directory, a checkpoint, or any directory of an ESM-2, ESM C, AMPLIFY, E1 or protein "
            "decoder; or a Hub name of an encoder.",
        )
    }
    decoder: CausalFlags = field(default_factory=CausalFlags)
    context: ContextFlags = field(default_factory=ContextFlags)
    adaptation: AdaptFlags = field(default_factory=AdaptFlags)
    proteins: ProteinFlags = field(default_factory=ProteinFlags)
    figures: FigureFlags = field(default_factory=FigureFlags)

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
            for name in ("mutations", "measured_column", "leave_out"):
                if getattr(self, name):
                    raise UserError(f"--{name}: does not go with --all_single_mutants: drop one of them")
        elif self.figures.given:
            raise UserError("--figure_format and --dpi: are of the pictures of --all_single_mutants: drop them")
        for kind in self.leave_out or ():
            if kind not in KINDS:
                raise UserError(f"--leave_out {kind}: choose of {', '.join(KINDS)}")
        if self.adaptation.adapt and self.context.homologs:
            raise UserError("--adapt: trains on one protein alone, and --homologs reads others with it: drop one")
        if self.adaptation.adapt and self.int8:
            raise UserError("--adapt: trains the model, which --int8 only reads: drop one")
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


def input_hashes(args: Arguments) -> dict[str, str]:
    return {f"{name}_hash": content_hash(getattr(args, name)) for name in args.inputs}


def scores_of(args: Arguments, model: str, variants: Variants = ()) -> Scores:
    has_errors = bool(args.context.homologs) and args.context.contexts > 1
    one_pass, prefix = args.wild_type_marginal_only, args.column_prefix
    return Scores.of(is_decoder(model), variants, one_pass, prefix, has_errors, args.adaptation.adapt)


def identity(args: Arguments, hashes: dict[str, str], model: str) -> dict[str, Any]:
    """What decides the scores: the flags, and the content of model and input. UserError as `load_config`."""
    if is_decoder(model):
        check_decoder(args)
        hashes = hashes | {"directions": directions_of(model, args.decoder), "count_ends": args.decoder.count_ends}
    else:
        args.decoder.refuse()
        if args.context.homologs:
            check_family(model)
        encoder_family(model).load_config(model)
    made_from = hashes | {"model_hash": model_hash(model)} | {name: getattr(args, name) for name in SETTINGS}
    made_from |= args.proteins.given | args.context.given | args.adaptation.given | args.figures.given
    later = {"measured_column": args.measured_column, "leave_out": sorted(args.leave_out or ()), "int8": args.int8}
    return made_from | {name: value for name, value in later.items() if value}


def check_decoder(args: Arguments) -> None:
    """UserError for flags that are of encoders."""
    given = {
        "homologs": bool(args.context.homologs),
        "adapt": args.adaptation.adapt,
        "int8": args.int8,
        "max_seq_length": args.max_seq_length != Arguments.max_seq_length,
        "wild_type_marginal_only": args.wild_type_marginal_only,
    }
    refuse_flags_of_encoders(str(args.model_name_or_path), given)


def load(
    args: Arguments, made_from: dict[str, Any], model: str, proteins: dict[str, bytes], texts: Iterable[bytes]
) -> tuple[Encoder | Causal, list[ContextOf | None]]:
    """The model, and of each context what reads it: one that is None without homologs.

    proteins: that are scored; texts: of the FASTA file. UserError if model or input have changed since `made_from`.
    """
    flags, contexts = replace(args, model_name_or_path=model), [None]
    if is_decoder(model):
        encoder: Encoder | Causal = Causal(flags, made_from["directions"], args.decoder.count_ends)
    else:
        encoder = Encoder(flags)
        encoder.fit_int8(texts)
    if args.context.homologs:
        contexts = [*Contexts(args.context, encoder, Sources(args.context, proteins).of).readers(proteins)]
    now = input_hashes(args) | {"model_hash": model_hash(model)} | args.context.hashes(proteins)
    if any(made_from[name] != digest for name, digest in now.items()):
        inputs = " or ".join(f"--{name}" for name in [*args.inputs, *(["homologs"] if args.context.homologs else [])])
        raise UserError(f"the model, {inputs} changed while they were read: start again")
    return encoder, contexts


def scored_rows(
    args: Arguments, columns: Columns, rows: list[dict[str, str]]
) -> tuple[list[dict[str, str]], list[int], dict[str, Any]]:
    """(the rows that --leave_out keeps, their line numbers, what it has left out for the record)."""
    if columns.is_sequence:
        if args.leave_out:
            raise UserError(f"--leave_out: is of mutations, and {args.mutations} has whole sequences: drop it")
        return rows, list(range(2, len(rows) + 2)), {}
    lines, counts = kept_lines(args.leave_out or (), columns.mutant, rows, str(args.mutations))
    return [rows[line - 2] for line in lines], lines, {"left_out": counts} if counts else {}


def adapted_to_variants(
    args: Arguments, model: Encoder, variants: Variants, texts: dict[str, bytes], scores: Scores
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, float]]]:
    """({column: the variants' scores, each by the model adapted to its protein}, {protein: its losses})."""
    rows: dict[bytes, list[int]] = {}
    for number, variant in enumerate(variants):
        rows.setdefault(variant.protein, []).append(number)

    def compute(text: bytes) -> dict[str, np.ndarray]:
        return each_column(scores, [None], of_variants(model, [variants[n] for n in rows[text]], scores))

    names = {text: name for name, text in texts.items()}
    found, losses = by_adapted(model, args.adaptation, {text: names[text] for text in rows}, compute)
    back = np.argsort(np.concatenate(list(rows.values())))
    return {name: values[back] for name, values in joined(found.values()).items()}, losses


def score_table(args: Arguments) -> None:
    path, hashes = str(args.mutations), input_hashes(args)
    names, rows = read_rows(path, f"--mutations {path}")
    texts, proteins = read_texts(str(args.fasta), str(args.model_name_or_path), args.proteins)
    columns = columns_of(args, names, rows, proteins)
    rows, lines, left_out = scored_rows(args, columns, rows)
    variants = variants_of(columns, rows, proteins, path, str(args.fasta), texts, lines)
    scored = {variant.protein for variant in variants}
    used = {name: text for name, text in texts.items() if text in scored}
    hashes |= args.context.hashes(used)
    measured_column = args.measured_column or (MEASURED if MEASURED in names else None)
    measured = measured_of(measured_column, rows, path, lines=lines) if measured_column else []
    output, record, *_ = written(Path(str(args.output)))
    with ExitStack() as stack:
        model = exported(str(args.model_name_or_path), stack)
        scores = scores_of(args, model, variants)
        check_new(path, names, scores.all_names)
        made_from = identity(args, hashes, model)
        if output.exists() and any(path.samefile(output) for path in model_files(model)):
            raise UserError(f"--output {output}: it would replace a file of the model: choose another name")
        stack.enter_context(locked_file(output, "--output"))
        if not args.overwrite and is_finished(output, record, made_from):
            logger.info("%s was made from the same input and arguments: nothing to do", output)
            return
        loaded, contexts = load(args, made_from, model, used, texts.values())
        values = each_column(scores, contexts, of_variants(loaded, variants, scores))
        about: dict[str, Any] = {"made_from": made_from, "model_name_or_path": args.model_name_or_path} | left_out
        if isinstance(loaded, Encoder) and args.adaptation.adapt:
            more, about["adapted"] = adapted_to_variants(args, loaded, variants, used, scores)
            values |= more
        if measured_column:
            ids = [row[columns.protein] if columns.protein else next(iter(proteins)) for row in rows]
            found = correlate({name: values[name] for name in scores.names}, measured, ids, variants)
            log_correlations(measured_column, found)
            of_proteins = {"intervals_over": "variants", "proteins": found}
            about["correlations"] = {"measured_column": measured_column} | of_proteins
        with_scores = [row | {name: f"{values[name][n]:.6f}" for name in values} for n, row in enumerate(rows)]
        write(output, record, [*names, *values], with_scores, about)
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
        loaded, contexts = load(args, made_from, model, proteins, texts.values())
        which, about = scores_of(args, model), {"made_from": made_from, "model_name_or_path": args.model_name_or_path}
        scores = each_column(which, contexts, of_single_mutants(loaded, list(texts.values())))
        if isinstance(loaded, Encoder) and args.adaptation.adapt:
            names = {text: name for name, text in texts.items()}
            found, about["adapted"] = by_adapted(
                loaded,
                args.adaptation,
                names,
                lambda text: each_column(which, contexts, of_single_mutants(loaded, [text])),
            )
            scores |= joined(found[text] for text in texts.values())
        ends = np.cumsum([len(residues) for residues in proteins.values()])[:-1]
        of_records = {name: np.split(values, ends) for name, values in scores.items()}
        matrices = {name: of_all_chains(proteins.values(), values) for name, values in of_records.items()}
        proteins = dict(chain for protein in proteins.items() for chain in named_chains(*protein))
        log_variance(write_matrices(output, proteins, matrices, args.first_residue, args.figures, about))
    logger.info("Written: %s", to_open(directory))


def main() -> None:
    args = parse_arguments(__doc__, Arguments)
    (score_all if args.all_single_mutants else score_table)(args)


if __name__ == "__main__":
    run(main)
