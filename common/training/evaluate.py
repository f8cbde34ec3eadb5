"""Held-out loss, accuracy and perplexity, and what a predictor that only knows residue frequencies would get.

Sums are taken over all masked residues of a split, on all ranks, and divided once: no mean of means. Masks are a
function of the protein alone, so two evaluations, two models and any number of ranks face the same questions.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import nn

from common.batches.batches import evaluation_loader, to_device
from common.files import alphabet
from common.ranks.sharding import reshard
from common.ranks.world import World

UNIGRAM_SAMPLE = 200_000  # proteins, from all over the training split, that the unigram predictor is fitted on
UNIGRAM_RUN = 1000  # of them that are neighbours


@torch.no_grad()
def evaluate(model: nn.Module, store, args, world: World, prefix: str = "eval", step: int = 0) -> dict:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` on the proteins of a store.

    step: of the run, for the watch on hangs. Returns {} when the run was told to stop meanwhile (all ranks agree).
    """
    loader = evaluation_loader(args, store, world)
    started = time.perf_counter()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # loss in nats, correct, masked residues
    batches = 0
    was_training = model.training
    model.eval()
    world.watch.mark("evaluation", step)
    for batch in loader:
        world.watch.mark("evaluation", step)
        if world.any(world.stop_requested):
            return {}
        with torch.autocast(world.device.type, torch.bfloat16, enabled=args.bf16):
            output = model(**to_device(batch, world.device))
        sums += torch.stack([output.loss_sum.double(), output.correct.double(), sums.new_tensor(batch["num_masked"])])
        batches += 1
    world.watch.rest()
    model.train(was_training)
    reshard(model)
    loss_sum, correct, masked = world.sum(sums).tolist()
    runtime = time.perf_counter() - started
    masked = max(masked, 1)
    return {
        f"{prefix}_loss": loss_sum / masked,
        f"{prefix}_accuracy": correct / masked,
        "perplexity" if prefix == "eval" else f"{prefix}_perplexity": math.exp(min(loss_sum / masked, 700)),
        f"{prefix}_masked_tokens": int(masked),
        f"{prefix}_samples": len(store),
        f"{prefix}_runtime": runtime,
        f"{prefix}_samples_per_second": len(store) / runtime,
        f"{prefix}_steps_per_second": batches / runtime,
    }


def unigram(training, store, args, world: World, prefix: str = "eval") -> dict:
    """The same questions answered from the residue frequencies of training proteins (a store) alone: the line to beat.

    Frequencies have one added to every count, so that a residue never seen in training costs a finite number.
    """
    log_p = np.log(residue_frequencies(training))
    sums = torch.zeros(3, dtype=torch.float64)
    for batch in evaluation_loader(args, store, world):
        labels = batch["labels"].flatten().numpy()
        labels = labels[labels >= 0]
        correct = (labels == log_p.argmax()).sum()
        sums += torch.tensor([-log_p[labels].sum(), correct, len(labels)], dtype=torch.float64)
    loss_sum, correct, masked = world.sum(sums).tolist()
    masked = max(masked, 1)
    return {
        f"{prefix}_unigram_loss": loss_sum / masked,
        f"{prefix}_unigram_accuracy": correct / masked,
        f"{prefix}_unigram_perplexity": math.exp(loss_sum / masked),
    }


def residue_frequencies(store) -> np.ndarray:
    """Relative frequencies of the 33 tokens among the residues, float64 [33]; zero for what is never masked."""
    counts = np.zeros(alphabet.VOCAB_SIZE)
    # Runs of neighbours: single records all over a large store would be as many reads of the filesystem.
    starts = np.arange(0, len(store), UNIGRAM_RUN)
    if len(store) > UNIGRAM_SAMPLE:
        starts = np.linspace(0, len(store) - UNIGRAM_RUN, UNIGRAM_SAMPLE // UNIGRAM_RUN).astype(np.int64)
    for start in starts:
        block = np.arange(start, min(start + UNIGRAM_RUN, len(store)))
        ids, _ = store.gather(block, np.zeros_like(block), store.lengths(block))
        counts += np.bincount(ids, minlength=alphabet.VOCAB_SIZE)
    residues = slice(alphabet.FIRST_RESIDUE, alphabet.LAST_RESIDUE + 1)
    frequencies = np.full_like(counts, 1e-300)
    frequencies[residues] = (counts[residues] + 1) / (counts[residues] + 1).sum()
    return frequencies
