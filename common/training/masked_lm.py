"""The task: masked language modelling with ESM-2. What is learned, counted, evaluated and exported.

The trainer knows these methods and nothing else of batches and model; another task has the same ones.

Held-out sums are taken over all masked residues of a split, on all ranks, and divided once: no mean of means. Masks
are a function of the protein alone, so two evaluations, two models and any number of ranks face the same questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.data.collators import Batch, Collator, Counts, masked_batches, to_device
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.training_data import EVAL_SEED, TrainingData, held_out_batches, open_data
from common.distributed.world import World
from common.files import alphabet
from common.models.esm2 import config as presets
from common.models.esm2 import convert
from common.models.esm2.config import override
from common.models.esm2.convert import read_pretrained, save_pretrained
from common.models.esm2.family import NO_KERNEL, check_context, choose_gelu, te_attends
from common.models.esm2.model import Esm2ForMaskedLM
from common.models.layers.backend import check_device, choose_backend
from common.models.layers.hf_directory import Training
from common.shapes import filled_up
from common.training.arguments import TrainArguments
from common.training.evaluation import held_out_results
from common.training.flops import step_flops
from common.training.run_logger import step_line
from common.training.task import BuiltModel, ModelSpec, StepCounts, Task
from extras.curves import ESM2
from extras.prepare.encode import check_tokenizer
from extras.prepare.sample import SAMPLE, make_sample

# Which ESM-2 the flags ask for, and whether this machine can have it.


def choose_esm2(args: TrainArguments, world: World, torch_only: tuple[str, ...], so_far: dict) -> ModelSpec:
    """torch_only: flags that are given and only the torch backend can honour; so_far: what the run that goes on has
    computed with. UserError for what cannot be had here. No collective."""
    if args.model.tokenizer_name:
        check_tokenizer(args.model.tokenizer_name)
    config = presets.load_config(args.model.config_name or args.model.model_name_or_path)
    if args.model.config_overrides:
        config = override(config, args.model.config_overrides)
    torch_only += ("--emulate_precision",) * args.precision.emulate_precision
    backend, why = choose_backend(args.model, world.device, args.precision.bf16, torch_only, so_far.get("backend"))
    check_device(world.device, args.precision.bf16, config.hidden_size // config.num_attention_heads, backend)
    check_context(args.model, args.data.cp_layout, world.cp_size, backend, config)
    gelu, remark = choose_gelu(args.model.gelu or so_far.get("gelu"), backend, config)
    attention = f"Attention by torch's kernels: {NO_KERNEL}" if backend == "te" and not te_attends(config) else None
    remarks = tuple(line for line in (f"Backend: {backend} ({why})", attention, remark) if line)
    read = partial(read_pretrained, args.model.model_name_or_path, config) if args.model.model_name_or_path else None
    make = partial(Esm2ForMaskedLM, config, backend, torch.bfloat16 if args.model.bf16_residual else torch.float32)
    return ModelSpec(config, backend, why, gelu, remarks, make, read)


UNIGRAM_SAMPLE = 200_000  # proteins, from all over the training split, that the unigram predictor is fitted on
UNIGRAM_RUN = 1000  # of them that are neighbours


class MaskedLM(Task):
    """The task of a run: the model that was built for it, and its data once they are opened."""

    choose = staticmethod(choose_esm2)
    words = ESM2

    data: TrainingData

    def __init__(self, built: BuiltModel, flags: TrainArguments, world: World):
        self.built, self.flags, self.bf16, self.world = built, flags, flags.precision.bf16, world
        self.baselines: dict[str, dict] = {}  # of each split, once it was asked for

    def open(self, evaluates: bool) -> None:
        """The data; all ranks together."""
        makers = {SAMPLE: lambda: make_sample(Path(self.flags.checkpoint.output_dir) / SAMPLE)}
        self.data = open_data(self.flags.data, self.world, evaluates, makers)

    def example(self, tokens: int) -> Batch:
        """This rank's batch of a pack of so many tokens, as long a sequence as may be, of random residues."""
        pack = Pack.of_length(tokens, self.flags.data.max_seq_length)
        residues = (alphabet.FIRST_RESIDUE, alphabet.FIRST_RESIDUE + 20)
        ids = np.random.default_rng(self.flags.data.seed).integers(*residues, tokens, dtype=np.uint8)
        return masked_batches(self.flags.data, self.flags.data.seed, self.world.mesh)(pack, ids)

    def collator(self) -> Collator:
        # One shape for every step: for each new one a GPU's libraries choose anew, and its allocator takes memory.
        # A CPU would compute the fillers for nothing.
        one_shape = self.world.device.type == "cuda" and self.flags.data.packing
        pad_to = self.flags.pack_tokens if one_shape else 0
        return masked_batches(self.flags.data, self.flags.data.seed, self.world.mesh, pad_to)

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
        return step_flops(self.built.config, counts.num_tokens, counts.sum_squared_lengths, counts.num_targets)

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> dict:
        """As `evaluate`, on a split."""
        store = self.data.held_out(split)
        return evaluate(model, store, self.flags.data, self.world, prefix, step, self.bf16)

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
            self.baselines[split] = unigram(self.data.sample, held_out, self.flags.data, self.world, prefix)
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
    with world.raise_together():
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
