"""Changes to a training run that are tried out in benchmarks.time_to_loss, and are in no script of the project.

    python -m benchmarks.candidates normuon train_ddp.py --optim muon --config_name facebook/esm2_t6_8M_UR50D ...
    python -m benchmarks.candidates z_loss=1e-4,zero_init train_ddp.py ...

Several go together, and some take a value. One process, torch backend; a resumed run starts their state anew. What
wins over several seeds by more than noise becomes a flag; docs/optimisation.md has the results.
"""

from __future__ import annotations

import extras  # noqa: F401  # isort: skip  (before torch: see common/__init__.py)
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from common.cli import UserError, run
from common.models.esm2 import model as esm2
from common.training import evaluation, load_model, task


def normuon(beta: float = 0.95) -> None:
    """Divide each row of Muon's orthogonal update by its RMS, averaged over steps, and keep the update's norm.

    Li et al. 2025, arXiv:2510.05491.
    """
    from extras.speed.muon import Muon

    orthogonal = Muon._updates
    averages: dict[tuple[int, int], Tensor] = {}  # of a block's rows: mean square of the update

    def updates(self, blocks, rows):
        done = []
        for block, update in zip(blocks, orthogonal(self, blocks, rows), strict=True):
            matrices = block.matrices(update.float())  # [parts, rows, columns]
            square = matrices.square().mean(-1, keepdim=True)
            average = averages.setdefault((block.number, block.here.start), torch.zeros_like(square))
            average.lerp_(square, 1 - beta)
            even = matrices / average.sqrt().clamp(min=1e-8)
            norms = [torch.linalg.vector_norm(each, dim=(1, 2), keepdim=True) for each in (matrices, even)]
            done.append(block.rows(even * norms[0] / norms[1].clamp(min=1e-8)))
        return done

    Muon._updates = updates


def with_hooks(before: Callable, after: Callable) -> None:
    """Call before(optimizer) and after(optimizer) around each of the optimiser's steps."""
    build = task.build_optimizer

    def built(*args, **kwargs):
        optimizer = build(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda optimizer, *_: before(optimizer))
        optimizer.register_step_post_hook(lambda optimizer, *_: after(optimizer))
        return optimizer

    task.build_optimizer = built


def cautious_decay() -> None:
    """Decay a weight only where the update, too, moves it towards zero. Chen et al. 2025, arXiv:2510.12402."""
    saved: list[tuple[dict, float, list[Tensor]]] = []

    def before(optimizer) -> None:
        for group in optimizer.param_groups:
            saved.append((group, group["weight_decay"], [p.detach().clone() for p in group["params"]]))
            group["weight_decay"] = 0.0

    @torch.no_grad()
    def after(optimizer) -> None:
        for group, decay, weights in saved:
            group["weight_decay"] = decay
            for parameter, old in zip(group["params"], weights, strict=True):
                towards_zero = (parameter - old) * old < 0
                parameter.sub_(old * towards_zero, alpha=group["lr"] * decay)
        saved.clear()

    with_hooks(before, after)


def ema(decay: float = 0.95) -> None:
    """Evaluate an exponential moving average of the weights, which starts with the first steps' plain average."""
    averages: dict[Tensor, Tensor] = {}
    steps = 0

    @torch.no_grad()
    def after(optimizer) -> None:
        nonlocal steps
        steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                average = averages.setdefault(parameter, parameter.detach().clone())
                average.lerp_(parameter, 1 - min(decay, (steps - 1) / steps))

    @torch.no_grad()
    def swap() -> None:
        for parameter, average in averages.items():
            parameter.data, averages[parameter] = average, parameter.data

    evaluate = evaluation.Evaluator.evaluate

    def averaged(self, *args, **kwargs):
        swap()
        try:
            return evaluate(self, *args, **kwargs)
        finally:
            swap()

    with_hooks(lambda optimizer: None, after)
    evaluation.Evaluator.evaluate = averaged


def z_loss(weight: float = 1e-4) -> None:
    """Add weight x logsumexp(logits)^2 of each target to the training loss. PaLM, arXiv:2204.02311."""

    def cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
        loss = F.cross_entropy(logits, targets, reduction=reduction)
        if not torch.is_grad_enabled():  # an evaluation
            return loss
        return loss + weight * (logits.logsumexp(-1) * (targets >= 0)).square().sum()

    esm2.F = SimpleNamespace(**vars(F) | {"cross_entropy": cross_entropy})


def zero_init() -> None:
    """Start with layers that add nothing: the output matrices of attention and feed-forward are zero."""
    initialise = load_model.initialise

    def zeroed(model, *args) -> None:
        initialise(model, *args)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("self_attention.proj.weight", "layernorm_mlp.fc2_weight")):
                    parameter.zero_()

    load_model.initialise = zeroed


def head_by_adamw() -> None:
    """Update the matrix of the LM head by AdamW, as the embeddings; Muon keeps those of the layers."""
    found = esm2.Esm2ForMaskedLM.hidden_matrices

    def of_layers(self) -> dict:
        return {name: blocks for name, blocks in found(self).items() if name != "lm_head.dense.weight"}

    esm2.Esm2ForMaskedLM.hidden_matrices = of_layers


CHANGES = {change.__name__: change for change in (normuon, cautious_decay, ema, z_loss, zero_init, head_by_adamw)}


def apply(changes: str) -> None:
    for change in changes.split(","):
        name, given, value = change.partition("=")
        if name not in CHANGES:
            raise UserError(f"{name}: choose of {', '.join(CHANGES)}")
        try:
            CHANGES[name](*([float(value)] if given else []))
        except (TypeError, ValueError):
            raise UserError(f"{change}: expected NAME or NAME=NUMBER, where a change takes one") from None


def main() -> None:
    if len(sys.argv) < 3:
        raise UserError("expected a change, a script and its flags, such as zero_init train_ddp.py --max_steps 100")
    changes, *sys.argv = sys.argv[1:]
    apply(changes)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    run(main)
