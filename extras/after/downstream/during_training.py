"""Downstream evaluations of a training run: rank 0 computes them on a copy of the weights while the others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from common.cli import UserError
from common.data.alphabet import Alphabet
from common.models.esm2.alphabet import ESM2_TOKENS
from common.models.esm2.config import Esm2Config
from common.training.task import Task


class Evaluation(Protocol):
    """Made before training, so that input that cannot be read is reported first."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Results by name. model: as of `stock_model`."""
        ...


def evaluations(
    flags: Any, longest: int, alphabet: Alphabet = ESM2_TOKENS, reads_sets: bool = False
) -> list[Evaluation]:
    """The evaluations that the flags (`DownstreamFlags`) ask for. UserError for bad input.

    longest: tokens that the model takes; alphabet: its own; reads_sets: whether it reads homologs.
    """
    chosen: list[Evaluation] = []
    if flags.eval_contacts:
        from extras.after.downstream.contacts import ContactEvaluation

        chosen.append(ContactEvaluation(flags.eval_contacts, longest))
    if flags.eval_mutations:
        from extras.after.downstream.mutations import MutationEvaluation

        chosen.append(MutationEvaluation(flags.eval_mutations, longest, alphabet, reads_sets))
    if flags.eval_probe:
        from extras.after.downstream.run_probes import ProbeEvaluation

        chosen.append(ProbeEvaluation(flags.eval_probe, longest))
    return chosen


class Downstream:
    """The evaluations of a run; all ranks make and call it together."""

    def __init__(self, task: Task):
        self.task, self.world, self.made = task, task.world, []
        flags, config = task.flags.downstream, task.built.config
        alphabet = getattr(task, "tokens", None)
        if not isinstance(alphabet, Alphabet):
            raise UserError(f"{flags.given[0]}: of {config.model_type}; only encoders are evaluated so: drop the flag")
        if alphabet.declared:
            raise UserError(f"{flags.given[0]}: reads proteins, and the model's alphabet is {alphabet.name}: drop it")
        if flags.eval_contacts and not isinstance(config, Esm2Config):
            raise UserError(f"--eval_contacts: {task.family.title} has no contact head in transformers: drop the flag")
        with self.world.on_main_rank() as is_main:
            if is_main:
                longest = config.max_position_embeddings - 2
                self.made = evaluations(flags, longest, alphabet, task.family.reads_sets)

    def evaluate(self, gather: Callable[[Tensor], Tensor], step: int) -> dict[str, float]:
        """Results of the weights after `step` steps, on all ranks; `gather` makes a parameter whole."""
        self.world.watch.mark("evaluation", step)
        pieces = self.task.exported(gather)
        results: dict[str, float] = {}
        failure = None
        try:
            if self.world.is_main:
                results = self._evaluate(pieces)
        except Exception as error:
            failure = error
        for _ in pieces:  # the other ranks take part in every gather, also after a failure
            pass
        self.world.raise_on_all(failure)
        self.world.watch.rest()
        return self.world.broadcast_object(results)

    def _evaluate(self, pieces: Iterator[tuple[str, Tensor]]) -> dict[str, float]:
        from extras.after.downstream.stock_model import stock_model

        model = stock_model(self.task.built.config, pieces, self.world.device)
        results: dict[str, float] = {}
        for each in self.made:
            results |= each.evaluate(model)
        return results

    def fitted(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """(a contact head fitted to the weights of the last evaluation, under transformers' names, the identities of
        the chains that it was fitted on); ({}, ()) without one, and on other ranks than 0."""
        heads = [head for each in self.made if (head := getattr(each, "head", None))]
        return (heads[0].tensors, heads[0].fitted_on) if heads else ({}, ())
