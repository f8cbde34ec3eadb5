"""A model over held-out batches on all ranks: sums of all of them, divided once; no mean of means."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import closing

import torch
from torch import nn

from common.data.collators import to_device
from common.distributed.world import World


@torch.no_grad()
def held_out_results(
    model: nn.Module, made: Generator, world: World, prefix: str, step: int, bf16: bool, predicted: str
) -> dict:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` of a rank's batches, as many on every rank.

    step: of the run, for the watch on hangs; predicted: what is predicted, in a key. Returns {} when the run was told
    to stop meanwhile (all ranks agree).
    """
    started = time.perf_counter()
    # loss in nats, correct, predicted positions, sequences
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    batches = 0
    was_training = model.training
    model.eval()
    world.watch.mark("evaluation", step)
    with closing(made):  # its workers end with it, whatever happens
        while True:
            world.watch.mark("evaluation", step)
            batch, failure = None, None
            try:
                batch = next(made, None)
            except Exception as error:  # the others wait for this rank: they are told
                failure = error
            stop, failed = world.max(torch.tensor([int(world.stop_requested), int(failure is not None)])).tolist()
            if failed:
                world.raise_on_all(failure)
            if stop:
                return {}
            if batch is None:  # on all ranks at once
                break
            with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
                output = model(**to_device(batch, world.device))
            held = [sums.new_tensor(batch[key]) for key in ("num_targets", "num_sequences")]
            sums += torch.stack([output.loss_sum.double(), output.correct.double(), *held])
            batches += 1
    world.watch.rest()
    model.train(was_training)
    runtime = time.perf_counter() - started
    loss_sum, correct, asked, samples = world.sum(sums).tolist()
    asked, samples = max(asked, 1), int(samples)
    return {
        f"{prefix}_loss": loss_sum / asked,
        f"{prefix}_accuracy": correct / asked,
        "perplexity" if prefix == "eval" else f"{prefix}_perplexity": math.exp(min(loss_sum / asked, 700)),
        f"{prefix}_{predicted}": int(asked),
        f"{prefix}_samples": samples,
        f"{prefix}_runtime": runtime,
        f"{prefix}_samples_per_second": samples / runtime,
        f"{prefix}_steps_per_second": batches / runtime,
    }
