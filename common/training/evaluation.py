"""Evaluation on held-out batches by all ranks: sums over the whole split, divided once (no mean of means)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common import console
from common.data.collators import Batch, to_device
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.hooks import extra
from common.training.protein_losses import Evaluation, ProteinLosses
from common.training.task import Task

logger = logging.getLogger(__name__)

# {name: (a model's output, its batch) -> scalar}, summed over the batch's targets; results have the mean over all.
METRICS: dict[str, Callable[[Any, Batch], Tensor]] = {"accuracy": lambda output, batch: output.correct}


class Sums(Protocol):
    """What a task sums over an evaluation's batches beside the loss."""

    def add(self, output: Any, inputs: dict[str, Any], batch: Batch) -> None:
        """inputs: of the model, on the device."""

    def reduced(self, world: World, prefix: str) -> Evaluation:
        """All ranks together, once."""


class Evaluator:
    """Evaluates the model of a run; all ranks together. `results` are the last ones of all splits."""

    def __init__(self, task: Task, strategy: Strategy):
        self.task, self.strategy = task, strategy
        self._last: dict[str, tuple[int, Evaluation]] = {}  # {split: step, what its last evaluation found}
        self.results: dict[str, Any] = {}
        self._downstream = None
        self._last_downstream: dict[int, dict] = {}  # {step: results}
        if task.flags.downstream.given:
            self._downstream = extra().downstream(task)

    def has(self, split: str) -> bool:
        """Whether there is anything to evaluate on."""
        with self.task.world.raise_together():
            absent = self.task.data.held_out(split) is None
        return not absent

    def evaluate(self, step: int, downstream: bool = False) -> dict[str, Any]:
        """Results of all held-out sets after `step` steps; {} if the run was stopped meanwhile (on all ranks).

        downstream: with those of what else the flags ask of the model.
        """
        results: dict[str, Any] = {}
        for split, prefix in self.task.held_out.items():
            if not (of_split := self.evaluate_split(step, split, prefix).results):
                return {}
            results |= of_split
        if downstream:
            results |= self.downstream(step)
        self.results |= results
        return results

    def evaluate_split(self, step: int, split: str, prefix: str) -> Evaluation:
        if split in self._last and self._last[split][0] == step:
            return self._last[split][1]  # the last step's evaluation is also the one at the end of the run
        is_logged = split in self.task.held_out  # of the test split only the results at the end
        if is_logged:
            logger.info("***** Running Evaluation *****%s", "" if prefix == "eval" else f" ({split})")
        evaluation = self.task.evaluate(self.strategy.evaluated, split, prefix, step)
        self.strategy.reshard()
        self.strategy.model.train()
        if evaluation.results:
            self._last[split] = step, evaluation
            self.results |= evaluation.results
        if is_logged and evaluation.results:
            logger.info(self.task.summary(evaluation.results, prefix))
        return evaluation

    def losses(self) -> dict[str, ProteinLosses]:
        """{prefix: of the last evaluation of each held-out set}, the test split's too; without text's."""
        prefixes = self.task.held_out | {"test": "test"}
        return {prefixes[split]: each.losses for split, (_, each) in self._last.items() if each.losses is not None}

    def downstream(self, step: int) -> dict[str, float]:
        """Results of what else the flags ask of the model after `step` steps, or {}:
        extras.after.downstream.during_training."""
        if self._downstream is None:
            return {}
        if step not in self._last_downstream:
            self._last_downstream = {step: self._downstream.evaluate(self.strategy.full_tensor, step)}
            self.strategy.reshard()
        return self._last_downstream[step]

    def fitted(self) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """(tensors to export that an evaluation has fitted, chains they were fitted on); both empty but on rank 0."""
        return ({}, ()) if self._downstream is None else self._downstream.fitted()


@torch.no_grad()
def held_out_results(
    model: nn.Module,
    batches: Generator,
    world: World,
    prefix: str,
    step: int,
    bf16: bool,
    targets: str,
    also: Sums | None = None,
    sequences: int | None = None,
) -> Evaluation:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` of this rank's batches, as many on every rank.

    step: of the run, for the hang watch; targets: the results' key for the number of predicted tokens, without which
    there is no loss; also: what else is summed; sequences: of all ranks, for a bar, None for no bar.
    """
    started = time.perf_counter()
    # targets, sequences, loss in nats, metrics
    sums = torch.zeros(3 + len(METRICS), dtype=torch.float64, device=world.device)
    num_batches = 0
    was_training = model.training
    model.eval()
    world.watch.mark("evaluation", step)
    hidden = sequences is None or not world.is_main
    shown = console.bar(sequences, "sequences", hidden, desc="Evaluation")
    with closing(batches), shown as bar:  # closing ends the workers, whatever happens
        while True:
            world.watch.mark("evaluation", step)
            batch, failure = None, None
            try:
                batch = world.stop.next_unless_stopped(batches, None)
            except Exception as error:  # the other ranks wait in the all-reduce below
                failure = error
            stop, failed = world.max(torch.tensor([int(world.stop.requested), int(failure is not None)])).tolist()
            if failed:
                world.raise_on_all(failure)
            if stop:
                world.stop.agreed()
                return Evaluation({})
            if batch is None:  # on all ranks at once
                break
            inputs = to_device(batch, world.device)
            with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
                output = model(**inputs)
            counts = [sums.new_tensor(batch[key]) for key in ("num_targets", "num_sequences")]
            values = [output.loss_sum, *(metric(output, batch) for metric in METRICS.values())]
            sums += torch.stack([*counts, *(value.double() for value in values)])
            if also is not None:
                also.add(output, inputs, batch)
            num_batches += 1
            bar.update(min(int(batch["num_sequences"] * world.mesh.dp_size), (sequences or 0) - bar.n))
    world.watch.rest()
    model.train(was_training)
    runtime = time.perf_counter() - started
    num_targets, samples, loss_sum, *metrics = world.sum(sums).tolist()
    results: dict[str, Any] = {}
    if num_targets:
        results[f"{prefix}_loss"] = loss_sum / num_targets
        results |= {f"{prefix}_{name}": total / num_targets for name, total in zip(METRICS, metrics, strict=True)}
        results["perplexity" if prefix == "eval" else f"{prefix}_perplexity"] = perplexity(loss_sum / num_targets)
    else:
        logger.warning("%s: none of %d sequences has a token to predict: no loss", prefix, samples)
    results |= {
        f"{prefix}_{targets}": int(num_targets),
        f"{prefix}_samples": int(samples),
        f"{prefix}_runtime": runtime,
        f"{prefix}_samples_per_second": samples / runtime,
        f"{prefix}_steps_per_second": num_batches / runtime,
    }
    more, losses = also.reduced(world, prefix) if also is not None else ({}, None)
    return Evaluation(results | more, losses)


def perplexity(loss: float) -> float:
    """exp(loss), finite for any loss in nats."""
    return math.exp(min(loss, 700))
