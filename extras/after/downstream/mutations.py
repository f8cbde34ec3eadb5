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
from extras.after.downstream.results import named_tables
from extras.after.inference.correlation import spearman
from extras.after.inference.encoder import Encoder, EncoderFlags
from extras.after.inference.mutation_scores import Variant, check_letters, quoted, score
from extras.after.inference.mutation_tables import (
    MEASURED,
    MUTANT,
    PROTEIN,
    SEQUENCE,
    Columns,
    measured_of,
    read_rows,
    variants_of,
    wild_type_of,
)
from extras.prepare.sources.proteins import read_residues

logger = logging.getLogger(__name__)
MOST = 5000  # rows of a table that are scored


class Table(NamedTuple):
    """measured: of each variant."""

    variants: list[Variant]
    measured: list[float]


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
    variants = variants_of(columns, rows, proteins, path, str(fasta))
    measured = measured_of(MEASURED, rows, path)
    scored = [n for n, value in enumerate(measured) if not math.isnan(value)]
    if len(scored) > MOST:
        logger.info("%s: %s of its %s rows are scored, drawn by a fixed seed", path, f"{MOST:,}", f"{len(scored):,}")
        drawn = np.random.default_rng(0).choice(len(scored), MOST, replace=False)
        scored = [scored[n] for n in sorted(drawn)]
    if len({measured[n] for n in scored}) < 2:
        raise UserError(f"{where}: {MEASURED} has fewer than 2 different values: nothing to correlate with")
    return Table([variants[n] for n in scored], [measured[n] for n in scored])


class MutationEvaluation:
    """Evaluates a model on the tables of --eval_mutations."""

    def __init__(self, paths: Sequence[str], longest: int, alphabet: Alphabet = ESM2_TOKENS):
        """longest: tokens of a window; alphabet: of the model. UserError if a table cannot be read or scored."""
        self.longest = longest
        self.tables = {name: read_table(path) for name, path in named_tables("--eval_mutations", paths).items()}
        for name, table in self.tables.items():
            check_letters(table.variants, alphabet)
            logger.info("%s: %s measured variants are evaluated", name, f"{len(table.variants):,}")

    def evaluate(self, model: Any) -> dict[str, float]:
        """`eval_mutations_<file>_masked` and `..._wild_type`: Spearman's, 0 where all scores are alike."""
        encoder = Encoder(EncoderFlags("the model", max_seq_length=self.longest), model.device, model)
        results = {}
        for table, (variants, measured) in self.tables.items():
            for name, masked in (("masked", True), ("wild_type", False)):
                correlation = spearman(score(encoder, variants, masked), measured)
                results[f"eval_mutations_{table}_{name}"] = 0.0 if math.isnan(correlation) else correlation
        logger.info("Mutations (Spearman): %s", ", ".join(f"{key[15:]} {value:.3f}" for key, value in results.items()))
        return results
