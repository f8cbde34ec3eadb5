"""AdamW with weight-decay groups, and learning-rate schedules as functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from common.cli import UserError
from common.flags import Flags, flag

if TYPE_CHECKING:
    from common.distributed.strategy import Strategy
    from common.distributed.world import World
    from common.training.task import BuiltModel

OPTIMIZERS = ("adamw_torch_fused", "muon")
ESM2_WARMUP_STEPS = 2000  # Lin et al. 2023, supplement A.2.4; also: decay to a tenth of the peak at 90 % of the run
ESM2_FINAL_FRACTION, ESM2_DECAY_END = 0.1, 0.9


@dataclass(frozen=True)
class OptimizerFlags(Flags):
    group = "optimiser"
    advanced = ("adam_beta1", "adam_beta2")
    unlisted = ("adam_epsilon", "max_skipped_steps")

    optim: str = flag("adamw_torch_fused", "adamw_torch_fused, or muon (docs/optimisation.md).")
    learning_rate: float = flag(4e-4, "Peak learning rate (ESM-2: 4e-4; 15B: 1.6e-4).")
    lr_scheduler_type: str = flag(
        "esm2",
        "esm2 (linear to a tenth at 90 % of the run), linear, cosine, annealing (the FSDP guide's cosine), constant, "
        "constant_with_warmup, polynomial or inverse_sqrt.",
    )
    warmup_steps: float | None = flag(None, "Steps, or a fraction of the run below 1. Default: 2000, at most 5 %.")
    weight_decay: float = flag(0.01, "On matrices and embeddings; never on biases and norms.")
    adam_beta1: float = flag(0.9, "AdamW's first moment.")
    adam_beta2: float = flag(0.98, "AdamW's second moment.")
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon.")
    max_grad_norm: float = flag(1.0, "Clip the global gradient norm to this; 0: don't.")
    max_skipped_steps: int = flag(
        5, "Steps with a NaN or infinite loss or gradient norm are skipped; after this many in a row the run stops."
    )

    def schedule(self, total_steps: int) -> Callable[[int], float]:
        """step (0-based, the one about to be taken) -> learning rate."""
        return lr_schedule(self, total_steps)

    def resolve(self) -> OptimizerFlags:
        return replace(self, optim="adamw_torch_fused") if self.optim == "adamw_torch" else self

    def check(self) -> None:
        self.require_choice("optim", OPTIMIZERS)
        for name in ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"--{name} {getattr(self, name)}: must be a number that is not negative")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)}: must be at least 0 and below 1")
        self.require_at_least(1, "max_skipped_steps")
        self.schedule(total_steps=1000)  # an unknown --lr_scheduler_type is a UserError


class AdamW(torch.optim.AdamW):
    """torch's AdamW, updating the local shards of DTensors directly: the same bits.

    DTensor's dispatch for each tensor takes most of the host time of a sharded step.
    """

    def _init_group(self, group: dict, *lists: list[torch.Tensor]):  # pyrefly: ignore[bad-override]  # of any version
        result = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return result


def build_optimizer(
    built: BuiltModel, flags: OptimizerFlags, strategy: Strategy, world: World, bf16: bool
) -> torch.optim.Optimizer:
    """The optimiser of --optim over fp32 master weights; all ranks together. bf16: whether the run computes in it."""
    if flags.optim == "muon":
        from extras.muon import Muon

        if not (matrices := built.model.hidden_matrices()):
            raise UserError("--optim muon: this family does not name its hidden matrices: leave adamw_torch_fused")
        return Muon(built.weights, matrices, flags, strategy, world, torch.bfloat16 if bf16 else torch.float32)
    return build_adamw(built.weights.parameters(), flags)


def build_adamw(parameters: Iterable[nn.Parameter], flags: OptimizerFlags) -> AdamW:
    return AdamW(adamw_groups(parameters, flags), lr=flags.learning_rate, fused=True)


def adamw_groups(parameters: Iterable[nn.Parameter], flags: OptimizerFlags) -> list[dict[str, Any]]:
    """No decay on biases and norms (everything with one dimension)."""
    trained = [p for p in parameters if p.requires_grad]
    options = {"betas": (flags.adam_beta1, flags.adam_beta2), "eps": flags.adam_epsilon}
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": flags.weight_decay, **options},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0, **options},
    ]


def set_hyperparameters(optimizer: torch.optim.Optimizer, flags: OptimizerFlags) -> None:
    """Replace a checkpoint's hyperparameters by those of the flags; the learning rate is set at every step."""
    decays = (flags.weight_decay, 0.0, flags.weight_decay)  # the third group is Muon's
    for group, weight_decay in zip(optimizer.param_groups, decays, strict=False):
        group["weight_decay"] = weight_decay
        if "betas" in group:
            group["eps"] = flags.adam_epsilon
            group["betas"] = type(group["betas"])((flags.adam_beta1, flags.adam_beta2))


