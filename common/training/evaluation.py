"""Evaluation on held-out batches by all ranks: sums over the whole split, divided once (no mean of means)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from common import console
from common.data.collators import Batch, to_device
from common.distributed.strategy import Strategy
from common.distributed.world import World
from common.training.task import Task

logger = logging.getLogger(__name__)

# {name: (a model's output, its batch) -> scalar}, summed over the batch's targets; results have the mean over all.
METRICS: dict[str, Callable[[Any, Batch], Tensor]] = {"accuracy": lambda output, batch: output.correct}

# (a model's output, its batch) -> float64 [2, sequences]: how far the loss is below the baseline's, summed over the
# targets of each sequence, and their number.
Baseline = Callable[[Any, Batch], Tensor]


class Evaluator:
    """Evaluates the model of a run; all ranks together. `results` are the last ones of all splits."""

    def __init__(self, task: Task, strategy: Strategy):
        self.task, self.strategy = task, strategy
        self._last: dict[tuple[str, int], dict] = {}  # {(split, step): results} of the last evaluation
        self.results: dict[str, Any] = {}
        self._downstream = None
        self._last_downstream: dict[int, dict] = {}  # {step: results}
        if task.flags.downstream.given:
            from extras.downstream.in_loop import Downstream

            self._downstream = Downstream(task)

    def has(self, split: str) -> bool:
        """Whether there is anything to evaluate on."""
        with self.task.world.raise_together():
            absent = self.task.data.held_out(split) is None
        return not absent

    def evaluate(self, step: int, split: str = "validation", prefix: str = "eval", downstream: bool = False) -> dict:
        """Results of a held-out split after `step` steps; {} if the run was stopped meanwhile (on all ranks).

        downstream: with those of what else the flags ask of the model.
        """
        results = self._held_out(step, split, prefix)
        if results and downstream:
            results = results | self.downstream(step)
        self.results |= results
        return results

    def _held_out(self, step: int, split: str, prefix: str) -> dict:
        if (split, step) in self._last:  # the last step's evaluation is also the one at the end of the run
            return self._last[split, step]
        is_logged = split == "validation"  # of the test split only the results at the end
        if is_logged:
            logger.info("***** Running Evaluation *****")
        results = self.task.evaluate(self.strategy.evaluated, split, prefix, step)
        self.strategy.reshard()
        self.strategy.model.train()
        if results:
            results |= self.task.baseline(split, prefix)
            self._last = {(split, step): results}
        if is_logged and results:
            logger.info(self.task.summary(results))
        return results

    def downstream(self, step: int) -> dict[str, float]:
        """Results of what else the flags ask of the model after `step` steps (extras.downstream.in_loop); or {}."""
        if self._downstream is None:
            return {}
        if step not in self._last_downstream:
            self._last_downstream = {step: self._downstream.evaluate(self.strategy.full_tensor, step)}
            self.strategy.reshard()
        return self._last_downstream[step]

    def fitted(self) -> tuple[dict[str, Tensor], int | None]:
        """Of rank 0: tensors to export that an evaluation has fitted, and on how many chains."""
        return ({}, None) if self._downstream is None else self._downstream.fitted()


@torch.no_grad()
def held_out_results(
    model: nn.Module,
    batches: Generator,
    world: World,
    prefix: str,
    step: int,
    bf16: bool,
    targets: str,
    baseline: Baseline | None = None,
    sequences: int | None = None,
) -> dict:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` of this rank's batches, as many on every rank.

    step: of the run, for the hang watch; targets: the results' key for the number of predicted tokens; baseline: what
    the loss is compared with, sequence by sequence; sequences: of all ranks, for a bar, None for no bar. Returns {} if
    the run was stopped meanwhile (on all ranks).
    """
    started = time.perf_counter()
    # targets, sequences, loss in nats, metrics
    sums = torch.zeros(3 + len(METRICS), dtype=torch.float64, device=world.device)
    differences = torch.zeros(5, dtype=torch.float64, device=world.device)
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
                batch = next(batches, None)
            except Exception as error:  # the other ranks wait in the all-reduce below
                failure = error
            stop, failed = world.max(torch.tensor([int(world.stop.requested), int(failure is not None)])).tolist()
            if failed:
                world.raise_on_all(failure)
            if stop:
                return {}
            if batch is None:  # on all ranks at once
                break
            with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
                output = model(**to_device(batch, world.device))
            counts = [sums.new_tensor(batch[key]) for key in ("num_targets", "num_sequences")]
            values = [output.loss_sum, *(metric(output, batch) for metric in METRICS.values())]
            sums += torch.stack([*counts, *(value.double() for value in values)])
            if baseline is not None:
                differences += sums_of_differences(baseline(output, batch)).to(differences)
            num_batches += 1
            bar.update(min(int(batch["num_sequences"] * world.mesh.dp_size), (sequences or 0) - bar.n))
    world.watch.rest()
    model.train(was_training)
    runtime = time.perf_counter() - started
    num_targets, samples, loss_sum, *metrics = world.sum(sums).tolist()
    num_targets, samples = max(num_targets, 1), int(samples)
    return {
        f"{prefix}_loss": loss_sum / num_targets,
        **{f"{prefix}_{name}": total / num_targets for name, total in zip(METRICS, metrics, strict=True)},
        "perplexity" if prefix == "eval" else f"{prefix}_perplexity": math.exp(min(loss_sum / num_targets, 700)),
        f"{prefix}_{targets}": int(num_targets),
        f"{prefix}_samples": samples,
        f"{prefix}_runtime": runtime,
        f"{prefix}_samples_per_second": samples / runtime,
        f"{prefix}_steps_per_second": num_batches / runtime,
        **({} if baseline is None else below_baseline(world.sum(differences).tolist(), f"{prefix}_below_unigram")),
    }


def sums_of_differences(each: Tensor) -> Tensor:
    """each: of a `Baseline`. float64 [5], to be added up over batches: sums of d, n, d d, d n, n n."""
    d, n = each
    return torch.stack([d.sum(), n.sum(), (d * d).sum(), (d * n).sum(), (n * n).sum()])


def below_baseline(sums: list[float], name: str) -> dict[str, float]:
    """The mean difference per target and its standard error, of a ratio of sums over sequences (Cochran 1977, 6.4)."""
    d, n, dd, dn, nn = sums
    if not n:
        return {}
    mean = d / n
    return {name: mean, f"{name}_stderr": math.sqrt(max(0.0, dd - 2 * mean * dn + mean * mean * nn)) / n}
