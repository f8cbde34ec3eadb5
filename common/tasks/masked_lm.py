"""The task: masked language modelling with ESM-2. What is learned, counted, evaluated and exported.

The trainer knows these methods and nothing else of batches and model; another task has the same ones.

Held-out sums are taken over all masked residues of a split, on all ranks, and divided once: no mean of means. Masks
are a function of the protein alone, so two evaluations, two models and any number of ranks face the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.batches.collators import Batch, Counts, to_device
from common.batches.context import masked_batches
from common.batches.flags import DataFlags
from common.batches.loader import Collator
from common.batches.training_data import EVAL_SEED, TrainingData, held_out_batches, open_data
from common.batches.windows import Pack
from common.esm2 import convert
from common.esm2.pretrained import save_pretrained
from common.files import alphabet
from common.layers.model_card import Training
from common.layers.shapes import filled_up
from common.outputs.curves import ESM2
from common.outputs.metrics import step_line
from common.prepare.sample import SAMPLE, make_sample
from common.ranks.world import World
from common.tasks.arguments import TrainArguments
from common.tasks.base import Task
from common.tasks.built import Built
from common.tasks.counts import StepCounts
from common.tasks.esm2_choice import choose_esm2
from common.tasks.evaluation import held_out_results
from common.tasks.flops import step_flops

UNIGRAM_SAMPLE = 200_000  # proteins, from all over the training split, that the unigram predictor is fitted on
UNIGRAM_RUN = 1000  # of them that are neighbours


class MaskedLM(Task):
    """The task of a run: the model that was built for it, and its data once they are opened."""

    choose = staticmethod(choose_esm2)
    words = ESM2

    data: TrainingData

    def __init__(self, built: Built, flags: TrainArguments, world: World):
        self.built, self.flags, self.bf16, self.world = built, flags, flags.bf16, world
        self.baselines: dict[str, dict] = {}  # of each split, once it was asked for

    def open(self, evaluates: bool) -> None:
        """The data; all ranks together."""
        makers = {SAMPLE: lambda: make_sample(Path(self.flags.output_dir) / SAMPLE)}
        self.data = open_data(self.flags, self.world, evaluates, makers)

    def example(self, tokens: int) -> Batch:
        """This rank's batch of a pack of so many tokens, as long a sequence as may be, of random residues."""
        pack = Pack.of_length(tokens, self.flags.max_seq_length)
        residues = (alphabet.FIRST_RESIDUE, alphabet.FIRST_RESIDUE + 20)
        ids = np.random.default_rng(self.flags.seed).integers(*residues, tokens, dtype=np.uint8)
        return masked_batches(self.flags, self.flags.seed, self.world.mesh)(pack, ids)

    def collator(self) -> Collator:
        # One shape for every step: for each new one a GPU's libraries choose anew, and its allocator takes memory.
        # A CPU would compute the fillers for nothing.
        one_shape = self.world.device.type == "cuda" and self.flags.packing
        pad_to = self.flags.pack_tokens if one_shape else 0
        return masked_batches(self.flags, self.flags.seed, self.world.mesh, pad_to)

    @staticmethod
    def counts(micro_batches: list[Batch]) -> StepCounts:
        """Summed over this rank's micro-batches; none: all zero."""
        computed = sum(filled_up(max(len(batch["input_ids"]), batch.get("pad_to", 0))) for batch in micro_batches)
        return StepCounts(*Counts.of(micro_batches), computed)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy in nats, summed over the masked residues of a batch; fp32 scalar."""
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16):
            return model(**to_device(batch, self.world.device)).loss_sum

    def flops(self, counts: StepCounts) -> float:
        """Of a training step with these counts."""
        return step_flops(self.built.config, counts.num_tokens, counts.sum_squared_lengths, counts.num_masked)

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> dict:
        """As `evaluate`, on a split."""
        store = self.data.held_out(split)
        return evaluate(model, store, self.flags, self.world, prefix, step, self.bf16)

    @staticmethod
    def summary(results: dict) -> str:
        """Those of the validation split in a line, beside its baseline."""
        return (
            f"Held-out loss {results['eval_loss']:.4f} (residue frequencies alone: "
            f"{results['eval_unigram_loss']:.4f}), perplexity {results['perplexity']:.3f}, accuracy "
            f"{results['eval_accuracy']:.4f} ({results['eval_masked_tokens']} masked residues)"
        )

    def baseline(self, split: str, prefix: str) -> dict:
        """As `unigram`, on a split: the line to beat."""
        if split not in self.baselines:
            held_out = self.data.held_out(split)
            self.baselines[split] = unigram(self.data.sample, held_out, self.flags, self.world, prefix)
        return self.baselines[split]

    def line(self, row: dict, packs_per_step: int) -> str:
        """A row of metrics.jsonl for the terminal."""
        return step_line(row)

    def exported(self, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The tensors to export; all ranks ask for one after the other, which `gather` makes whole."""
        parameters = dict(self.built.weights.named_parameters())
        return convert.pieces_to_hf(
            lambda name: gather(parameters[name]).detach(), self.built.config, self.built.extras
        )

    def export(self, pieces: Iterator[tuple[str, Tensor]], directory: Path, training: Training) -> None:
        """Write them where transformers' from_pretrained opens them; the main rank only."""
        save_pretrained(pieces, self.built.config, directory, training)


def evaluate(
    model: nn.Module,
    store,
    flags: DataFlags,
    world: World,
    prefix: str = "eval",
    step: int = 0,
    bf16: bool = False,
) -> dict:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` on the proteins of a store; as `held_out_results`."""
    made = held_out_batches(flags, store, masked_batches(flags, EVAL_SEED, world.mesh), world)
    return held_out_results(model, made, world, prefix, step, bf16, "masked_tokens")


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