def warmup_steps(flags: OptimizerFlags, total_steps: int) -> int:
    if flags.warmup_steps is None:
        return min(ESM2_WARMUP_STEPS, total_steps // 20)
    # As in transformers' TrainingArguments.get_warmup_steps.
    return math.ceil(flags.warmup_steps * total_steps) if flags.warmup_steps < 1 else int(flags.warmup_steps)


def lr_schedule(flags: OptimizerFlags, total_steps: int) -> Callable[[int], float]:
    """step (0-based, the one about to be taken) -> learning rate.

    `esm2` reaches the peak with the last step of the warm-up; the others, but for `annealing`, are transformers' own.
    """
    if flags.lr_scheduler_type == "annealing":
        return annealing(flags, total_steps)
    warmup = warmup_steps(flags, total_steps)
    if flags.lr_scheduler_type == "esm2":
        decay_end = max(ESM2_DECAY_END * total_steps, warmup + 1)

        def esm2(step: int) -> float:
            if step < warmup:
                return flags.learning_rate * (step + 1) / warmup
            progress = min(1.0, (step - warmup) / (decay_end - warmup))
            return flags.learning_rate * (1 - (1 - ESM2_FINAL_FRACTION) * progress)

        return esm2
    from transformers import SchedulerType, get_scheduler  # imported here: takes a second

    try:
        kind = SchedulerType(flags.lr_scheduler_type)
        scratch = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=flags.learning_rate)
        scheduler = get_scheduler(kind, scratch, num_warmup_steps=warmup, num_training_steps=total_steps)
        if not isinstance(scheduler, LambdaLR):
            raise ValueError("not a function of the step alone")
    except (ValueError, TypeError) as error:
        raise UserError(
            f"--lr_scheduler_type {flags.lr_scheduler_type}: choose esm2, linear, cosine, annealing, constant, "
            "constant_with_warmup, polynomial or inverse_sqrt"
        ) from error
    factor = scheduler.lr_lambdas[0]
    return lambda step: flags.learning_rate * factor(step)


def annealing(
    flags: OptimizerFlags, total_steps: int, min_lr: float = 0.0, decay_steps: int | None = None
) -> Callable[[int], float]:
    """The rates of AnnealingLR with decay_style cosine, in awsome-distributed-training's FSDP example.

    The first step is taken at 0, and the peak comes with the step after the warm-up, whose length is not rounded. The
    cosine falls to 0 over all steps, not over those after the warm-up, and is cut off at min_lr. decay_steps: their
    --lr_decay_iters. A warm-up of the whole run or longer, where their rates are 0 or negative, rises to the end here.
    """
    peak, end, given = flags.learning_rate, decay_steps or total_steps, flags.warmup_steps
    warmup = given * end if given is not None and given < 1 else warmup_steps(flags, total_steps)

    def rate(step: int) -> float:
        taken = min(step, end - warmup) if warmup < end else step
        if warmup > 0 and step <= warmup:
            return peak * taken / warmup
        return max(peak / 2 * (math.cos(math.pi * (taken - warmup) / end) + 1), min_lr)

    return rate
