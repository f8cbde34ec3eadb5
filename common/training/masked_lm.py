"""Masked language modelling with an encoder. What differs between encoders is their family's (common.models.family).

Held-out sums are over all selected residues of a split, on all ranks, and divided once: no mean of means. Masks depend
on the protein alone, so every evaluation, model and number of ranks predicts the same residues. Of those, 80 % are
hidden behind `<mask>`, 10 % stay as they are, and 10 % are replaced (BERT's rates): a model learns within a few steps
to copy what it is shown, so what it knows of proteins is the loss of the hidden ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.data import TokenSet
from common.data.collators import Batch, Collator, Counts, to_device
from common.data.crops import Pack
from common.data.flags import DataFlags
from common.data.loader import StepCounts
from common.data.packs_per_step import PacksPerStep
from common.data.training_data import (
    ProteinData,
    evaluation_masks,
    held_out_batches,
    held_out_masks,
    masked_batches,
    open_data,
)
from common.distributed.world import World
from common.flags import Missing
from common.hooks import extra
from common.models.esm2.family import ModelFlags
from common.models.family import Family, encoder_family
from common.shape_buckets import filled_up
from common.training.arguments import RunArguments
from common.training.baselines import BaselineLosses, Baselines
from common.training.curves import PlotLabels
from common.training.evaluation import held_out_results, perplexity
from common.training.log_row import step_line
from common.training.protein_losses import Evaluation, ProteinLosses
from common.training.task import BuiltModel, Task

SHOWN = ("masked", "kept", "random")  # what stands where a residue is asked: <mask>, itself, another one


@dataclass(frozen=True)
class TrainArguments(RunArguments):
    """The flags of a run of masked language modelling."""

    model: ModelFlags = field(default_factory=ModelFlags)
    data: DataFlags = field(default_factory=DataFlags)

    @property
    def model_named(self) -> str | None:
        return self.model.config_name or self.model.model_name_or_path

    @property
    def family(self) -> Family:
        return encoder_family(str(self.model_named), self.model.model_type)

    def missing(self) -> Iterator[Missing]:
        if self.model.bf16_residual and not self.precision.bf16:
            yield Missing("--bf16", "--bf16_residual needs bf16 layers")

    def check(self) -> None:
        if self.data.set_tokens is not None:
            extra().check_sets(self.data, self.family)
        if self.data.chains:
            extra().chains().chain_tokens(self.family, self.data.chains)
        if self.data.objective == "mdlm":
            extra().check_diffusion(self.data)


def open_proteins(task: Task[Any, Any], tokens: TokenSet, evaluates: bool) -> tuple[ProteinData, dict[str, str]]:
    """(the proteins of a run, {held-out set that is evaluated while training: prefix of its results}); all ranks
    together."""
    flags, world = task.flags, task.world
    makers = {"sample": lambda: extra().make_sample(Path(flags.checkpoint.output_dir))}
    data = open_data(flags.data, tokens, world, evaluates, makers)
    named = {name: f"eval_{name}" for name in data.flags.eval_sets if name != "validation"}
    with world.raise_together():
        own = {} if named and data.held_out("validation") is None else task.held_out
    return data, own | named


class MaskedLM(Task[TrainArguments, ProteinData]):
    """Masked language modelling of proteins."""

    labels = PlotLabels()
    metrics = ("loss_masked", "loss", "loss_kept", "loss_random", "accuracy_masked", "accuracy", "perplexity_masked")

    def __init__(self, built: BuiltModel, flags: TrainArguments, world: World):
        super().__init__(built, flags, world)
        self.bf16 = flags.precision.bf16
        self.tokens = self.family.tokens_of(built.config)
        self._baselines: Baselines | None = None
        self._of_split: dict[str, BaselineLosses] = {}
        self._homologs = None
        if flags.data.set_tokens is not None:
            self._homologs, self.metrics = extra().with_homologs(self), (*self.metrics, "loss_masked_with_homologs")
        self._bound, is_diffusion = None, flags.data.objective == "mdlm"
        if is_diffusion or flags.data.eval_nelbo:
            self._bound = extra().held_out_bound(self)
            self.metrics = ("nelbo", *self.metrics) if is_diffusion else (*self.metrics, "nelbo")

    def open(self, evaluates: bool) -> None:
        self.data, self.held_out = open_proteins(self, self.tokens, evaluates)

    def example(self, tokens: int) -> Batch:
        pack = Pack.of_length(tokens, self.flags.data.max_seq_length)
        choices = np.array(self.tokens.replacements, dtype=self.tokens.dtype)
        ids = choices[np.random.default_rng(self.flags.data.seed).integers(len(choices), size=tokens)]
        return masked_batches(self.flags.data, self.tokens, self.world.mesh)(pack, ids)

    def collator(self, total_steps: int) -> Collator:
        tokens, static_shape = self.tokens, self.built.static_shape
        return masked_batches(self.flags.data, tokens, self.world.mesh, total_steps, static_shape)

    @staticmethod
    def counts(micro_batches: list[Batch]) -> StepCounts:
        computed = sum(filled_up(len(batch["input_ids"])) for batch in micro_batches)
        return StepCounts(*Counts.of(micro_batches), computed)

    def loss_sum(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16):
            return model(**to_device(batch, self.world.device)).loss_sum

    def evaluate(self, model: nn.Module, split: str, prefix: str, step: int) -> Evaluation:
        store, beside = self.data.held_out(split), self.baselines(split, prefix)
        settings = self.bf16, self.built.static_shape
        where, has_bar = (self.flags.data, self.world, prefix, step), not self.flags.log.disable_tqdm
        results, losses = evaluate(model, store, self.tokens, *where, *settings, has_bar)
        if losses is None:
            return Evaluation(results)
        with self.world.raise_together():
            clusters = self.data.clusters(split)
        losses = replace(losses, questions=beside.questions, clusters=clusters)
        if clusters is not None:
            results[f"{prefix}_clusters"] = len(np.unique(clusters[losses.masked > 0]))
        if self._homologs is not None and clusters is not None:
            if (of_sets := self._homologs.evaluate(model, split, prefix, step, losses)) is None:
                return Evaluation({})
            results |= of_sets
        if self._bound is not None:
            if (bound := self._bound.evaluate(model, store, prefix, step, clusters, beside.log_frequencies)) is None:
                return Evaluation({})
            results |= bound
        return Evaluation(results | beside.results | below(losses, beside, prefix), losses)

    def flops(self, counts: StepCounts) -> float:
        if self.flags.data.objective == "mdlm":
            share = extra().diffusion_predicted(self.flags.data)
            counts = counts._replace(num_targets=round(share * counts.num_targets))
        return super().flops(counts)

    def baselines(self, split: str, prefix: str) -> BaselineLosses:
        """Losses on a split of the baselines that the model is compared with; all ranks together."""
        if split not in self._of_split:
            tokens, flags = self.tokens, self.flags.data
            with self.world.raise_together():
                self._baselines = self._baselines or Baselines(self.data.sample(), tokens)
            asked = held_out_masks(flags, tokens)
            store = self.data.held_out(split)
            self._of_split[split] = self._baselines.losses(store, flags, asked, self.world, prefix)
        return self._of_split[split]

    @staticmethod
    def summary(results: dict, prefix: str = "eval") -> str:
        if f"{prefix}_loss_masked" not in results:
            return f"No hidden residue in {results[f'{prefix}_samples']} held-out proteins: no loss"
        text = (
            "Held-out loss {loss_masked:.4f} of {masked_tokens} hidden residues (by their frequencies "
            "{unigram_loss_masked:.4f}, by their neighbours {neighbours_loss_masked:.4f}), perplexity "
            "{perplexity_masked:.3f}, accuracy {accuracy_masked:.4f}; {loss:.4f} of all {selected_tokens} selected"
        )
        return text.format(**{name.removeprefix(f"{prefix}_"): value for name, value in results.items()})

    def line(self, row: dict, packs_per_step: PacksPerStep) -> str:
        return step_line(row, self.data.row_fields)


def evaluate(
    model: nn.Module,
    store: Any,
    tokens: TokenSet,
    flags: DataFlags,
    world: World,
    prefix: str = "eval",
    step: int = 0,
    bf16: bool = False,
    static_shape: bool = False,
    has_bar: bool = False,
) -> Evaluation:
    """`{prefix}_{loss,accuracy,perplexity,samples,runtime,...}` on the proteins of a store; as `held_out_results`,
    with the results of `SelectedSums`."""
    batches = held_out_batches(flags, store, evaluation_masks(flags, tokens, world.mesh, static_shape), world)
    also = SelectedSums(len(store), tokens, world.device)
    sequences = len(store) if has_bar else None
    return held_out_results(model, batches, world, prefix, step, bf16, "selected_tokens", also, sequences)


def add_by_protein(sums: Tensor, values: Tensor, bounds: Tensor, records: Tensor) -> None:
    """Add the values [k, T] of a pack's tokens to sums [k, proteins]. No synchronisation.

    bounds: int64 [B + 1], of the pack's sequences; records: which protein each is.
    """
    # Rows of a sequence each: `bounds` may have fillers behind the pack's own, and tokens beyond the last bound.
    sequence = torch.bucketize(torch.arange(values.shape[1], device=values.device), bounds[1:], right=True)
    each = values.new_zeros(len(values), len(bounds)).index_add_(1, sequence, values)
    records = records.to(values.device, non_blocking=True)
    sums.index_add_(1, records, each[:, : len(records)])


class SelectedSums:
    """Sums over the residues asked, by what is shown in their place, and over the hidden ones of each protein.

    tokens: of the model. A random residue that happens to be the true one counts as kept: the model is shown the same.
    """

    def __init__(self, proteins: int, tokens: TokenSet, device: torch.device):
        self.masked = torch.from_numpy(tokens.masked_ids.astype(np.int64)).to(device)
        self.by_shown = torch.zeros(3, len(SHOWN) + 1, dtype=torch.float64, device=device)  # loss, correct, number
        self.by_protein = torch.zeros(2, proteins, dtype=torch.float64, device=device)  # hidden: loss, number

    def add(self, output: Any, inputs: dict[str, Any], batch: Batch) -> None:
        """The output has token_losses and token_correct [T]: a model's in eval mode. No synchronisation."""
        shown, labels = inputs["input_ids"], inputs["labels"]
        asked = labels >= 0
        masked = self.masked[labels.clamp(min=0)]
        kind = torch.where(shown == masked, 0, torch.where(shown == labels, 1, 2)).masked_fill(~asked, len(SHOWN))
        values = torch.stack([output.token_losses.double(), output.token_correct.double(), asked.double()])
        self.by_shown.index_add_(1, kind, values)
        add_by_protein(self.by_protein, values[::2] * (kind == 0), inputs["cu_seqlens"].long(), batch["records"])

    def reduced(self, world: World, prefix: str) -> Evaluation:
        """`{prefix}_loss_*` and `{prefix}_*_tokens` for each of `SHOWN`; accuracy and perplexity of the hidden."""
        results: dict[str, Any] = {}
        for name, (loss, correct, number) in zip(SHOWN, world.sum(self.by_shown).T.tolist(), strict=False):
            results[f"{prefix}_{name}_tokens"] = int(number)
            if number:
                results[f"{prefix}_loss_{name}"] = loss / number
            if number and name == "masked":
                results[f"{prefix}_accuracy_masked"] = correct / number
                results[f"{prefix}_perplexity_masked"] = perplexity(loss / number)
        loss_sum, masked = world.sum(self.by_protein).cpu().numpy()
        return Evaluation(results, ProteinLosses(loss_sum, masked.astype(np.int32)))


def below(losses: ProteinLosses, baselines: BaselineLosses, prefix: str) -> dict[str, float]:
    """How far the loss of the hidden residues is below the baselines', with standard errors over proteins, or over
    their clusters."""
    results = {}
    for name, theirs in baselines.proteins.items():
        mean, error = losses.below(theirs)
        results |= {f"{prefix}_below_{name}_masked": mean, f"{prefix}_below_{name}_masked_stderr": error}
    return {name: value for name, value in results.items() if np.isfinite(value)}
