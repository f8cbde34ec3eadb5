"""Columns of scores of variants or of all single mutants, and what computes them: an encoder or a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from common.console import slow_bar
from extras.after.adapting.one_protein import ADAPTED
from extras.after.inference.causal import Causal, log_likelihoods, matrices_of
from extras.after.inference.contexts import mean_over
from extras.after.inference.encoder import Encoder
from extras.after.inference.indels import Mutated, Variants
from extras.after.inference.likelihoods import MEAN, pseudo_log_likelihoods
from extras.after.inference.mutation_scores import ContextOf, Variant, check_standard, score, single_mutants

ERROR = "_error"  # ends the name of a column of standard errors over contexts
# {column: whether residues are masked}: of substitutions, of tables with insertions or deletions, of decoders.
MARGINALS = {"masked_marginal": True, "wild_type_marginal": False}
PSEUDO = {"pseudo_log_likelihood": True, "one_pass_log_likelihood": False}
CAUSAL = {"log_likelihood": False}

# (whether residues are masked, done, planned, context_of), as of `score`: {ending of the column's name: values}
Compute = Callable[..., dict[str, np.ndarray]]


class Scores(NamedTuple):
    """What is written: {column: whether residues are masked}, of each the endings of its name, whether standard errors
    over contexts follow, and whether scores of the adapted model do."""

    columns: dict[str, bool]
    endings: tuple[str, ...]
    has_errors: bool = False
    is_adapted: bool = False

    @classmethod
    def of(
        cls,
        decodes: bool,
        variants: Variants,
        one_pass: bool,
        prefix: str = "",
        has_errors: bool = False,
        is_adapted: bool = False,
    ) -> Scores:
        """A decoder gives likelihoods, an encoder marginals, or pseudo-likelihoods if a variant has another length.

        one_pass: leave out the scores that mask residues; prefix: of the columns' names.
        """
        has_indels = any(isinstance(variant, Mutated) for variant in variants)
        columns = CAUSAL if decodes else PSEUDO if has_indels else MARGINALS
        named = {f"{prefix}{name}": masked for name, masked in columns.items() if not (masked and one_pass)}
        endings = ("", MEAN) if (decodes or has_indels) and variants else ("",)
        return cls(named, endings, has_errors, is_adapted)

    @property
    def names(self) -> list[str]:
        """The columns of scores."""
        plain = [f"{name}{ending}" for name in self.columns for ending in self.endings]
        return plain + [f"{name}{ADAPTED}" for name in plain if self.is_adapted]

    @property
    def all_names(self) -> list[str]:
        return self.names + [f"{name}{ERROR}" for name in self.names if self.has_errors]


def each_column(
    scores: Scores, contexts: Sequence[ContextOf | None], compute: Compute, hidden: bool = False
) -> dict[str, np.ndarray]:
    """{column: what `compute` gives}, means over the contexts; then, of several contexts, {column_error: standard
    errors of the means}. A bar each, unless hidden."""
    found, errors = {}, {}
    for name, masked in scores.columns.items():
        results = []
        for number, context_of in enumerate(contexts, 1):
            title = f"{name}, context {number} of {len(contexts)}" if len(contexts) > 1 else name
            with slow_bar(None, "tokens", hidden, desc=title) as bar:
                results.append(compute(masked, bar.update, bar.reset, context_of))
        for ending in scores.endings:
            found[f"{name}{ending}"], error = mean_over(result[ending] for result in results)
            errors |= {} if error is None else {f"{name}{ending}{ERROR}": error}
    return found | errors


def of_variants(model: Encoder | Causal, variants: Variants, scores: Scores) -> Compute:
    """The scores of a table's variants, or of some of them."""
    if isinstance(model, Causal):
        return lambda masked, done, planned, _: log_likelihoods(model, variants, done, planned)
    if MEAN in scores.endings:
        return lambda *how: pseudo_log_likelihoods(model, variants, *how)
    substitutions = [variant for variant in variants if isinstance(variant, Variant)]
    return lambda *how: {"": np.array(score(model, substitutions, *how))}


def of_single_mutants(model: Encoder | Causal, proteins: Sequence[bytes]) -> Compute:
    """The matrices of all proteins, one below the other, [residues, 20]."""
    if isinstance(model, Causal):
        return lambda masked, done, planned, _: {"": matrices_of(model, proteins, done, planned)}
    check_standard(model)
    return lambda *how: {"": np.concatenate(single_mutants(model, proteins, *how))}
