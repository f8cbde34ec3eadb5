"""The task: masked language modelling with ESM-2. What is learned, counted, evaluated and exported.

The trainer knows these methods and nothing else of batches and model; another task has the same ones.

Held-out sums are taken over all masked residues of a split, on all ranks, and divided once: no mean of means. Masks
are a function of the protein alone, so two evaluations, two models and any number of ranks face the same questions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.batches.collators import Batch, Counts, to_device
from common.batches.context import masked_batches
from common.batches.flags import DataFlags
from common.batches.loader import TrainLoader
from common.batches.training_data import EVAL_SEED, Makers, TrainingData, held_out_batches, open_data
from common.batches.windows import Pack
from common.files import alphabet
from common.model import convert
from common.model.esm2 import computed_tokens
from common.model.pretrained import save_pretrained
from common.ranks.world import Mesh, World
from common.training.load_model import Built
from common.training.metrics import step_flops

UNIGRAM_SAMPLE = 200_000  # proteins, from all over the training split, that the unigram predictor is fitted on
UNIGRAM_RUN = 1000  # of them that are neighbours


class StepCounts(NamedTuple):
    """What micro-batches hold (`Counts`), and on how many tokens, fillers included, the layers run for them."""

    num_masked: int
    num_tokens: int
    sum_squared_lengths: int
    num_sequences: int
    num_unknown: int
    num_computed: int


class MaskedLM:
    """The task of a run: its data, opened by all ranks together, and the model that was built for it."""

    def __init__(self, built: Built, flags: DataFlags, bf16: bool, world: World, evaluates: bool, makers: Makers):
        self.built, self.flags, self.bf16, self.world = built, flags, bf16, world
        self.data: TrainingData = open_data(flags, world, evaluates, makers)

    def steps(self, packs_per_step: int, step: int, position: dict, last_step: int | None) -> TrainLoader:
        """This rank's share of the steps from number `step` on, which begins at `position`, up to `last_step`; where
        that is None, up to the end of the data."""
        flags = self.flags
        return TrainLoader(
            self.data.order(packs_per_step),
            masked_batches(flags, flags.seed, self.world.mesh),
            self.world.mesh,
            step,
            position,
            num_steps=None if last_step is None else max(0, last_step - step),
            num_workers=flags.dataloader_num_workers,
            prefetch_factor=flags.dataloader_prefetch_factor,
            pin_memory=flags.dataloader_pin_memory and self.world.device.type == "cuda",
        )

    @staticmethod
    def counts(micro_batches: list[Batch]) -> StepCounts:
        """Summed over this rank's micro-batches; none: all zero."""
        computed = sum(computed_tokens(len(batch["input_ids"])) for batch in micro_batches)
        return StepCounts(*Counts.of(micro_batches), computed)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy in nats, summed over the masked residues of a batch; fp32 scalar."""
        return loss_sum(model, batch, self.world.device, self.bf16)

    def flops(self, counts: StepCounts) -> float:
        """Of a training step with these counts."""
        return step_flops(self.built.config, counts.num_tokens, counts.sum_squared_lengths, counts.num_masked)

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> dict:
        """As `evaluate`, on a split."""
        store = self.data.held_out(split)
        return evaluate(model, store, self.flags, self.world, prefix, step, self.bf16)

    @staticmethod
    def summary(results: dict) -> str:
        """Those of the validation split in a line."""
        return (
            f"Held-out loss {results['eval_loss']:.4f}, perplexity {results['perplexity']:.3f}, "
            f"accuracy {results['eval_accuracy']:.4f} ({results['eval_masked_tokens']} masked residues)"
        )

    def baseline(self, split: str, prefix: str) -> dict:
        """As `unigram`, on a split: the line to beat."""
        return unigram(self.data.sample, self.data.held_out(split), self.flags, self.world, prefix)

    def exported(self, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors to export; all ranks ask for one after the other, which `gather` makes whole."""
        parameters = dict(self.built.weights.named_parameters())
        return convert.pieces_to_hf(
            lambda name: gather(parameters[name]).detach(), self.built.config, self.built.extras
        )

    def export(self, pieces: Iterator[tuple[str, Tensor]], directory: Path) -> None:
        """Write them where transformers' from_pretrained opens them; the main rank only."""
        save_pretrained(pieces, self.built.config, directory)


def loss_sum(model: nn.Module, batch: Batch, device: torch.device, bf16: bool) -> Tensor:
    """As `MaskedLM.loss_sum`, which needs the data of a run."""
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        return model(**to_device(batch, device)).loss_sum


def example(flags: DataFlags, mesh: Mesh, tokens: int) -> Batch:
    """A rank's batch, as of a run, of a pack of so many tokens: sequences as long as they may be, of random residues."""
    lengths = np.full(-(-tokens // flags.max_seq_length), flags.max_seq_length, dtype=np.int64)
    lengths[-1] -= lengths.sum() - tokens
    records = np.arange(len(lengths), dtype=np.int64)
    residues = np.random.default_rng(flags.seed).integers(
        alphabet.FIRST_RESIDUE, alphabet.FIRST_RESIDUE + 20, tokens, dtype=np.uint8
    )
    return masked_batches(flags, flags.seed, mesh)(Pack(records, np.zeros_like(records), lengths, 0), residues)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    store,
    flags: DataFlags,
    world: World,
    prefix: str = "eval",
    step: int = 0,
    bf16: bool = False,
) -> dict:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` on the proteins of a store.

    step: of the run, for the watch on hangs. Returns {} when the run was told to stop meanwhile (all ranks agree).
    """
    started = time.perf_counter()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)  # loss in nats, correct, masked residues
    batches = 0
    was_training = model.training
    model.eval()
    world.watch.mark("evaluation", step)
    made = held_out_batches(flags, store, masked_batches(flags, EVAL_SEED, world.mesh), world)
    while True:
        world.watch.mark("evaluation", step)
        batch, failure = None, None
        try:
            batch = next(made, None)
        except Exception as error:  # the others wait for this rank: they are told
            failure = error
        stop, failed = world.max(torch.tensor([int(world.stop_requested), int(failure is not None)])).tolist()
        if failed:
            world.end_together(failure)
        if stop:
            return {}
        if batch is None:  # on all ranks at once
            break
        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
            output = model(**to_device(batch, world.device))
        sums += torch.stack([output.loss_sum.double(), output.correct.double(), sums.new_tensor(batch["num_masked"])])
        batches += 1
    world.watch.rest()
    model.train(was_training)
    runtime = time.perf_counter() - started
    loss_sum, correct, masked = world.sum(sums).tolist()
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


def unigram(training: Callable, store, flags: DataFlags, world: World, prefix: str = "eval") -> dict:
    """The same questions answered from the residue frequencies of training proteins alone: what `training()` opens.

    Frequencies have one added to every count, so that a residue never seen in training costs a finite number.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    with world.together():
        log_p = np.log(residue_frequencies(training()))
        for batch in held_out_batches(flags, store, masked_batches(flags, EVAL_SEED, world.mesh), world):
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
