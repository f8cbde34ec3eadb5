"""--eval_mutations: rank correlation of a model's scores of mutations with what was measured."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.models.esm2.alphabet import ESM2_TOKENS
from extras.after.downstream.named_tables import named_tables
from extras.after.inference.contexts import ContextFlags, Contexts, mean_over
from extras.after.inference.correlation import spearman
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.homologs import Homologs, read_homologs
from extras.after.inference.mutation_scores import ContextOf, Variant, check_letters, quoted, score
from extras.after.inference.mutation_tables import (
    MEASURED,
    MUTANT,
    PROTEIN,
    SEQUENCE,
    Columns,
    measured_of,
    read_rows,
    substitutions_of,
    wild_type_of,
)
from extras.prepare.sources.proteins import read_residues

logger = logging.getLogger(__name__)
MOST = 5000  # rows of a table that are scored
FAMILY = ".a3m"  # in place of .csv: homologs of a table's protein
CONTEXTS, CONTEXT_TOKENS, MAX_SIMILARITY = 2, 4096, [0.95, 0.7]  # fewer and smaller than score.py's: evaluated often


class Table(NamedTuple):
    """measured: of each variant; homologs: of the protein, if they are there."""

    variants: list[Variant]
    measured: list[float]
    homologs: Homologs | None = None


def read_table(path: Path) -> Table:
    """A CSV with the columns of score.py and `DMS_score`. The wild types: of a FASTA file beside it (`x.fasta` of
    `x.csv`), else what the columns `mutant` and `mutated_sequence` have in common.

    UserError for anything that score.py refuses, and for a table that no correlation can be computed of.
    """
    where = f"--eval_mutations {path}"
    if not path.is_file():
        raise UserError(f"{where}: no such file")
    names, rows = read_rows(path, where)
    fasta = path.with_suffix(".fasta")
    has_fasta = fasta.is_file()
    for needed in (MEASURED, *((MUTANT, SEQUENCE) if not has_fasta else ())):
        if needed not in names:
            hint = "" if needed == MEASURED else f", or put the wild type into {fasta.name} beside it"
            raise UserError(f"{where}: no column {needed!r}, only {', '.join(map(quoted, names))}: add it{hint}")
    if has_fasta and MUTANT not in names and SEQUENCE not in names:
        raise UserError(f"{where}: no column {MUTANT!r} and no {SEQUENCE!r}: add one")
    proteins = read_residues(str(fasta), "") if has_fasta else {"": wild_type_of(rows, path)}
    if len(proteins) > 1 and PROTEIN not in names:
        raise UserError(f"{where}: {fasta} has {len(proteins)} proteins: add a column {PROTEIN!r} that names them")
    protein = PROTEIN if has_fasta and PROTEIN in names else None
    columns = Columns(MUTANT if MUTANT in names else SEQUENCE, MUTANT not in names, protein)
    variants = substitutions_of(columns, rows, proteins, path, str(fasta))
    measured = measured_of(MEASURED, rows, path)
    scored = [n for n, value in enumerate(measured) if not math.isnan(value)]
    if len(scored) > MOST:
        logger.info("%s: %s of its %s rows are scored, drawn by a fixed seed", path, f"{MOST:,}", f"{len(scored):,}")
        drawn = np.random.default_rng(0).choice(len(scored), MOST, replace=False)
        scored = [scored[n] for n in sorted(drawn)]
    if len({measured[n] for n in scored}) < 2:
        raise UserError(f"{where}: {MEASURED} has fewer than 2 different values: nothing to correlate with")
    return Table([variants[n] for n in scored], [measured[n] for n in scored])


def read_family(path: Path, variants: Sequence[Variant]) -> Homologs | None:
    """Those of `x.a3m` beside the table `x.csv`, None without one. UserError if the table is of several proteins."""
    family = path.with_suffix(FAMILY)
    if not family.is_file():
        return None
    proteins = {variant.protein for variant in variants}
    if len(proteins) > 1:
        raise UserError(
            f"--eval_mutations {path}: {family.name} beside it is of one protein, the table of {len(proteins)}: "
            "make a table of each protein, or move it"
        )
    return read_homologs(family, proteins.pop(), "--eval_mutations")


class MutationEvaluation:
    """Evaluates a model on the tables of --eval_mutations."""

    def __init__(self, paths: Sequence[str], longest: int, alphabet: Alphabet = ESM2_TOKENS, reads_sets: bool = False):
        """longest: tokens of a window; alphabet: of the model; reads_sets: whether it reads homologs. UserError if a
        table cannot be read or scored."""
        self.longest = longest
        self.tables: dict[str, Table] = {}
        for name, path in named_tables("--eval_mutations", paths).items():
            table = read_table(path)
            self.tables[name] = table._replace(homologs=read_family(path, table.variants) if reads_sets else None)
            check_letters(table.variants, alphabet)
            logger.info("%s: %s measured variants are evaluated", name, f"{len(table.variants):,}")

    def evaluate(self, model: Any) -> dict[str, float]:
        """`eval_mutations_<file>_masked` and `..._wild_type`: Spearman's, 0 where all scores are alike; with homologs
        also `..._masked_homologs` and `..._wild_type_homologs`."""
        encoder = Encoder(EncoderFlags("the model", max_seq_length=self.longest), model.device, model)
        results = {}
        for name, table in self.tables.items():
            for ending, contexts in contexts_of(encoder, name, table).items():
                for kind, masked in (("masked", True), ("wild_type", False)):
                    each = [np.array(score(encoder, table.variants, masked, context_of=one)) for one in contexts]
                    correlation = spearman(mean_over(each)[0], table.measured)
                    results[f"eval_mutations_{name}_{kind}{ending}"] = 0.0 if math.isnan(correlation) else correlation
        logger.info("Mutations (Spearman): %s", ", ".join(f"{key[15:]} {value:.3f}" for key, value in results.items()))
        return results


def contexts_of(encoder: Encoder, name: str, table: Table) -> dict[str, Sequence[ContextOf | None]]:
    """{ending of a result's name: what reads its contexts}: alone, and with homologs if there are any."""
    alone: dict[str, Sequence[ContextOf | None]] = {"": [None]}
    homologs = table.homologs
    if homologs is None:
        return alone
    left = encoder.model.config.max_num_positions_global - encoder.flags.max_seq_length
    budget = [min(CONTEXT_TOKENS, left)]
    flags = ContextFlags(contexts=CONTEXTS, context_tokens=budget, max_similarity=MAX_SIMILARITY)
    contexts = Contexts(flags, encoder, lambda name, protein: homologs)
    return alone | {"_homologs": contexts.readers({name: table.variants[0].protein})}
